"""Is the engine stock crafter, and the same in every process?

    python -m bench.engine_exactness [--quick]

1. Episodes beside stock with the one ordering fix, all compared after every step: map, things with health and
   counters in order, hidden counters, reward, end, chunk order, all 624 generator words and position.
   Every other episode has its inventory refilled every 7 steps, so that all crafting and placing runs.
2. The same games in two processes with other hash seeds and other heaps, fingerprints compared.

Left out: other sizes and views (the engine has one), worlds of later episodes (reset pins the first).
"""

import argparse
import json
import os
import subprocess
import sys

import numpy as np

from bench.kit import ROOT
from task_app.environments.crafter.engine import CrafterEngine
from task_app.environments.crafter.rules import ACTIONS

REFERENCE = ROOT / "tests" / "task_app" / "environments" / "crafter"
VITALS = ("health", "food", "drink", "energy")


def beside_stock(episodes: int, most_steps: int) -> dict[str, object]:
    """Differences between the engine and the reference."""
    sys.path.insert(0, str(REFERENCE))  # the reference is test code; nothing but tests and this may use it
    from reference import compare_episode  # type: ignore[import-not-found]

    steps, found, unlocked = 0, [], set()
    for seed in range(episodes):
        duel, made = compare_episode(seed, most_steps, refill_every=7 if seed % 2 else None)
        steps += made
        unlocked |= {name for name, count in duel.engine.achievements.items() if count}
        if duel.unequal:
            found.append(f"seed {seed} step {made}: {', '.join(duel.unequal)}")
    return {
        "episodes": episodes,
        "steps": steps,
        "achievements_seen": len(unlocked),
        "differences": len(found),
        "first": found[:3],
    }


def fingerprints(seeds: int, steps: int, junk: int) -> list[list[str]]:
    """Fingerprints of random play with refilled vital statistics, one every 50 steps and at the end."""
    heap = [bytearray(n % 997) for n in range(junk)]  # so that objects lie at other addresses
    del heap[::3]
    return [_fingerprints_of(seed, steps) for seed in range(seeds)]


def _fingerprints_of(seed: int, steps: int) -> list[str]:
    engine, rng, seen = CrafterEngine(seed), np.random.default_rng(seed), []
    engine.reset()
    for step in range(steps):
        if step % 50 == 0:
            seen.append(engine.fingerprint())
        if engine.over:
            break
        for name in VITALS:
            engine.inventory[name] = 9
        engine.act(int(rng.integers(len(ACTIONS))))
    return [*seen, engine.fingerprint(), str(engine.step_count)]


def other_process(hash_seed: int, seeds: int, steps: int) -> list[list[str]]:
    """`fingerprints` in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "bench.engine_exactness",
        "--child",
        str(seeds),
        str(steps),
        str(hash_seed * 1000),
    ]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True)
    result: list[list[str]] = json.loads(done.stdout)
    return result


def across_processes(seeds: int, steps: int) -> dict[str, object]:
    """Seeds whose games diverged between two processes."""
    one, two = other_process(1, seeds, steps), other_process(77, seeds, steps)
    diverged = [seed for seed, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]
    made = sum(int(game[-1]) for game in one)
    return {"seeds": seeds, "steps": made, "divergences": len(diverged), "first": diverged[:3]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Differences of the engine to stock, and between processes")
    parser.add_argument("--quick", action="store_true", help="6 episodes and 5 seeds, about 15 s")
    parser.add_argument("--child", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(fingerprints(*options.child)))
        return
    stock = beside_stock(6, 300) if options.quick else beside_stock(50, 800)
    processes = across_processes(5, 100) if options.quick else across_processes(30, 400)
    print(
        f"beside stock      {stock['episodes']:>4} episodes {stock['steps']:>7} steps: "
        f"{stock['differences']} differences ({stock['achievements_seen']} of 22 achievements seen)"
    )
    print(
        f"across processes  {processes['seeds']:>4} seeds    {processes['steps']:>7} steps: "
        f"{processes['divergences']} divergences"
    )
    met = stock["differences"] == 0 and processes["divergences"] == 0
    print(
        json.dumps(
            {
                "bench": "engine_exactness",
                "quick": options.quick,
                "beside_stock": stock,
                "across_processes": processes,
                "met": met,
            }
        )
    )
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
