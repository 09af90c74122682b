"""Our Crafter engine against stock crafter: the same games, how much faster, and how small a snapshot is.

    python -m bench.crafter_engine [--quick] [--only exact --only speed --only snapshots]

    exact       Episodes in stock, with its one ordering bug fixed, and here: map, things in order with their
                counters, reward, end, chunk order, and the whole random generator are compared after every
                step. Every other episode has its inventory refilled every 7 steps, so that all crafting runs.
                Then the same games in two processes with other hash seeds and heaps.
    speed       CPU time of a step and of a new world. Both play the same random actions with the vital
                statistics refilled. Stock's noise must be pure Python, so numba must not be importable.
    snapshots   `CrafterEnvironment.snapshot` in its envelope against `pickle` of stock's; restores;
                branches of whole sessions with history; eight siblings in a new world (`Worlds`).

Sides take turns in one process. A speed is the ratio of medians, a snapshot's time the best turn of ten
calls. Exit code 1 when a target is missed. Other sizes and views are left out: the engine has one.
"""

import asyncio
import importlib.util
import json
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import crafter
import numpy as np

from bench import kit
from shared_schemas.rollouts import EnvSpec
from task_app.environments.crafter.engine import CrafterEngine
from task_app.environments.crafter.environment import CrafterEnvironment
from task_app.environments.crafter.rules import ACTIONS
from task_app.plugins import default_plug_boards
from task_app.protocols import ToolRequest
from task_app.sessions.sessions import EnvironmentSession
from task_app.sessions.snapshots import EnvironmentSnapshot
from task_app.snapshots.envelope import open_envelope, seal
from task_app.snapshots.starts import Worlds

AT_LEAST = {"step_ratio": 25.0, "world_ratio": 80.0, "faster_than_pickle": 4.0, "smaller_than_pickle": 12.0}
AT_MOST = {
    "differences": 0.0, "divergences": 0.0, "restore_ms": 0.4, "branch_ms": 1.0, "group_start_ms": 15.0,
}  # fmt: skip
REFERENCE = kit.ROOT / "tests" / "task_app" / "environments" / "crafter"
VITALS = ("health", "food", "drink", "energy")
GROUP, CALLS, STEPS, MOST = 8, 10, 200, 1 << 23
SPEC = EnvSpec(env_name="crafter")
Figures = dict[str, float]


def exactness(quick: bool) -> Figures:
    sys.path.insert(0, str(REFERENCE))  # the reference is test code; nothing but tests and this may use it
    from reference import compare_episode  # type: ignore[import-not-found]

    made, unequal, unlocked = 0, 0, set()
    for seed in range(6 if quick else 50):
        duel, steps = compare_episode(seed, 300 if quick else 800, refill_every=7 if seed % 2 else None)
        made += steps
        unlocked |= {name for name, count in duel.engine.achievements.items() if count}
        if duel.unequal:
            unequal += 1
            print(f"seed {seed} step {steps}: {', '.join(duel.unequal)}")
    seeds, most = (5, 100) if quick else (30, 400)
    one, two = (other_process(hash_seed, seeds, most) for hash_seed in (1, 77))
    return {
        "compared_steps": made,
        "differences": unequal,
        "achievements_seen": len(unlocked),
        "steps_in_two_processes": sum(int(game[-1]) for game in one),
        "divergences": sum(a != b for a, b in zip(one, two, strict=True)),
    }


def other_process(hash_seed: int, seeds: int, steps: int) -> list[list[str]]:
    """The fingerprints of games in a process of its own."""
    command = [sys.executable, "-m", "bench.crafter_engine"]
    command += ["--child", json.dumps([seeds, steps, hash_seed * 1000])]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run(command, env=environment, cwd=kit.ROOT, check=True, capture_output=True, text=True)
    result: list[list[str]] = json.loads(done.stdout)
    return result


