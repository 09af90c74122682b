"""bench/scale.py's model against real runs: the iteration times of `make study-ahead`, said beforehand.

    python -m bench.scale_validation [--runs runs/ahead] [--results bench/results/scale_validation.json]

For each run of the study: the costs are means of its own rows (seconds of a decision at the engine, of an
update, of credit and of a publish) and the lengths of its own episodes. The simulation then says what an
iteration takes, how long the learner waits for rollouts in it, and how much of it both work. What is held
against the run is thus the model of how stages share out and overlap, and not the costs. The seconds of a
decision are those of 64 open episodes divided by 64: an engine without an idle moment.
"""

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench import kit
from bench.scale_model import CpuCost, Speed, Turn
from bench.scale_run import Cluster, Costs, simulated
from trainer_backend.rundir.layout import RunDirectory, open_run
from trainer_backend.rundir.rollout_files import read_rollouts

_ITERATIONS = 12
_NOTHING = CpuCost(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Episodes of a run, in place of drawn ones.

    Attributes:
        decisions: of each episode.
        environment_s: of a decision, on average.
    """

    decisions: tuple[int, ...]
    environment_s: float

    def turns(self, seed: str) -> list[Turn]:
        """Of one of them: the same for the same seed."""
        return [Turn(0, 1, self.environment_s)] * random.Random(seed).choice(self.decisions)


def lengths_of(directory: RunDirectory, iterations: Sequence[int]) -> Iterator[int]:
    for iteration in iterations:
        for rollout in read_rollouts(directory.rollouts_file(f"iteration_{iteration}")):
            if rollout.trajectory is not None:
                yield len(rollout.trajectory.steps)


def quiet_rows(directory: RunDirectory) -> list[dict[str, Any]]:
    """Of iterations after the first one with no evaluation before or in them."""
    rows = list(directory.metrics())
    evaluated = {row["iteration"] for row in rows if row["kind"] == "evaluation"}
    iterations = [row for row in rows if row["kind"] == "iteration"]
    return [row for row in iterations[2:] if not {row["iteration"], row["iteration"] - 1} & evaluated]


def measured_s(directory: RunDirectory, rows: Sequence[dict[str, Any]]) -> float:
    """Median time between the ends of two iterations."""
    ends = {
        row["iteration"]: row["timeline/learn_end"] for row in directory.metrics() if "loss/approx_kl" in row
    }
    return median(ends[row["iteration"]] - ends[row["iteration"] - 1] for row in rows)


def compared(directory: RunDirectory) -> dict[str, float]:
    """What the model says of a run, and what the run took."""
    job, rows = directory.job(), quiet_rows(directory)
    lengths = tuple(lengths_of(directory, [row["iteration"] for row in rows]))
    decisions = len(lengths) / len(rows) * fmean(lengths)
    places = job.rollout.max_concurrent_rollouts

    def mean(name: str) -> float:
        return fmean(row[name] for row in rows)

    costs = Costs(
        Recorded(lengths, mean("time/environment_s") / decisions),  # type: ignore[arg-type]
        task_app=_NOTHING,
        gateway=_NOTHING,
        collect=_NOTHING,
        credit=CpuCost(1e6 * mean("time/credit_s") / decisions, 0.0),
        update_token_s=mean("time/update_s") / decisions,  # a token a decision
        speed=Speed(
            weights_s=0.0, row_s=mean("time/policy_s") / decisions / places, prompt_s=0.0,
            cached_s=0.0, room=float("inf"), max_running=places, load_s=mean("time/publish_s"),
        ),
    )  # fmt: skip
    staleness = job.training.max_staleness
    cluster = Cluster(1, 1, gateways=1, task_apps=1, places=places, max_staleness=staleness)
    figures = simulated(cluster, costs, job.rollout.episodes_per_batch, _ITERATIONS)
    seconds = measured_s(directory, rows)
    return {
        "decisions": decisions,
        "policy_ms": 1e3 * mean("time/policy_s") / decisions,
        "update_s": mean("time/update_s"),
        "predicted_s": figures.iteration_s,
        "measured_s": seconds,
        "predicted_to_measured": figures.iteration_s / seconds,
        "predicted_learner_share": figures.busy["learner"],
        "measured_learner_share": mean("time/update_s") / seconds,
    }


def main() -> int:
    options = kit.options(
        __doc__,
        ("--runs", kit.ROOT / "runs" / "ahead", "the folder of `make study-ahead`"),
        ("--results", kit.ROOT / "bench" / "results" / "scale_validation.json"),
    )
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(Path(options.runs).glob("seed_*/*/metrics.jsonl")):
        if path.parent.name == "warm_start":
            continue
        figures = {name: float(f"{value:.4g}") for name, value in compared(open_run(path.parent)).items()}
        found.setdefault(path.parent.name, {})[path.parent.parent.name] = figures
        print(path.parent.parent.name, path.parent.name, figures, flush=True)
    if not found:
        raise SystemExit(f"{options.runs} has no runs of the study; `make study-ahead` makes them")
    options.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    ratios = [run["predicted_to_measured"] for arm in found.values() for run in arm.values()]
    print(f"predicted / measured: median {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
