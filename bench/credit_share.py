"""What `credit` costs of an iteration of the demo, and that its memory grows as the decisions do.

    python -m bench.credit_share [--limit 0.0015] [--quick]

An iteration of configs/crafter_cpu.toml is played (a shorter warm-up; 64 episodes of 50 decisions); then its
stored rollouts go through `credit` again, all that the loop of a run calls: tokens (stop 7), rewards with
their guards and advantages (9, 10) and what the logs say. Its least CPU time of some repeats is held against
the CPU time of that iteration in the same process (which leaves out the task app's, so the share is rather
too large). Beside it stops 9 and 10 alone. The estimator is the demo's own, with the critic's values that
the iteration was credited by; computing these is no part of credit. Memory is the peak while the whole batch
is credited, against that of a quarter of it.

Exit code 1 where the share of the whole is above the limit, or memory grows faster than that.
"""

import sys
import tracemalloc
from collections.abc import Callable, Sequence

from bench import kit
from bench.demo_iteration import QUICK, Played, played
from shared_schemas.rollouts import Rollout
from trainer_backend import job_parts

LIMIT = 0.0015
# Peak bytes a decision of the whole batch against a quarter of it.
GROWTH_LIMIT = 1.2


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def memory_growth(
    credit: Callable[[Sequence[Rollout]], object], rollouts: Sequence[Rollout]
) -> tuple[float, float]:
    """Peak bytes per decision of the whole batch, also as a multiple of a quarter's."""
    groups = sorted({rollout.group_id for rollout in rollouts})
    some = set(groups[: max(1, len(groups) // 4)])
    quarter = [rollout for rollout in rollouts if rollout.group_id in some]
    whole = peak_bytes(lambda: credit(rollouts)) / decisions(rollouts)
    return whole, whole / (peak_bytes(lambda: credit(quarter)) / decisions(quarter))


def decisions(rollouts: Sequence[Rollout]) -> int:
    return sum(len(item.trajectory.steps) for item in rollouts if item.trajectory is not None)


def main(arguments: Sequence[str] | None = None) -> int:
    options = kit.options(
        __doc__,
        ("--limit", LIMIT, "most of an iteration's CPU time"),
        ("--quick", False, "a small iteration, to see that it works"),
        arguments=arguments,
    )
    return report(played(QUICK if options.quick else ()), options.limit)


def report(found: Played, limit: float) -> int:
    """Print the cost of credit in that iteration, and return the exit code."""
    rollouts = [item for item in found.rollouts if item.trajectory is not None]
    job, measured = found.job, found.measured

    def credit(some: Sequence[Rollout]) -> object:
        return job_parts.credit(job).credit(some, measured)

    took = {
        f"all of credit, {job.algorithm.advantage}": kit.least(lambda: credit(rollouts)).cpu_s,
        "of that rewards and advantages": kit.least(
            lambda: job_parts.credit(job).credits(rollouts, measured)
        ).cpu_s,
    }
    print(f"an iteration of {decisions(rollouts)} decisions took {found.cpu_s:.2f} s of CPU time")
    for name, seconds in took.items():
        print(f"{name:40s} {1e3 * seconds:6.1f} ms  {seconds / found.cpu_s:.3%}")
    per_decision, growth = memory_growth(credit, rollouts)
    print(f"peak memory {per_decision:.0f} bytes a decision, x{growth:.2f} of that of a quarter of them")
    share = next(iter(took.values())) / found.cpu_s
    figure = f"all of credit is {share:.3%} of an iteration (at most {limit:.2%})"
    return kit.report(figure, share <= limit and growth <= GROWTH_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