def fingerprints(seeds: int, steps: int, junk: int) -> list[list[str]]:
    """Of random play with refilled vital statistics, one every 50 steps, at the end, and the step count."""
    heap = [bytearray(n % 997) for n in range(junk)]  # so that objects lie at other addresses
    del heap[::3]
    games = []
    for seed in range(seeds):
        engine, rng, seen = CrafterEngine(seed), np.random.default_rng(seed), []
        engine.reset()
        for step in range(steps):
            if step % 50 == 0:
                seen.append(engine.fingerprint())
            if engine.over:
                break
            engine.inventory.update(dict.fromkeys(VITALS, 9))
            engine.act(int(rng.integers(len(ACTIONS))))
        games.append([*seen, engine.fingerprint(), str(engine.step_count)])
    return games


def cpu_ms(work: Callable[[], object], calls: int = 1) -> float:
    """CPU milliseconds of this process per call, all threads together."""
    start = time.process_time()
    for _ in range(calls):
        work()
    return 1e3 * (time.process_time() - start) / calls


def speed(quick: bool) -> Figures:
    if importlib.util.find_spec("numba"):
        raise SystemExit("numba is importable here: stock's worlds would be compiled; run without it")
    repetitions, steps = (3, 300) if quick else (9, 700)
    engine = CrafterEngine(1)
    engine.reset()
    return {
        **step_ratio(repetitions, steps),
        **world_ratio(repetitions),
        "view_us": 1e3 * cpu_ms(engine.view, 2000),
    }


def step_ratio(repetitions: int, steps: int, engine_turns: int = 4) -> Figures:
    """Microseconds of a step; the engine plays `engine_turns` times as many steps."""
    rng = np.random.default_rng(0)
    stock, engine = crafter.Env(seed=1, length=10**9), CrafterEngine(1, length=10**9)
    stock.reset()
    engine.reset()

    def play_stock(actions: list[int]) -> None:
        for action in actions:
            stock._player.inventory.update(dict.fromkeys(VITALS, 9))
            stock.step(action)

    def play_engine(actions: list[int]) -> None:
        for action in actions:
            engine.inventory.update(dict.fromkeys(VITALS, 9))
            engine.act(action)

    stock_us, engine_us = [], []
    for _ in range(repetitions):
        actions = rng.integers(0, 17, size=steps * engine_turns).tolist()
        stock_us.append(1e3 * cpu_ms(partial(play_stock, actions[:steps])) / steps)
        engine_us.append(1e3 * cpu_ms(partial(play_engine, actions)) / len(actions))
    return _ratio("step", stock_us, engine_us)


def world_ratio(repetitions: int, engine_turns: int = 20) -> Figures:
    """Microseconds of a new world, without the geometry."""
    CrafterEngine(0).reset()
    stock_us, engine_us = [], []
    for turn in range(repetitions):
        stock_us.append(1e3 * cpu_ms(crafter.Env(seed=turn).reset))
        engines = iter([CrafterEngine(turn * engine_turns + i) for i in range(engine_turns)])
        engine_us.append(1e3 * cpu_ms(lambda engines=engines: next(engines).reset(), engine_turns))  # type: ignore[misc]
    return _ratio("world", stock_us, engine_us)


def _ratio(name: str, stock_us: list[float], engine_us: list[float]) -> Figures:
    stock, engine = statistics.median(stock_us), statistics.median(engine_us)
    return {f"{name}_stock_us": stock, f"{name}_engine_us": engine, f"{name}_ratio": stock / engine}


def snapshots(quick: bool) -> Figures:
    worlds, repetitions = (3, 15) if quick else (9, 50)
    return {
        **against_pickle(worlds, repetitions),
        **of_sessions(repetitions),
        **of_groups(repetitions),
    }


def against_pickle(worlds: int, repetitions: int) -> Figures:
    """Both ways in turn, and restores from the sealed bytes; medians over worlds of the best turns."""
    rows = []
    for seed in range(worlds):
        stock, environment = played(seed)
        data = sealed(environment)
        works = (partial(pickle.dumps, stock), partial(sealed, environment), partial(restored, data))
        turns = [[cpu_ms(work, CALLS) for work in works] for _ in range(repetitions)]
        rows.append((*map(min, zip(*turns, strict=True)), len(pickle.dumps(stock)), len(data)))
    columns = zip(*rows, strict=True)
    pickle_ms, snapshot_ms, restore_ms, pickle_bytes, snapshot_bytes = map(statistics.median, columns)
    return {
        "pickle_ms": pickle_ms,
        "snapshot_ms": snapshot_ms,
        "snapshot_bytes": snapshot_bytes,
        "faster_than_pickle": pickle_ms / snapshot_ms,
        "smaller_than_pickle": pickle_bytes / snapshot_bytes,
        "restore_ms": restore_ms,
    }


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
        if environment.step([ToolRequest("interact_many", {"actions": names})]).terminated:
            break
    return stock, environment


