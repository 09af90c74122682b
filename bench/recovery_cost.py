"""What an iteration of the demo pays for being killed at any moment: its spool, its checkpoint, its records.

    python -m bench.recovery_cost [--limit 0.01] [--quick]

An iteration of configs/crafter_cpu.toml is played (a shorter warm-up; 64 episodes of 50 decisions). Then all
that `training.recovery_every = 1` and the spool add to it is done again with its rollouts and its learner: a
checkpoint with AdamW's moments, flushed to disk, and the removal of the one before; the digest of the plan,
each rollout in the spool; the line of the ledger, state.json as often as it is written, run.log. The least
time of some repeats is held against that iteration, as CPU time of the process (that of the task app is left
out, so the share is rather too large) and as time on the wall, where a disk makes one wait.

Exit code 1 where one of the two shares of the whole is above the limit.
"""

import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench import kit
from bench.demo_iteration import QUICK, Played, played_in
from trainer_backend import job_parts, learner_parts
from trainer_backend.collect.plan import Inference
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.parts import Progress
from trainer_backend.run.checkpointing import Saving
from trainer_backend.rundir.layout import RunDirectory, open_run
from trainer_backend.rundir.spool import LedgerEntry, Spool, append_to_ledger
from trainer_backend.rundir.state import RunState, append_log, write_state

LIMIT = 0.01


def costs(found: Played, run: RunDirectory) -> dict[str, kit.Cost]:
    """The costs of recovery in one iteration, by kind."""
    learner, _ = LocalLearner.resumed(
        learner_parts.learner_config(found.job), run.checkpoints / "iteration_1"
    )
    requests = job_parts.planner(found.job, "run.1", Inference("http://here", "demo/actor", None)).training(1)

    def spool() -> None:
        begun = Spool.open(
            run.spool_file("iteration_1"), requests,
            versions=range(1), gateway_urls=("http://here",), tell=print,
        )  # fmt: skip
        for rollout in found.rollouts:
            begun.keep(rollout)
        begun.remove()

    iterations, updates = itertools.count(2), itertools.count(2)
    saving = Saving(found.job.training, found.job.evaluation, run, learner)

    def checkpoint() -> None:
        saving.write(Progress(next(iterations), 1, 13))

    def records() -> None:
        number = next(updates)
        names = tuple(f"{rollout.rollout_id}.{number}" for rollout in found.rollouts)
        append_to_ledger(run.path, LedgerEntry(number, number, names))
        for done in range(int(found.row["time/collect_s"]) + 4):  # stages at once, and each second
            write_state(run.path, RunState("training", 1, 1, "collect 2", done, 64))
        append_log(run.path, "a line, though most iterations say nothing")

    return {"spool": kit.least(spool), "checkpoint": kit.least(checkpoint), "records": kit.least(records)}


def main(arguments: Sequence[str] | None = None) -> int:
    options = kit.options(
        __doc__,
        ("--limit", LIMIT, "most of an iteration"),
        ("--quick", False, "a small iteration, to see that it works"),
        arguments=arguments,
    )
    with tempfile.TemporaryDirectory() as folder:
        found = played_in(Path(folder) / "run", QUICK if options.quick else ())
        return report(found, open_run(Path(folder) / "run"), options.limit)


def report(found: Played, run: RunDirectory, limit: float) -> int:
    """Print the cost of recovery in the run's last iteration, and return the exit code."""
    took = costs(found, run)
    wall_s = sum(found.row[f"time/{stage}_s"] for stage in ("collect", "credit", "update", "publish"))
    print(f"an iteration took {found.cpu_s:.2f} s of CPU time, {wall_s:.2f} s on the wall")
    for name, cost in took.items():
        cpu, wall = cost.cpu_s / found.cpu_s, cost.wall_s / wall_s
        print(f"{name:12s} {1e3 * cost.cpu_s:6.1f} ms {cpu:.3%}  wall {1e3 * cost.wall_s:6.1f} ms {wall:.3%}")
    share = max(
        sum(cost.cpu_s for cost in took.values()) / found.cpu_s,
        sum(cost.wall_s for cost in took.values()) / wall_s,
    )
    figure = f"recovery costs {share:.3%} of an iteration (at most {limit:.2%})"
    return kit.report(figure, share <= limit)


if __name__ == "__main__":
    sys.exit(main())
