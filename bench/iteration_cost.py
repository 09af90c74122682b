"""What an iteration of the demo pays besides sampling and the update: credit, recovery, and the store.

    python -m bench.iteration_cost [--quick] [--only credit --only recovery --only store] [--url postgresql://…]

An iteration of configs/crafter_cpu.toml is played (a shorter warm-up; 64 episodes of 50 decisions). Then each
part is done again with its rollouts, and its least time of some repeats is held against that iteration: CPU
time of the trainer's process, which leaves out the task app's, so the shares are rather too large.

    credit      All that the loop calls: tokens, rewards with their guards, advantages, and what the logs say,
                with the critic's values that the iteration was credited by. Also rewards and advantages
                alone, and the peak of memory for all decisions against that for a quarter of them.
    recovery    All that `training.recovery_every = 1` and the spool add: a checkpoint with AdamW's moments,
                flushed to disk, and the removal of the one before; each rollout in the spool; the ledger,
                state.json and run.log. On the wall too, where a disk makes one wait.
    store       The sync that brings the iteration into a store that has forty, and five in vain. With --url
                the time on the wall, since the database is another process.

Exit code 1 where a share is above its limit, or memory grows faster than the decisions.
"""

import itertools
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import kit
from bench.demo_iteration import QUICK, Played, played_in
from shared_schemas.rollouts import Rollout
from trainer_backend import job_parts, learner_parts
from trainer_backend.collect.plan import Inference
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.parts import Progress
from trainer_backend.run.checkpointing import Saving
from trainer_backend.rundir.layout import RunDirectory, create_run, open_run
from trainer_backend.rundir.rollout_files import Credit, write_rollouts
from trainer_backend.rundir.spool import LedgerEntry, Spool, append_to_ledger
from trainer_backend.rundir.state import RunState, append_log, write_state
from trainer_backend.store import jobs
from trainer_backend.store.database import Store, open_store
from trainer_backend.store.rows import Job
from trainer_backend.store.sync import sync_run

LIMITS = {"credit": 0.0015, "recovery": 0.01, "store": 0.02}
# Peak bytes a decision of the whole batch against a quarter of it.
GROWTH_LIMIT = 1.2
ITERATIONS = 40  # in the store before
VAIN = 5  # syncs of an iteration that find nothing new


def decisions(rollouts: Sequence[Rollout]) -> int:
    return sum(len(item.trajectory.steps) for item in rollouts if item.trajectory is not None)


def report_credit(found: Played, limit: float) -> int:
    rollouts = [item for item in found.rollouts if item.trajectory is not None]
    job, measured = found.job, found.measured

    def credit(some: Sequence[Rollout]) -> object:
        return job_parts.credit(job).credit(some, measured)

    whole_s = kit.least(lambda: credit(rollouts)).cpu_s
    some_s = kit.least(lambda: job_parts.credit(job).credits(rollouts, measured)).cpu_s
    for name, seconds in (
        (f"all of credit, {job.algorithm.advantage}", whole_s),
        ("of that rewards and advantages", some_s),
    ):
        print(f"{name:40s} {1e3 * seconds:6.1f} ms  {seconds / found.cpu_s:.3%}")
    per_decision, growth = memory_growth(credit, rollouts)
    print(f"peak memory {per_decision:.0f} bytes a decision, x{growth:.2f} of that of a quarter of them")
    share = whole_s / found.cpu_s
    figure = f"all of credit is {share:.3%} of an iteration (at most {limit:.2%})"
    return kit.report(figure, share <= limit and growth <= GROWTH_LIMIT)