def sealed(environment: CrafterEnvironment) -> bytes:
    return seal("environment", SPEC.model_dump(), environment.snapshot(), at_most_bytes=MOST)


def restored(data: bytes) -> None:
    """Restore an environment from the bytes, up to its observation."""
    _, state = open_envelope("environment", data, at_most_bytes=MOST)
    CrafterEnvironment().restore(state)


def of_sessions(repetitions: int) -> Figures:
    """A branch, a snapshot by value and a restore of a whole session in the middle of its episode."""

    async def begun() -> EnvironmentSession:
        session = EnvironmentSession(environment=CrafterEnvironment(), spec=SPEC)
        await session.reset(1)
        for _ in range(5):
            await session.step([ToolRequest("interact_many", {"actions": ["move_left", "do"]})])
        return session

    boards, session = default_plug_boards(), asyncio.run(begun())

    def taken() -> EnvironmentSnapshot:
        return EnvironmentSnapshot.take(session, boards, where="env_id")

    def branched() -> None:
        snapshot = taken()
        for _ in range(GROUP):
            snapshot.session(boards)

    data = taken().seal(at_most_bytes=MOST)

    def best_ms(work: Callable[[], object]) -> float:
        return min(cpu_ms(work, CALLS) for _ in range(repetitions))

    return {
        "branch_ms": best_ms(branched) / GROUP,
        "session_snapshot_ms": best_ms(lambda: taken().seal(at_most_bytes=MOST)),
        "session_snapshot_bytes": len(data),
        "session_restore_ms": best_ms(
            lambda: EnvironmentSnapshot.open(data, at_most_bytes=MOST).session(boards)
        ),
    }


def of_groups(repetitions: int) -> Figures:
    """Bring eight siblings to the first observation of a new world; the median."""

    async def started(seed: int) -> None:
        start = Worlds().start(SPEC, seed)
        await asyncio.gather(*(start.begin(CrafterEnvironment()) for _ in range(GROUP)))

    asyncio.run(started(0))  # the geometry of the noise is found once a process
    times = [cpu_ms(lambda seed=seed: asyncio.run(started(seed))) for seed in range(1, repetitions + 1)]  # type: ignore[misc]
    return {"group_start_ms": statistics.median(times)}


PARTS: Mapping[str, Callable[[bool], Figures]] = {
    "exact": exactness, "speed": speed, "snapshots": snapshots,
}  # fmt: skip


def target(name: str, value: float) -> tuple[str, bool]:
    """The target of a figure in words, and whether it is met; "" and True without one."""
    if name in AT_LEAST:
        return f"at least {AT_LEAST[name]:g}", value >= AT_LEAST[name]
    if name in AT_MOST:
        return f"at most {AT_MOST[name]:g}", value <= AT_MOST[name]
    return "", True


def report(figures: Mapping[str, float]) -> int:
    """Print the figures with their targets; return the exit code."""
    told = {name: target(name, value) for name, value in figures.items()}
    for name, (words, met) in told.items():
        print(f"{name:24}{figures[name]:>14.3f}  {words}{'' if met else ' MISSED'}")
    return int(not all(met for _, met in told.values()))


def main() -> int:
    options: Any = kit.options(
        __doc__,
        ("--quick", False, "seconds instead of minutes"),
        ("--only", [], f"one of {', '.join(PARTS)}; may be repeated"),
        ("--child", str, "used by the script itself"),
    )
    if options.child:
        print(json.dumps(fingerprints(*json.loads(options.child))))
        return 0
    codes = [report(PARTS[part](options.quick)) for part in options.only or PARTS]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
