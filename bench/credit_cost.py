"""Measures which share of an iteration credit takes, in CPU time, and how much memory.

    python -m bench.credit_cost [--quick]

An iteration of configs/crafter_cpu.toml is played (a shorter warm-up; 64 episodes of 50 decisions). Then its
rollouts are credited again, as by the training loop and with the same values of the critic: tokens, rewards
with their guards, advantages, and the figures for the log. The least CPU time of some repeats is divided by
the iteration's CPU time. That is the time of the trainer's process without the task app's, so the shares are
rather too large. The time of rewards and advantages alone is measured too, and the peak memory per decision,
for the whole batch and for a quarter of it. The exit code is 1 if the share of credit, or the ratio of the
memory of the batch to that of the quarter, is above its limit.
"""

import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence

from bench import kit
from bench.played_iteration import QUICK, Played, played
from shared_schemas.rollouts import Rollout
from trainer_backend import job_parts

LIMIT = 0.0015
# Largest ratio of the peak bytes per decision: of the whole batch to a quarter of it.
GROWTH_LIMIT = 1.2


def decisions(rollouts: Sequence[Rollout]) -> int:
    return sum(len(item.trajectory.steps) for item in rollouts if item.trajectory is not None)


def least_cpu_s(work: Callable[[], object], repeats: int = 7) -> float:
    """Return the least CPU seconds of a call over some repeats."""

    def once() -> float:
        begun_s = time.process_time()
        work()
        return time.process_time() - begun_s

    return min(once() for _ in range(repeats))


def report_credit(found: Played, limit: float) -> int:
    rollouts = [item for item in found.rollouts if item.trajectory is not None]
    job, measured = found.job, found.measured

    def credit(some: Sequence[Rollout]) -> object:
        return job_parts.credit(job).credit(some, measured)

    whole_s = least_cpu_s(lambda: credit(rollouts))
    some_s = least_cpu_s(lambda: job_parts.credit(job).credits(rollouts, measured))
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
    """Return the peak bytes per decision of the whole batch, and their ratio to those of a quarter."""
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


def main() -> int:
    options = kit.options(__doc__, ("--quick", False, "an iteration of 40 decisions"))
    return report_credit(played(QUICK if options.quick else ()), LIMIT)


if __name__ == "__main__":
    sys.exit(main())
