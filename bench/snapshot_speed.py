"""Snapshots, restores, branches and groups: how long they take, and how large a snapshot is.

    python -m bench.snapshot_speed [--quick] [--out FILE]

A snapshot is `CrafterEnvironment.snapshot` in its envelope, as it travels; beside it `pickle` of a stock
`crafter.Env` in the same world after the same actions. Both take turns in one process, ten calls a turn;
a figure is the CPU time of the best turn, a group's the median. Branches are those of whole sessions
with history, without HTTP. The group is eight environments brought to their first observation by `Worlds`,
its world being new. Exit code 1 when a target is missed.
"""

import asyncio
import json
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import crafter
import numpy as np

from bench import kit
from shared_schemas.rollouts import EnvSpec
from task_app.environments.crafter.environment import CrafterEnvironment
from task_app.environments.crafter.rules import ACTIONS
from task_app.plugins import default_plug_boards
from task_app.protocols import ToolRequest
from task_app.sessions.sessions import EnvironmentSession
from task_app.sessions.snapshots import EnvironmentSnapshot
from task_app.snapshots.envelope import open_envelope, seal
from task_app.snapshots.starts import Worlds

# The least ratio, or the most milliseconds (DESIGN.md section 7 and issue 4).
AT_LEAST = {"faster_than_pickle": 4.0, "smaller_than_pickle": 12.0}
AT_MOST = {"restore_ms": 0.4, "branch_ms": 1.0, "group_start_ms": 15.0}
GROUP = 8
CALLS = 10
STEPS = 200
MOST = 1 << 23
SPEC = EnvSpec(env_name="crafter")
HEAD = SPEC.model_dump()


def cpu_ms(work: Callable[[], object], calls: int = CALLS) -> float:
    """CPU milliseconds of this process per call, over this many calls and all threads."""
    start = time.process_time()
    for _ in range(calls):
        work()
    return 1e3 * (time.process_time() - start) / calls


def best_ms(work: Callable[[], object], repetitions: int) -> float:
    """The best of this many turns, because another job on the core only adds time."""
    return min(cpu_ms(work) for _ in range(repetitions))


def played(seed: int) -> tuple[crafter.Env, CrafterEnvironment]:
    """The same world after the same actions, in stock and here; decisions of four actions here."""
    actions = np.random.default_rng(seed).integers(0, len(ACTIONS), size=STEPS).tolist()
    stock, environment = crafter.Env(seed=seed), CrafterEnvironment()
    stock.reset()
    environment.reset(seed)
    for action in actions:
        stock.step(action)
    for first in range(0, STEPS, 4):
        names = [ACTIONS[action] for action in actions[first : first + 4]]
        outcome = environment.step([ToolRequest("interact_many", {"actions": names})])
        if outcome.terminated:
            break
    return stock, environment


def sealed(environment: CrafterEnvironment) -> bytes:
    return seal("environment", HEAD, environment.snapshot(), at_most_bytes=MOST)


def against_pickle(seeds: range, repetitions: int) -> dict[str, float]:
    """Both ways in turn, and restores from the sealed bytes; medians over worlds of the best turns."""
    rows = []
    for seed in seeds:
        stock, environment = played(seed)
        data = sealed(environment)
        works = (partial(pickle.dumps, stock), partial(sealed, environment), partial(restored, data))
        turns = [tuple(map(cpu_ms, works)) for _ in range(repetitions)]
        rows.append((*map(min, zip(*turns, strict=True)), len(pickle.dumps(stock)), len(data)))
    pickle_ms, snapshot_ms, restore_ms, pickle_bytes, snapshot_bytes = map(
        statistics.median, zip(*rows, strict=True)
    )
    return {
        "pickle_ms": pickle_ms,
        "snapshot_ms": snapshot_ms,
        "pickle_bytes": pickle_bytes,
        "snapshot_bytes": snapshot_bytes,
        "faster_than_pickle": pickle_ms / snapshot_ms,
        "smaller_than_pickle": pickle_bytes / snapshot_bytes,
        "restore_ms": restore_ms,
    }


def restored(data: bytes) -> None:
    """Restore an environment from the bytes, up to its observation."""
    _, state = open_envelope("environment", data, at_most_bytes=MOST)
    CrafterEnvironment().restore(state)


async def session_of(seed: int) -> EnvironmentSession:
    """A session in the middle of its episode, with a whole history."""
    session = EnvironmentSession(environment=CrafterEnvironment(), spec=SPEC)
    await session.reset(seed)
    for _ in range(5):
        await session.step([ToolRequest("interact_many", {"actions": ["move_left", "do"]})])
    return session


def of_sessions(repetitions: int) -> dict[str, float]:
    """Measure a branch, a snapshot by value and a restore of whole sessions."""
    boards, session = default_plug_boards(), asyncio.run(session_of(1))

    def taken() -> EnvironmentSnapshot:
        return EnvironmentSnapshot.take(session, boards, where="env_id")

    def branched() -> None:
        snapshot = taken()
        for _ in range(GROUP):
            snapshot.session(boards)

    data = taken().seal(at_most_bytes=MOST)

    def restored_session() -> None:
        EnvironmentSnapshot.open(data, at_most_bytes=MOST).session(boards)

    return {
        "branch_ms": best_ms(branched, repetitions) / GROUP,
        "session_snapshot_ms": best_ms(lambda: taken().seal(at_most_bytes=MOST), repetitions),
        "session_snapshot_bytes": len(data),
        "session_restore_ms": best_ms(restored_session, repetitions),
    }


async def group_start(seed: int) -> None:
    """Start eight siblings in a new world."""
    start = Worlds().start(SPEC, seed)
    await asyncio.gather(*(start.begin(CrafterEnvironment()) for _ in range(GROUP)))


def of_groups(repetitions: int) -> dict[str, float]:
    asyncio.run(group_start(0))  # the geometry of the noise is found once a process
    times = [
        cpu_ms(lambda seed=seed: asyncio.run(group_start(seed)), calls=1)
        for seed in range(1, repetitions + 1)
    ]
    return {"group_start_ms": statistics.median(times)}


def targets_met(figures: Mapping[str, float]) -> bool:
    """Whether every figure reaches its target."""
    return all(figures[name] >= least for name, least in AT_LEAST.items()) and all(
        figures[name] <= most for name, most in AT_MOST.items()
    )


def main() -> int:
    options = kit.options(
        __doc__,
        ("--quick", False, "a few seconds instead of half a minute"),
        ("--out", Path, "write the figures there as JSON"),
    )
    worlds, repetitions = (3, 15) if options.quick else (9, 50)
    figures = {
        **against_pickle(range(worlds), repetitions),
        **of_sessions(repetitions),
        **of_groups(repetitions),
    }
    for name, value in figures.items():
        target = f"at least {AT_LEAST[name]:g}" if name in AT_LEAST else ""
        target = f"at most {AT_MOST[name]:g}" if name in AT_MOST else target
        print(f"{name:24}{value:>12.3f}  {target}")
    rounded = {name: round(value, 4) for name, value in figures.items()}
    result = {
        "bench": "snapshot_speed", "quick": options.quick, **rounded, "met": targets_met(figures),
    }  # fmt: skip
    print(json.dumps(result))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
