"""The results of a study: from run directories to JSON, and from JSON to a picture and a table."""

import io
import math
import platform
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from bench import kit
from trainer_backend.core.statistics import mean_interval
from trainer_backend.pages.report import last_minus_first, stage_totals
from trainer_backend.pages.story import Story, read_story
from trainer_backend.rundir.layout import open_run

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")  # of Okabe and Ito, for the colour-blind
_INK, _FAINT = "#1f2328", "#d0d7de"
_SETTINGS: dict[Any, Any] = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.axisbelow": True, "grid.linewidth": 0.6, "legend.frameon": False, "legend.fontsize": 9,
    "lines.linewidth": 1.8, "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _INK,
    "xtick.color": _INK, "ytick.color": _INK, "grid.color": _FAINT,
}  # fmt: skip


def whole_numbers() -> MaxNLocator:
    """Return a locator of ticks at whole numbers, for an axis of counts."""
    return MaxNLocator(integer=True, steps=[1, 2, 5, 10])


def png(draw: Callable[[Figure], None], *, height_in: float) -> bytes:
    """Return a PNG of the figure that `draw` fills."""
    file = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(5.6, height_in), dpi=150, layout="constrained")
        draw(figure)
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


PACKAGES = ("turnwise", "torch", "transformers", "numpy", "crafter")
MARKERS = "osD^v"
# Further metrics of evaluations, in environments that have them.
FURTHER = ("crafter_score",)
# Further metrics of iterations, in a mixture.
MIXED = (
    "mixture/alpha", "rollout/policy_choice", "mixture/ess", "mixture/counted_share",
    "actor/importance_weight_mean", "mixture/fixed/outcome_reward",
)  # fmt: skip
# A metric of conversations with an interaction (docs/metrics.md).
_BY_TURN = "interaction/score_by_turn"
# Settings over configs/crafter_cpu.toml: groups of siblings, and its former credit and rates, for comparison.
IN_GROUPS = (
    "training.group_size=4", "training.critic=head", "training.learning_rate_final=0.2",
    "training.entropy_coef=0.003", "algorithm.gae_lambda=0.95",
)  # fmt: skip
# Settings for --quick over the same job: they only show that every part works.
QUICK = (
    "training.iterations=2", "rollout.episodes_per_batch=8", "training.group_size=4", "rollout.max_turns=5",
    "evaluation.instances=8", "evaluation.every_n_iters=1", "warmup.episodes=48", "warmup.epochs=6",
    "warmup.batch_decisions=32",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the variants that a study compares.

    label: the arm's name in pictures and tables.
    switches: each `table.key=value`; they override the job and the settings of the study.
    """

    label: str
    switches: Sequence[str]


@dataclass(frozen=True, slots=True)
class Study:
    """Arms that start from one checkpoint, a seed at a time, on one job.

    name: the name of the folder in runs/ and of the files in bench/results/.
    arms: the arms by name, in the order in which they are run.
    against: the arm whose result is subtracted from the results of all others.
    settings: the settings of all arms, each `table.key=value`.
    quick: the settings with --quick, in place of `settings`.
    job: the job file that the settings and switches change.
    measure: the metric that arms are compared by, without its prefix `episode/` or `eval/`.
    measured: the meaning of `measure`, in words.
    from_the_start: whether each arm runs the whole job, with the job's own warm-up, if it has one.
    own_warm_starts: whether an arm's switches hold in its warm-up too; each arm then has its own checkpoint.
    models: makes the models that settings name as {name} in the study's folder; returns their paths by name.
    """

    name: str
    title: str
    arms: Mapping[str, Arm]
    against: str
    settings: Sequence[str]
    quick: Sequence[str] = QUICK
    job: str = "configs/crafter_cpu.toml"
    measure: str = "unique_achievements"
    measured: str = "unique achievements, held out"
    from_the_start: bool = False
    own_warm_starts: bool = False
    models: "Callable[[Study, Path, Sequence[str]], Mapping[str, str]] | None" = None


def collect(
    study: Study, folder: Path, settings: Sequence[str], earlier: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the results of all finished and running arms, from the disk and from an earlier results file.

    Runs that are not on disk are taken from `earlier`, if they had the same job, settings and switches. So a
    study may be run a few seeds at a time, on any machine. Arms that share a seed's warm start are compared
    with each other, so they all come from the same machine.
    """
    made_on = {
        "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "machine": kit.describe_machine(),
    }
    runs = {
        arm: {
            path.parent.name.removeprefix("seed_"): curve(path, study.measure) | made_on
            for path in sorted(folder.glob(f"seed_*/{arm}"))
            if (path / "run.json").exists()
        }
        for arm in study.arms
    }
    made_with = {
        "study": study.name,
        "job": study.job,
        "tables": tomllib.loads((kit.ROOT / study.job).read_text(encoding="utf-8")),
        "settings": list(settings),
    }
    if made_with.items() <= earlier.items():
        shares_warm_start = not (study.from_the_start or study.own_warm_starts)
        seeds_here = {seed for by_seed in runs.values() for seed in by_seed}
        for arm, made in study.arms.items():
            here = seeds_here if shares_warm_start else runs[arm].keys()
            if earlier["switches"].get(arm) == list(made.switches):
                # Older files have one machine for all runs.
                elsewhere = {name: earlier[name] for name in made_on if name in earlier}
                kept = earlier["arms"][arm].items()
                runs[arm] |= {seed: elsewhere | run for seed, run in kept if seed not in here}
    runs = {arm: dict(sorted(by_seed.items())) for arm, by_seed in runs.items() if by_seed}
    return {
        **made_with,
        "switches": {arm: list(study.arms[arm].switches) for arm in runs},
        "seeds": sorted({int(seed) for by_seed in runs.values() for seed in by_seed}),
        "arms": runs,
        "summary": summary(runs, against=study.against, measure=study.measure),
    }


def curve(path: Path, measure: str) -> dict[str, Any]:
    """Return the figures of a run: evaluations with intervals, training curve, seconds by stage."""
    story = read_story(open_run(path))
    return {
        "evaluations": [
            {
                "iteration": row["iteration"],
                measure: row[f"eval/{measure}"],
                "low": row[f"eval/{measure}_low"],
                "high": row[f"eval/{measure}_high"],
                **{name: row[f"eval/{name}"] for name in FURTHER if f"eval/{name}" in row},
                "episodes": row["eval/episodes"],
            }
            for row in story.evaluations
        ],
        "training": [
            {
                "iteration": row["iteration"],
                measure: row.get(f"episode/{measure}"),  # None if the actor played nothing
                **{name: row[name] for name in MIXED if name in row},
                "entropy": row.get("loss/entropy"),
                "decisions": _decisions(row),
                "steps": int(row["optim/steps"]),
            }
            for row in story.iterations
        ],
        "last_minus_first": None if (gain := last_minus_first(story)) is None else asdict(gain),
        # The success rate by turn in the last iteration, if answers are scored 0 or 1.
        _BY_TURN: story.iterations[-1].get(_BY_TURN) if story.iterations else None,
        "seconds": {name: round(value, 1) for name, value in stage_totals(story)},
        "iteration_s": _iteration_s(story),
    }


def _iteration_s(story: Story) -> float | None:
    """Return the median seconds from one iteration's end to the next, if no evaluation is between them."""
    evaluated = {row["iteration"] for row in story.evaluations}
    took = [
        row["timeline/learn_end"] - before["timeline/learn_end"]
        for before, row in pairwise(story.iterations)
        if before["iteration"] not in evaluated and "timeline/learn_end" in before
    ]
    return round(median(took), 2) if took else None


def _decisions(row: Mapping[str, Any]) -> int:
    """Count the decisions of an iteration: those of the actor, of branches, and of a fixed policy.

    A count of requests would be too low if a resumed run had played a part of the iteration before.
    """
    # The metrics of branches and of fixed policies are absent if none has played.
    episodes, of_each = row.get("mixture/fixed/episodes", 0.0), row.get("mixture/fixed/decisions", 0.0)
    return int(row["decision/count"] + row.get("branch/decisions", 0.0)) + round(episodes * of_each)


def summary(runs: Mapping[str, Any], *, against: str, measure: str) -> dict[str, Any]:
    """Return each arm's result and gain at the last evaluation, and its difference to `against`.

    The gain is over the first evaluation; differences are paired by seed. `reached` has for each seed the
    iteration of the first evaluation that is as good as the last one of `against`, or null.

    Intervals are over seeds (Student's t), so they hold for further seeds; one seed has no interval.
    """
    ends = {
        arm: {
            seed: (found["evaluations"][0], found["evaluations"][-1])
            for seed, found in by_seed.items()
            if len(found["evaluations"]) > 1
        }
        for arm, by_seed in runs.items()
    }
    told: dict[str, Any] = {
        arm: {
            "before": _interval([first[measure] for first, _ in by_seed.values()]),
            "final": _interval([last[measure] for _, last in by_seed.values()]),
            "gain": _interval([last[measure] - first[measure] for first, last in by_seed.values()]),
            "reached": [
                _reached(runs[arm][seed], runs.get(against, {}).get(seed), measure) for seed in by_seed
            ],
            "decisions": [sum(row["decisions"] for row in runs[arm][seed]["training"]) for seed in by_seed],
            "decisions_an_iteration": _mean_of(runs[arm], by_seed, "decisions"),
            "steps_an_iteration": _mean_of(runs[arm], by_seed, "steps"),
            "iteration_s": [runs[arm][seed]["iteration_s"] for seed in by_seed],
        }
        for arm, by_seed in ends.items()
    }
    base = ends.get(against, {})
    for arm, by_seed in ends.items():
        if arm != against and base:
            told[f"{arm}_minus_{against}"] = _interval(
                [
                    last[measure] - base[seed][1][measure]
                    for seed, (_, last) in by_seed.items()
                    if seed in base and base[seed][1]["iteration"] == last["iteration"]
                ]
            )
    return told


def _reached(run: Mapping[str, Any], base: Mapping[str, Any] | None, measure: str) -> int | None:
    if not base or not base["evaluations"]:  # another process has begun the run
        return None
    level = base["evaluations"][-1][measure]
    return next((row["iteration"] for row in run["evaluations"] if row[measure] >= level), None)


def table(study: Study, outcome: Mapping[str, Any]) -> Table:
    """Return the summary for a terminal: a line for each arm, with 95 % intervals over seeds."""
    told = outcome["summary"]
    heads = ("before", "after", "gain", f"minus {study.against}", "reached after", "decisions", "steps")
    lines = Table(study.measured, *heads)
    for arm in outcome["arms"]:
        found = told[arm]
        cells = (found["before"], found["final"], found["gain"], told.get(f"{arm}_minus_{study.against}"))
        reached = ", ".join("-" if one is None else str(one) for one in found["reached"])
        counts = (_figure(found[f"{name}_an_iteration"]) for name in ("decisions", "steps"))
        lines.add_row(study.arms[arm].label, *map(_cell, cells), reached, *counts)
    return lines


def draw(study: Study, outcome: Mapping[str, Any], path: Path) -> None:
    """Draw held-out curves, or for many arms their gains with intervals, and write the PNG."""
    few = len(study.arms) <= len(COLOURS)
    fill = _draw_curves if few else _draw_gains
    height_in = 3.8 if few else 1.0 + 0.3 * len(study.arms)
    path.write_bytes(png(lambda figure: fill(study, outcome, figure), height_in=height_in))


def _draw_gains(study: Study, outcome: Mapping[str, Any], figure: Figure) -> None:
    """Draw a line for each arm, the largest gain on top: a dot for each seed, the mean and its interval."""
    axes = figure.subplots()
    told, of_seeds = outcome["summary"], outcome["arms"]
    arms = sorted(of_seeds, key=lambda arm: told[arm]["gain"]["mean"] or 0.0)
    for height, arm in enumerate(arms):
        ends = [run["evaluations"] for run in of_seeds[arm].values()]
        gains = [rows[-1][study.measure] - rows[0][study.measure] for rows in ends if len(rows) > 1]
        axes.plot(gains, [height] * len(gains), "o", color=COLOURS[0], markersize=4, alpha=0.6)
        gain = told[arm]["gain"]
        if gain["low"] is not None:
            axes.plot([gain["low"], gain["high"]], [height, height], color=COLOURS[0])
            axes.plot(gain["mean"], height, "|", color=_INK, markersize=12)
    axes.axvline(0.0, color=_INK, linewidth=0.8)
    axes.set_yticks(range(len(arms)), [study.arms[arm].label for arm in arms])
    axes.set_xlabel(f"gain in {study.measured}\nby seed, mean and its 95 %")


def _draw_curves(study: Study, outcome: Mapping[str, Any], figure: Figure) -> None:
    """Draw for each arm a thin line with its interval for each seed, and a thick line for the mean."""
    axes = figure.subplots()
    for index, (arm, made) in enumerate(study.arms.items()):
        by_seed = outcome["arms"].get(arm, {})
        colour, marker = COLOURS[index], MARKERS[index]
        for found in by_seed.values():
            _thin(axes, found["evaluations"], colour, study.measure)
        x, mean = mean_curve([found["evaluations"] for found in by_seed.values()], study.measure)
        if x:
            steps = _figure(outcome["summary"][arm]["steps_an_iteration"])
            label = f"{made.label} (mean of {len(by_seed)}; {steps} steps an iteration)"
            axes.plot(x, mean, color=colour, marker=marker, linewidth=2.6, label=label)
    axes.set_xlabel("iterations")
    axes.set_ylabel(study.measured)
    axes.xaxis.set_major_locator(whole_numbers())
    axes.legend(loc="best", title="thin: one seed, with its 95 %")


def mean_curve(curves: Sequence[Sequence[dict[str, Any]]], measure: str) -> tuple[list[int], list[float]]:
    """Return the iterations that all curves have, and the mean over the curves at each of them."""
    tables = [{row["iteration"]: row[measure] for row in rows} for rows in curves]
    shared = sorted(set.intersection(*map(set, tables))) if tables else []
    return shared, [sum(table[at] for table in tables) / len(tables) for at in shared]


def _thin(axes: Any, rows: Sequence[dict[str, Any]], colour: str, measure: str) -> None:
    x, y = [row["iteration"] for row in rows], [row[measure] for row in rows]
    axes.plot(x, y, color=colour, linewidth=0.8, alpha=0.6)
    low, high = ([math.nan if row[name] is None else row[name] for row in rows] for name in ("low", "high"))
    axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)


def _cell(found: Mapping[str, Any] | None) -> str:
    if found is None or found["mean"] is None:
        return "-"
    if found["low"] is None:
        return f"{found['mean']:.2f}"
    return f"{found['mean']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def _mean_of(of_arm: Mapping[str, Any], seeds: Iterable[str], name: str) -> float | None:
    """Return the mean of `name` over the iterations of these seeds; None if there is none yet."""
    values = [row[name] for seed in seeds for row in of_arm[seed]["training"]]
    return sum(values) / len(values) if values else None


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean over finished seeds with its 95 % interval; null for fewer than two seeds."""
    if not values:
        return {"mean": None, "low": None, "high": None, "seeds": 0}
    found = mean_interval(values)
    return {"mean": found.mean, "low": found.low, "high": found.high, "seeds": found.count}
