"""What the study of reward modes found: from run directories to JSON, and from there to a picture."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from trainer_backend.core.statistics import mean_interval
from trainer_backend.report.charts import Theme, picture, whole_numbers
from trainer_backend.report.story import read_story
from trainer_backend.report.training_charts import stage_totals
from trainer_backend.rundir.layout import open_run

UNIQUE = "eval/unique_achievements"
PACKAGES = ("turnwise", "torch", "transformers", "numpy", "crafter")
COLOURS = {"decision_stepwise": 0, "off": 1}
LABELS = {"decision_stepwise": "a reward a decision", "off": "outcome alone"}


def collect(
    folder: Path, seeds: Sequence[int], arms: Sequence[str], settings: Sequence[str]
) -> dict[str, Any]:
    """Everything that the finished and the running arms have on disk."""
    runs = {
        arm: {str(seed): curve(folder / f"seed_{seed}" / arm) for seed in seeds if _begun(folder, seed, arm)}
        for arm in arms
    }
    return {
        "study": "reward_modes",
        "job": "configs/crafter_cpu.toml",
        "settings": list(settings),
        "seeds": list(seeds),
        "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "arms": runs,
        "summary": summary(runs),
    }


def curve(path: Path) -> dict[str, Any]:
    """One run: its evaluations with intervals, its training curve, its seconds by stage."""
    story = read_story(open_run(path))
    return {
        "evaluations": [
            {
                "iteration": row["iteration"],
                "unique_achievements": row[UNIQUE],
                "low": row[f"{UNIQUE}_low"],
                "high": row[f"{UNIQUE}_high"],
                "crafter_score": row["eval/crafter_score"],
                "episodes": row["eval/episodes"],
            }
            for row in story.evaluations
        ],
        "training": [
            {
                "iteration": row["iteration"],
                "unique_achievements": row["episode/unique_achievements"],
                "entropy": row.get("loss/entropy"),
            }
            for row in story.iterations
        ],
        "seconds": {name: round(value, 1) for name, value in stage_totals(story)},
    }


def summary(runs: dict[str, Any]) -> dict[str, Any]:
    """Gain over the warm start at the last evaluation, a value a seed; and the arms' difference, paired.

    Intervals are over seeds (Student's t), so they speak of other seeds; with one seed there are none.
    """
    last = {
        arm: {
            seed: found["evaluations"][-1] for seed, found in by_seed.items() if len(found["evaluations"]) > 1
        }
        for arm, by_seed in runs.items()
    }
    told: dict[str, Any] = {}
    for arm, by_seed in last.items():
        gains = [
            row["unique_achievements"] - runs[arm][seed]["evaluations"][0]["unique_achievements"]
            for seed, row in by_seed.items()
        ]
        told[arm] = {
            "final": _interval([row["unique_achievements"] for row in by_seed.values()]),
            "gain": _interval(gains),
        }
    first, second = last
    both = [seed for seed in last[first] if seed in last[second]]
    differences = [
        last[first][seed]["unique_achievements"] - last[second][seed]["unique_achievements"]
        for seed in both
        if last[first][seed]["iteration"] == last[second][seed]["iteration"]
    ]
    return told | {f"{first}_minus_{second}": _interval(differences)}


def draw(outcome: dict[str, Any], path: Path) -> None:
    """Held-out curves: a thin line a seed with its interval, a thick one for the mean."""

    def figure_of(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        for arm, by_seed in outcome["arms"].items():
            colour, marker = theme.series[COLOURS[arm]], "os"[COLOURS[arm]]
            for found in by_seed.values():
                _thin(axes, found["evaluations"], colour)
            x, mean = mean_curve([found["evaluations"] for found in by_seed.values()])
            label = f"{LABELS[arm]} (mean of {len(by_seed)})"
            axes.plot(x, mean, color=colour, marker=marker, linewidth=2.6, label=label)
        axes.set_xlabel("iterations")
        axes.set_ylabel("unique achievements, held-out worlds")
        axes.xaxis.set_major_locator(whole_numbers())
        axes.legend(loc="best", title="thin: one seed, with its 95 %")

    path.write_bytes(picture(path.stem, "", figure_of, height_in=3.8).light)


def mean_curve(curves: Sequence[Sequence[dict[str, Any]]]) -> tuple[list[int], list[float]]:
    """Mean over the curves, at iterations that all of them have."""
    tables = [{row["iteration"]: row["unique_achievements"] for row in rows} for rows in curves]
    shared = sorted(set.intersection(*map(set, tables))) if tables else []
    return shared, [sum(table[at] for table in tables) / len(tables) for at in shared]


def _thin(axes: Any, rows: Sequence[dict[str, Any]], colour: str) -> None:
    x, y = [row["iteration"] for row in rows], [row["unique_achievements"] for row in rows]
    axes.plot(x, y, color=colour, linewidth=0.8, alpha=0.6)
    low, high = ([_number(row[name]) for row in rows] for name in ("low", "high"))
    axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _begun(folder: Path, seed: int, arm: str) -> bool:
    return (folder / f"seed_{seed}" / arm / "run.json").exists()


def _interval(values: Sequence[float]) -> dict[str, Any]:
    """Of finished seeds; null where there is none yet, or only one."""
    if not values:
        return {"mean": None, "low": None, "high": None, "seeds": 0}
    found = mean_interval(values)
    return {"mean": found.mean, "low": found.low, "high": found.high, "seeds": found.count}
