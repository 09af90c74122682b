"""What the pages of a long run take to read from SQLite.

    python -m bench.run_page [--iterations 1000] [--decisions 100000] [--limit-ms 200]

A run directory of that length is written and synced: episodes of ten decisions, a hundred numbers and a list
a row of metrics, an evaluation every tenth iteration. Then each page's reads are made as the page makes them,
in a connection that has read before: the least of five, of the clock on the wall and, beside it, of this
process' CPU, which is all of it where nothing else runs. Exit code 1 where a page is above the limit.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import kit
from shared_schemas.messages import Message
from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import ObservationData, StepData, StepInfo, StopReason, Trajectory
from trainer_backend.job.load import parse_job
from trainer_backend.rundir.layout import RunDirectory, create_run
from trainer_backend.rundir.rollout_files import Credit, write_rollouts
from trainer_backend.rundir.spool import LedgerEntry, append_to_ledger
from trainer_backend.store import jobs, reads, reads_rollouts
from trainer_backend.store.database import Store, open_store
from trainer_backend.store.reads_rollouts import RolloutFilter
from trainer_backend.store.rows import Job
from trainer_backend.store.sync import sync_run

LIMIT_MS = 200.0
T = 10  # decisions of an episode
REPEATS = 5
POINTS = 400  # of a curve, as the dashboard asks
NUMBERS = 100  # of a row


def steps() -> tuple[StepData, ...]:
    before, after = ({"collect_wood": count} for count in (0, 1))
    return tuple(
        StepData(
            turn=turn,
            observation_data=ObservationData(
                messages=(Message(role="user", content="a prompt"),), achievements_counts=before
            ),
            next_observation=ObservationData(achievements_counts=after if turn == 1 else before),
            action_taken={"type": "tool_call"},
            env_rewards=(0.0, 1.0),
            step_info=StepInfo(executed_actions=("move_left", "do")),
        )
        for turn in range(1, T + 1)
    )


def episodes(iteration: int, count: int, kind: str, shared: tuple[StepData, ...]) -> list[Rollout]:
    return [
        Rollout(
            rollout_id=f"run.0123456789ab/{kind}/{iteration}/{number // 4}/{number % 4}",
            run_id="run.0123456789ab",
            iteration=iteration,
            group_id=f"{kind}/{iteration}/{number // 4}",
            sibling=number % 4,
            attempt=0,
            instance_id="i",
            status="finished",
            trajectory=Trajectory(
                env_name="crafter",
                policy_name="openai",
                model="run/actor",
                seed=number,
                steps=shared,
                outcome_reward=float(number * 7919 % 13),
                outcome_definition="unique achievements",
                achievements_counts={"collect_wood": 1},
                env_steps=2 * T,
                terminated=False,
                truncated=True,
                stop_reason=StopReason.MAX_DECISIONS,
                wall_s=1.0,
            ),
        )
        for number in range(count)
    ]


def long_run(folder: Path, iterations: int, decisions: int) -> RunDirectory:
    run = create_run(parse_job({"model": {"preset": "tiny-0.3m"}}, where="bench").config, folder)
    shared, count = steps(), max(1, decisions // (iterations * T))
    credit = Credit([0.0] * T, [0.5] * T, [1.0] * T, state_keys_T=[f"{t:032x}" for t in range(T)])
    for iteration in range(1, iterations + 1):
        played = episodes(iteration, count, "train", shared)
        write_rollouts(run.rollouts_file(f"iteration_{iteration}"), played, [credit] * count)
        append_to_ledger(
            run.path, LedgerEntry(iteration, iteration, tuple(item.rollout_id for item in played))
        )
        numbers = {f"room/what_{number}": 0.1 * number + iteration for number in range(NUMBERS)}
        row = {"kind": "iteration", "iteration": iteration, "policy/version": iteration}
        run.append_metrics({**row, **numbers, "decision/unique_by_turn": [0.1] * 50})
        if iteration % 10 == 0:
            rates = {f"achievement_{number}": 0.5 for number in range(22)}
            run.append_metrics({"kind": "evaluation", "iteration": iteration, "eval/success_rates": rates})
    return run


def pages(store: Store, job_id: str) -> dict[str, Callable[[], object]]:
    """Each page's reads, as the dashboard makes them."""
    row = reads_rollouts.rollouts(store, job_id, limit=1).items[0]
    (job,) = jobs.find(store).items
    train = RolloutFilter(stage="train")

    def list_of_runs() -> None:
        reads.runs(store)
        reads.series(store, [job.id], ["room/what_1"], points=60)

    def run() -> None:
        jobs.get(store, job_id)
        reads.refresh(store, [job])
        for kind in ("iteration", "evaluation"):
            names = reads.metric_names(store, job_id, kind)
            reads.series(store, [job_id], names, kind=kind, points=POINTS)
            reads.metric_lines(store, job_id, kind=kind, limit=1)
            reads.last_lines(store, [job_id], [kind])
        reads.checkpoints(job)

    def rollouts(sort: reads_rollouts.RolloutSort) -> Callable[[], None]:
        def read() -> None:
            first = reads_rollouts.rollouts(store, job_id, train, sort=sort)
            reads_rollouts.rollouts(store, job_id, train, sort=sort, cursor=first.cursor)
            reads_rollouts.count_rollouts(store, job_id, train)
            reads_rollouts.facets(store, job_id)

        return read

    def rollout() -> None:
        found = reads_rollouts.rollout(store, job_id, row.rollout_id)
        reads_rollouts.siblings(store, job_id, found)
        reads_rollouts.anchors(store, job_id, found, f"{0:032x}", limit=40)
        reads_rollouts.learning_iteration(store, job_id, found.rollout_id)

    return {
        "runs": list_of_runs,
        f"run, every curve, {POINTS} points": run,
        "rollouts, newest first, 2 pages": rollouts("newest"),
        "rollouts, by outcome, 2 pages": rollouts("outcome_reward"),
        "rollouts, by sum of r_t, 2 pages": rollouts("reward"),
        "a rollout and its group": rollout,
        "a rollout by the end of its id": lambda: reads_rollouts.rollout(store, job_id, "train/1/0/1"),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = kit.options(
        __doc__,
        ("--iterations", 1000),
        ("--decisions", 100_000, "of all iterations together"),
        ("--limit-ms", LIMIT_MS, "most of a page"),
        ("--url", str, "another database than a new SQLite file; it must be empty"),
        arguments=arguments,
    )
    with tempfile.TemporaryDirectory() as folder:
        run = long_run(Path(folder) / "run", options.iterations, options.decisions)
        store = open_store(options.url or f"sqlite:///{folder}/store.db")
        job, _ = jobs.create(store, Job(name="run", config="", home="bench", run_dir=str(run.path)))
        start = time.perf_counter()
        sync_run(store, job.id, run)
        took = time.perf_counter() - start
        print(f"the first sync of {options.iterations} iterations took {took:.1f} s")
        found = {name: kit.least(read, REPEATS) for name, read in pages(store, job.id).items()}
        found["a sync that finds nothing new"] = kit.least(lambda: sync_run(store, job.id, run), REPEATS)
        store.close()
    for name, cost in found.items():
        told = kit.verdict(1e3 * cost.wall_s <= options.limit_ms, "TOO SLOW")
        print(f"{name:40s} {1e3 * cost.wall_s:7.1f} ms ({1e3 * cost.cpu_s:.1f} of CPU)  {told}")
    return int(1e3 * max(cost.wall_s for cost in found.values()) > options.limit_ms)


if __name__ == "__main__":
    sys.exit(main())
