"""The learning curve of one run with its intervals: from its metrics to JSON and a picture.

    python -m bench.learning_curve FOLDER [--name gpu_curve]

FOLDER is a run, or what came back of one from another machine: its `metrics.jsonl`, and beside it or in
`rollouts/` its evaluations, of which a row a game is enough. Writes bench/results/NAME.json and NAME.png.

Intervals are 95 %, over games of one run: they say nothing of other seeds. Gains are of later
evaluations over the first one, world by world. Training games are those before an iteration's update.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench import kit
from bench.study_results import COLOURS, png, whole_numbers
from trainer_backend.evaluation.best import find_comparable, paired_difference
from trainer_backend.rundir.files import read_lines

# What an evaluation tells, each with its interval; and what people have of it (Hafner 2021, BALROG).
MEASURES = ("unique_achievements", "crafter_score", "env_reward", "progress")
PEOPLE = {"crafter_score": 50.5}
_ITERATION = (
    "decision/count", "loss/entropy", "loss/kl_to_proximal", "optim/steps", "optim/lr", "optim/certain_frac",
    "value/loss",
    "mismatch/logprob_max", "mismatch/logprob_mean", "policy/staleness_mean", "perf/collect_decisions_per_s",
    "time/collect_s", "time/credit_s", "time/update_s", "time/publish_s", "time/wait_collect_s",
    "time/wait_learner_s", "timeline/collect_start", "timeline/learn_end",
)  # fmt: skip

Row = dict[str, Any]


def figures_of(rows: Sequence[Row], rollouts: Path) -> dict[str, Any]:
    """The curve of a run.

    Args:
        rows: of its metrics.
        rollouts: the folder of its evaluations' games.
    """
    iterations, evaluations = _kind(rows, "iteration"), _kind(rows, "evaluation")
    numbers = [row["iteration"] for row in find_comparable(evaluations)]
    first, *others = [rollouts / f"evaluation_{number}.parquet" for number in numbers] or [rollouts]
    differences = {
        number: paired_difference(first, other)
        for number, other in zip(numbers[1:], others, strict=True)
        if first.exists() and other.exists()
    }
    return {
        "teacher": [_measured(row) for row in _kind(rows, "teacher")],
        "imitation": _kind(rows, "warmup"),
        "evaluations": [_measured(row) | {"seconds": row["time/evaluate_s"]} for row in evaluations],
        "gains_world_by_world": {
            str(number): asdict(difference)
            for number, difference in differences.items()
            if difference is not None
        },
        "training": [_trained(row) for row in iterations],
    }


def _kind(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


def _measured(row: Row) -> Row:
    measured = {"iteration": row["iteration"], "episodes": row["eval/episodes"]}
    for name in MEASURES:
        measured |= {f"{name}{end}": row[f"eval/{name}{end}"] for end in ("", "_low", "_high")}
    return measured


def _trained(row: Row) -> Row:
    """The outcome of Crafter is the number of unique achievements."""
    outcome = {
        f"unique_achievements{end}": row[f"episode/outcome_reward{end}"] for end in ("", "_low", "_high")
    }
    told = {name: row[name] for name in _ITERATION if name in row}
    return {"iteration": row["iteration"], "episodes": row["episode/count"]} | outcome | told


def draw(figures: dict[str, Any], path: Path) -> None:
    """Above, the score of the evaluations beside people's; below, achievements, of training too."""

    def figure_of(figure: Figure) -> None:
        above, below = figure.subplots(2, 1, sharex=True)
        held_out, training = figures["evaluations"], figures["training"]
        _bars(above, held_out, "crafter_score", COLOURS[0], "o-", "held-out games")
        _line(above, PEOPLE["crafter_score"], COLOURS[1], "people")
        _bars(below, training, "unique_achievements", COLOURS[2], "s", "training games")
        _bars(below, held_out, "unique_achievements", COLOURS[0], "o-", "held-out games")
        for row in figures["teacher"]:
            _line(above, row["crafter_score"], COLOURS[3], "the teacher")
            _line(below, row["unique_achievements"], COLOURS[3], "the teacher")
        above.set_ylabel("Crafter score, %")
        below.set_ylabel("unique achievements")
        below.set_xlabel("iterations of RL, after imitation; bars: 95 % over games")
        below.xaxis.set_major_locator(whole_numbers())
        for axes in (above, below):
            axes.legend(loc="best")

    path.write_bytes(png(figure_of, height_in=5.6))


def _bars(axes: Any, rows: Sequence[Row], name: str, colour: str, style: str, label: str) -> None:
    if not rows:
        return
    x, y = [row["iteration"] for row in rows], [row[name] for row in rows]
    ends = [[row[f"{name}{end}"] for row in rows] for end in ("_low", "_high")]
    # A figure without an interval is a point without a bar.
    lower, upper = [
        [0.0 if bound is None else abs(bound - mean) for bound, mean in zip(bounds, y, strict=True)]
        for bounds in ends
    ]
    axes.errorbar(x, y, [lower, upper], fmt=style, color=colour, capsize=3, markersize=4, label=label)


def _line(axes: Any, level: float, colour: str, label: str) -> None:
    axes.axhline(level, color=colour, linestyle="--", linewidth=1.2, label=label)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", default="gpu_curve", help="of the files in --out")
    parser.add_argument("--out", type=Path, default=kit.ROOT / "bench" / "results")
    parser.add_argument("--about", default="", help="a sentence about the machine, for the JSON")
    options = parser.parse_args(arguments)
    stored = options.folder / "rollouts"
    rows = read_lines(options.folder / "metrics.jsonl")
    figures = figures_of(rows, stored if stored.exists() else options.folder)
    (options.out / f"{options.name}.json").write_text(
        json.dumps({"about": options.about, **figures}, indent=1) + "\n", encoding="utf-8"
    )
    draw(figures, options.out / f"{options.name}.png")
    for row in figures["evaluations"]:
        cells = (
            f"{name} {row[name]:.2f} ({row[f'{name}_low']:.2f} to {row[f'{name}_high']:.2f})"
            for name in MEASURES
        )
        print(f"after iteration {row['iteration']}, {row['episodes']} games: {', '.join(cells)}")
    for number, gain in figures["gains_world_by_world"].items():
        print(f"gain at {number}: {gain['mean']:+.2f} ({gain['low']:+.2f} to {gain['high']:+.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
