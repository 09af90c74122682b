"""What the store costs of an iteration of the demo.

    python -m bench.store_cost [--limit 0.02] [--quick] [--url postgresql://…]

An iteration of configs/crafter_cpu.toml is played (a shorter warm-up; 64 episodes of 50 decisions), and its
files are laid into a run directory that has the demo's forty iterations already. Then the sync that brings it
into the store is taken, and one that finds nothing new: while an iteration goes on the service syncs a few
times in vain. Least CPU time of some repeats, against the CPU time of that iteration in the trainer's process
(which leaves out the task app's, so the share is rather too large); with --url the time on the wall, since
the database is another process. Exit code 1 where the share is above the limit.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import kit
from bench.demo_iteration import QUICK, Played, played
from trainer_backend import job_parts
from trainer_backend.rundir.layout import RunDirectory, create_run
from trainer_backend.rundir.rollout_files import Credit, write_rollouts
from trainer_backend.rundir.spool import LedgerEntry, append_to_ledger
from trainer_backend.store import jobs
from trainer_backend.store.database import Store, open_store
from trainer_backend.store.rows import Job
from trainer_backend.store.sync import sync_run

LIMIT = 0.02
ITERATIONS = 40
VAIN = 5  # syncs of an iteration that find nothing new


def finish(run: RunDirectory, found: Played, iteration: int, credits: list[Credit]) -> None:
    """Write the files of an iteration under new ids."""
    named = [
        item.model_copy(update={"rollout_id": f"{item.rollout_id}.{iteration}", "iteration": iteration})
        for item in found.rollouts
    ]
    write_rollouts(run.rollouts_file(f"iteration_{iteration}"), named, credits)
    append_to_ledger(run.path, LedgerEntry(iteration, iteration, tuple(item.rollout_id for item in named)))
    run.append_metrics({**found.row, "iteration": iteration})


def took_s(clock: Callable[[], float], work: Callable[[], object]) -> float:
    start = clock()
    work()
    return clock() - start


def measured(
    store: Store, run: RunDirectory, found: Played, clock: Callable[[], float]
) -> tuple[float, float]:
    """Seconds of the sync that brings an iteration, and of one that finds nothing."""
    job, _ = jobs.create(store, Job(name="demo", config="", home="bench", run_dir=str(run.path)))
    credits = list(job_parts.credit(found.job).credit(found.rollouts, found.measured).credits)
    for iteration in range(1, ITERATIONS + 1):
        finish(run, found, iteration, credits)
    sync_run(store, job.id, run)
    news, vain = [], []
    for iteration in range(ITERATIONS + 1, ITERATIONS + 6):
        finish(run, found, iteration, credits)
        news.append(took_s(clock, lambda: sync_run(store, job.id, run)))
        vain.append(took_s(clock, lambda: sync_run(store, job.id, run)))
    return min(news), min(vain)


def main(arguments: Sequence[str] | None = None) -> int:
    options = kit.options(
        __doc__,
        ("--limit", LIMIT, "most of an iteration's time"),
        ("--quick", False, "a small iteration, to see that it works"),
        ("--url", str, "another database than a new SQLite file"),
        arguments=arguments,
    )
    return report(played(QUICK if options.quick else ()), options.limit, options.url)


def report(found: Played, limit: float, url: str | None = None) -> int:
    """Print the cost of the store in that iteration, and return the exit code."""
    clock = time.perf_counter if url else time.process_time
    with tempfile.TemporaryDirectory() as folder:
        run = create_run(found.job, Path(folder) / "run")
        store = open_store(url or f"sqlite:///{folder}/store.db")
        news_s, vain_s = measured(store, run, found, clock)
        store.close()
    decisions = sum(len(item.trajectory.steps) for item in found.rollouts if item.trajectory is not None)
    print(f"an iteration of {decisions} decisions took {found.cpu_s:.2f} s of CPU time")
    print(f"its sync took {1e3 * news_s:.1f} ms, one that finds nothing new {1e3 * vain_s:.1f} ms")
    share = (news_s + VAIN * vain_s) / found.cpu_s
    figure = f"with {VAIN} of those the store is {share:.2%} of it (at most {limit:.2%})"
    return kit.report(figure, share <= limit)


if __name__ == "__main__":
    sys.exit(main())
