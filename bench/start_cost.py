"""What starts at snapshots and forks cost of an iteration of the demo, in CPU time.

    python -m bench.start_cost [--quick]

An iteration of configs/crafter_cpu.toml is played (a shorter warm-up; 64 episodes of 50 decisions). Then, on
its stored rollouts:

    choose   what is pure: which moments are kept, the pool, where groups start, which decisions are forked
    keep     the replays that the 16 kept snapshots of an iteration take, in a task app of their own
    forks    the replays of all episodes up to their last fork by `surprise` (`uniform` needs none)

Each is held against the CPU time of the iteration in the trainer's process, so the shares are rather too
large. Replays are of the task app's process: keep's run while the learner works, those of forks do not.
"""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil
from pydantic import SecretStr

from bench import kit
from bench.demo_iteration import QUICK, played
from shared_schemas.rollouts import Rollout
from trainer_backend import job_parts
from trainer_backend.collect.moments import Wanted, replay_all
from trainer_backend.collect.plan import Inference, Planner
from trainer_backend.core.starts import (
    STARTS,
    Candidate,
    CurriculumKeys,
    Moment,
    Pool,
    Starts,
    candidates,
    kept,
)
from trainer_backend.job.schema import JobConfig

FORKS = {"train_branches": True, "fork_rule": "surprise"}


def planner_of_forks(job: JobConfig) -> Planner:
    """The planner of the job, with forks."""
    forked = job.model_copy(update={"algorithm": job.algorithm.model_copy(update=FORKS)})
    return job_parts.planner(forked, "run", Inference("http://127.0.0.1:9", "tiny/actor", SecretStr("")))


def choose_starts(rollouts: Sequence[Rollout]) -> list[Candidate]:
    """Choose what an iteration keeps, and where the next one's groups start from a full pool."""
    found = []
    for item in rollouts:
        assert item.trajectory is not None
        counts = [step.observation_data.achievements_counts for step in item.trajectory.steps]
        cells = [tuple(sorted(name for name, count in row.items() if count)) for row in counts]
        found += candidates(item.rollout_id, cells, seed=0)
    some = kept(found, seed=0)
    keys = CurriculumKeys()
    moments = [
        Moment(f"{one.plan}:{one.turn}:{n}", n, one.plan, "g", 0, one.turn, 0, one.cell, "x" * 8000)
        for n in range(keys.pool // max(len(some), 1) + 1)
        for one in some
    ]
    pool = Pool().after(moments, [], keys)
    Starts(keys, STARTS["frontier"].weights, pool, 0, reseedable=True).choose(2, 64)
    return some


async def replay_cpu_s(job: JobConfig, planner: Planner, wanted: Sequence[Wanted]) -> float:
    """CPU seconds of a task app that plays these again."""
    with tempfile.TemporaryDirectory() as folder:
        async with job_parts.task_apps(job, Path(folder) / "task_app.log", tell=lambda text: None) as apps:
            await replay_all(apps, planner, wanted[:1])  # what is built once
            before = _cpu_of_children()
            await replay_all(apps, planner, wanted)
            return _cpu_of_children() - before


def _cpu_of_children() -> float:
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(item.user + item.system for item in times)


def main(arguments: Sequence[str] | None = None) -> int:
    options = kit.options(
        __doc__, ("--quick", False, "a small iteration, to see that it works"), arguments=arguments
    )
    found = played(QUICK if options.quick else ())
    planner, games = planner_of_forks(found.job), {item.rollout_id: item for item in found.rollouts}
    some = choose_starts(found.rollouts)
    forks = [(item, planner.fork_turns(item)) for item in found.rollouts]
    costs = {
        "choose starts": kit.least(lambda: choose_starts(found.rollouts)).cpu_s,
        "choose forks": kit.least(lambda: [planner.fork_turns(item) for item in found.rollouts]).cpu_s,
        "keep": asyncio.run(
            replay_cpu_s(found.job, planner, [Wanted(games[one.plan], [one.turn]) for one in some])
        ),
        "forks": asyncio.run(
            replay_cpu_s(
                found.job,
                planner,
                [Wanted(item, [turn - 1 for turn in turns]) for item, turns in forks if turns],
            )
        ),
    }
    print(f"an iteration: {found.cpu_s:.1f} s of CPU time; {len(some)} snapshots kept")
    for name, seconds in costs.items():
        print(f"{name}: {1000 * seconds:.1f} ms, {seconds / found.cpu_s:.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
