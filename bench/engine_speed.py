"""How much faster the engine is than stock crafter: CPU time of a step and of a new world.

    python -m bench.engine_speed [--quick]

Stock and engine take turns in one process; ratios of medians of CPU time, so that other jobs on the machine
matter little. Both play the same random actions with the vital statistics refilled, through day and night.
Stock's noise must be pure Python here (numba not importable), as it is wherever this project is installed.
Exit code 1 when a target is missed.
"""

import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

import crafter
import numpy as np

from bench import kit
from task_app.environments.crafter import noise
from task_app.environments.crafter.engine import CrafterEngine

TARGETS = {"step": 25.0, "world": 80.0}
VITALS = ("health", "food", "drink", "energy")


def cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of this process for one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def play(step: Callable[[int], object], inventory: Callable[[], dict[str, int]], actions: list[int]) -> None:
    """Play on with an immortal player."""
    for action in actions:
        items = inventory()
        for name in VITALS:
            items[name] = 9
        step(action)


def step_ratio(repetitions: int, steps: int, engine_turns: int = 4) -> dict[str, float]:
    """Microseconds per step of both; the engine plays `engine_turns` times as many steps."""
    rng = np.random.default_rng(0)
    stock, engine = crafter.Env(seed=1, length=10**9), CrafterEngine(1, length=10**9)
    stock.reset()
    engine.reset()

    def play_stock(actions: list[int]) -> None:
        play(stock.step, lambda: stock._player.inventory, actions)

    def play_engine(actions: list[int]) -> None:
        play(engine.act, lambda: engine.inventory, actions)

    stock_us, engine_us = [], []
    for _ in range(repetitions):
        actions = rng.integers(0, 17, size=steps * engine_turns).tolist()
        stock_us.append(1e6 * cpu_s(partial(play_stock, actions[:steps])) / steps)
        engine_us.append(1e6 * cpu_s(partial(play_engine, actions)) / len(actions))
    return summary(stock_us, engine_us)


def world_ratio(repetitions: int, engine_turns: int = 20) -> dict[str, float]:
    """Microseconds per new world; the geometry, computed once in a process, is reported separately."""
    CrafterEngine(0).reset()
    stock_us, engine_us = [], []
    for turn in range(repetitions):
        stock = crafter.Env(seed=turn)
        engines = [CrafterEngine(turn * engine_turns + i) for i in range(engine_turns)]
        stock_us.append(1e6 * cpu_s(stock.reset))
        engine_us.append(1e6 * cpu_s(partial(reset_all, engines)) / engine_turns)
    return summary(stock_us, engine_us)


def reset_all(engines: list[CrafterEngine]) -> None:
    for engine in engines:
        engine.reset()


def summary(stock_us: list[float], engine_us: list[float]) -> dict[str, float]:
    """Medians and their ratio."""
    stock, engine = statistics.median(stock_us), statistics.median(engine_us)
    return {"stock_us": round(stock, 1), "engine_us": round(engine, 2), "ratio": round(stock / engine, 1)}


def view_us(calls: int = 2000) -> float:
    """Microseconds of one `view()`."""
    engine = CrafterEngine(1)
    engine.reset()
    return round(1e6 * cpu_s(lambda: [engine.view() for _ in range(calls)]) / calls, 2)


def targets_met(rows: Mapping[str, Mapping[str, float]]) -> bool:
    """Whether every ratio reaches its target."""
    return all(rows[name]["ratio"] >= target for name, target in TARGETS.items())


def main() -> int:
    quick = kit.options(__doc__, ("--quick", False, "a few seconds instead of half a minute")).quick
    if importlib.util.find_spec("numba"):
        raise SystemExit("numba is importable here: stock's worlds would be compiled; run without it")
    geometry_s = round(cpu_s(noise.geometry), 3)
    rows = {
        "step": step_ratio(3 if quick else 9, 300 if quick else 700),
        "world": world_ratio(3 if quick else 9),
    }
    print(f"{'':8}{'stock us':>12}{'engine us':>12}{'ratio':>8}{'target':>8}")
    for name, row in rows.items():
        print(f"{name:8}{row['stock_us']:>12}{row['engine_us']:>12}{row['ratio']:>8}{TARGETS[name]:>8}")
    result = {
        **rows,
        "view_us": view_us(),
        "geometry_once_s": geometry_s,
        "met": targets_met(rows),
    }
    print(json.dumps({"bench": "engine_speed", "quick": quick, **result}))
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