def memory_growth(
    credit: Callable[[Sequence[Rollout]], object], rollouts: Sequence[Rollout]
) -> tuple[float, float]:
    """Peak bytes per decision of the whole batch, also as a multiple of a quarter's."""
    groups = sorted({rollout.group_id for rollout in rollouts})
    some = set(groups[: max(1, len(groups) // 4)])

    def peak(part: Sequence[Rollout]) -> float:
        tracemalloc.start()
        credit(part)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most / decisions(part)

    whole = peak(rollouts)
    return whole, whole / peak([rollout for rollout in rollouts if rollout.group_id in some])


def report_recovery(found: Played, run: RunDirectory, limit: float) -> int:
    took = recovery_costs(found, run)
    wall_s = sum(found.row[f"time/{stage}_s"] for stage in ("collect", "credit", "update", "publish"))
    for name, cost in took.items():
        cpu, wall = cost.cpu_s / found.cpu_s, cost.wall_s / wall_s
        print(f"{name:12s} {1e3 * cost.cpu_s:6.1f} ms {cpu:.3%}  wall {1e3 * cost.wall_s:6.1f} ms {wall:.3%}")
    share = max(
        sum(cost.cpu_s for cost in took.values()) / found.cpu_s,
        sum(cost.wall_s for cost in took.values()) / wall_s,
    )
    return kit.report(f"recovery costs {share:.3%} of an iteration (at most {limit:.2%})", share <= limit)


def recovery_costs(found: Played, run: RunDirectory) -> dict[str, kit.Cost]:
    """The costs of recovery in one iteration, by kind."""
    config, checkpoint_1 = learner_parts.learner_config(found.job), run.checkpoints / "iteration_1"
    learner, _ = LocalLearner.resumed(config, checkpoint_1)
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


def report_store(found: Played, limit: float, url: str | None = None) -> int:
    clock = time.perf_counter if url else time.process_time
    with tempfile.TemporaryDirectory() as folder:
        run = create_run(found.job, Path(folder) / "run")
        store = open_store(url or f"sqlite:///{folder}/store.db")
        news_s, vain_s = sync_seconds(store, run, found, clock)
        store.close()
    print(f"its sync took {1e3 * news_s:.1f} ms, one that finds nothing new {1e3 * vain_s:.1f} ms")
    share = (news_s + VAIN * vain_s) / found.cpu_s
    figure = f"with {VAIN} of those the store is {share:.2%} of it (at most {limit:.2%})"
    return kit.report(figure, share <= limit)


def sync_seconds(
    store: Store, run: RunDirectory, found: Played, clock: Callable[[], float]
) -> tuple[float, float]:
    """Least seconds of the sync that brings an iteration, and of one that finds nothing."""
    job, _ = jobs.create(store, Job(name="demo", config="", home="bench", run_dir=str(run.path)))
    credits = list(job_parts.credit(found.job).credit(found.rollouts, found.measured).credits)

    def sync_s() -> float:
        start = clock()
        sync_run(store, job.id, run)
        return clock() - start

    for iteration in range(1, ITERATIONS + 1):
        write_iteration(run, found, iteration, credits)
    sync_s()
    news, vain = [], []
    for iteration in range(ITERATIONS + 1, ITERATIONS + 6):
        write_iteration(run, found, iteration, credits)
        news.append(sync_s())
        vain.append(sync_s())
    return min(news), min(vain)


def write_iteration(run: RunDirectory, found: Played, iteration: int, credits: list[Credit]) -> None:
    """Write the files of the iteration under new ids."""
    named = [
        item.model_copy(update={"rollout_id": f"{item.rollout_id}.{iteration}", "iteration": iteration})
        for item in found.rollouts
    ]
    write_rollouts(run.rollouts_file(f"iteration_{iteration}"), named, credits)
    append_to_ledger(run.path, LedgerEntry(iteration, iteration, tuple(item.rollout_id for item in named)))
    run.append_metrics({**found.row, "iteration": iteration})


def main() -> int:
    options = kit.options(
        __doc__,
        ("--quick", False, "a small iteration, to see that it works"),
        ("--only", [], f"one of {', '.join(LIMITS)}; may be repeated"),
        ("--url", str, "another database than a new SQLite file"),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        found = played_in(path, QUICK if options.quick else ())
        print(f"an iteration of {decisions(found.rollouts)} decisions took {found.cpu_s:.2f} s of CPU time")
        reports: dict[str, Callable[[float], int]] = {
            "credit": lambda limit: report_credit(found, limit),
            "recovery": lambda limit: report_recovery(found, open_run(path), limit),
            "store": lambda limit: report_store(found, limit, options.url),
        }
        return max(reports[name](LIMITS[name]) for name in options.only or LIMITS)


if __name__ == "__main__":
    sys.exit(main())
