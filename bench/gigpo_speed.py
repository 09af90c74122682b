"""GiGPO's advantages on one core: 6,400 steps below 10 ms, 64,000 below 150 ms; state keys are made before.

    python -m bench.gigpo_speed [--repeats 5]

Batches are groups of 8 episodes of 50 decisions, whose states meet about as often as in Crafter. Timed is the
least CPU time of some repeats. Beside it stands how time and memory grow from the small batch to the large:
both are linear. The exit code says whether both limits are met.
"""

import random
import sys
import time
import tracemalloc

from bench import kit
from trainer_backend.core.advantages.episodes import EpisodeRewards
from trainer_backend.core.advantages.gigpo import gigpo
from trainer_backend.job.training_table import AlgorithmTable

LIMITS_MS = {6_400: 10.0, 64_000: 150.0}
GROUP, DECISIONS = 8, 50


def batch_of(steps: int) -> list[EpisodeRewards]:
    draw = random.Random(steps)
    return [
        EpisodeRewards(
            f"r-{i}",
            f"g-{i // GROUP}",
            [float(draw.random() < 0.15) for _ in range(DECISIONS)],
            state_keys_T=[str(int(draw.expovariate(1 / 20))) for _ in range(DECISIONS)],
        )
        for i in range(steps // DECISIONS)
    ]


def least_ms(episodes: list[EpisodeRewards], repeats: int) -> float:
    def once() -> float:
        start = time.process_time()
        gigpo(episodes, AlgorithmTable(gamma=0.95))
        return time.process_time() - start

    return 1e3 * min(once() for _ in range(repeats))


def peak_bytes(episodes: list[EpisodeRewards]) -> int:
    tracemalloc.start()
    gigpo(episodes, AlgorithmTable(gamma=0.95))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def main() -> int:
    options = kit.options(__doc__, ("--repeats", 5))
    found = {}
    for steps, limit in LIMITS_MS.items():
        episodes = batch_of(steps)
        lone = gigpo(episodes, AlgorithmTable(gamma=1.0)).diagnostics["anchors/singleton_frac"]
        found[steps] = least_ms(episodes, options.repeats)
        verdict = "ok" if found[steps] <= limit else "TOO SLOW"
        kilobytes = peak_bytes(episodes) / 1024
        print(
            f"{steps:6d} steps: {found[steps]:6.1f} ms (at most {limit:g}) {verdict}; "
            f"{1024 * kilobytes / steps:.0f} bytes a step; {lone:.0%} alone in their state"
        )
    print(f"ten times the steps take x{found[64_000] / found[6_400]:.1f} the time")
    return 0 if all(found[steps] <= limit for steps, limit in LIMITS_MS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
