"""Computes metrics of a batch of episodes, and means with confidence intervals. Pure."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from shared_schemas.rewards import decision_rewards
from shared_schemas.trajectory import DecisionRewards, StepData, Trajectory, exact_tokens
from trainer_backend.core.metric import Metric, Row


def sum_known(counts: Sequence[int | None]) -> int | None:
    """Return the sum of the known counts; None if all are unknown."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % confidence interval; the bounds are None if they are undefined."""

    mean: float
    low: float | None
    high: float | None
    count: int

    def word(self, form: str = "{:.2f}", before: str = "95 % ") -> str:
        """Return text such as `1.50 (95 % -4.85 to 7.85)`, or only the mean if the bounds are None."""
        bounds = " to ".join(form.format(bound) for bound in (self.low, self.high) if bound is not None)
        return form.format(self.mean) + (f" ({before}{bounds})" if bounds else "")


Z_975 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution
# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom. For more, a series is precise enough.
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def mean_interval(values: Sequence[float]) -> Interval:
    """Compute the mean of independent values and its 95 % confidence interval (Student's t).

    For a single value, the bounds are None. Raises ValueError if `values` is empty.
    """
    count = len(values)
    if count == 0:
        raise ValueError("a mean needs at least one value")
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, None, None, 1)
    half = t_quantile_975(count - 1) * math.sqrt(variance(values) / count)
    return Interval(mean, mean - half, mean + half, count)


def over_worlds(values: Sequence[float], worlds: Sequence[str]) -> Interval:
    """Average the episodes' values in each world, and return the mean of these averages with its interval.

    `worlds` names the world or group of each episode. Episodes of a world are not independent, because they
    share their start. The 95 % interval therefore treats each world's average as one independent value. If no
    value is negative, or none is positive, the interval is cut at 0.
    """
    interval = mean_interval(by_world(values, worlds, fmean))
    least, most = min(values), max(values)
    return bounded(interval, 0.0 if least >= 0 else -math.inf, 0.0 if most <= 0 else math.inf)


def by_world(
    values: Sequence[float], worlds: Sequence[str], of: Callable[[Sequence[float]], float]
) -> list[float]:
    """Return `of(values of the world)` for each world, in the order in which the worlds first occur."""
    values_of: defaultdict[str, list[float]] = defaultdict(list)
    for world, value in zip(worlds, values, strict=True):
        values_of[world].append(value)
    return [of(several) for several in values_of.values()]


def bounded(interval: Interval, low: float, high: float) -> Interval:
    """Cut the bounds of an interval to [low, high], the range of values that the quantity can have."""
    if interval.low is None or interval.high is None:
        return interval
    return Interval(interval.mean, max(interval.low, low), min(interval.high, high), interval.count)


def t_quantile_975(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t for `freedom` degrees of freedom.

        t = z + (z^3 + z) / 4n + (5 z^5 + 16 z^3 + 3 z) / 96 n^2 + (3 z^7 + 19 z^5 + 17 z^3 - 15 z) / 384 n^3

    n is `freedom`, and z is the 97.5 % quantile of the normal distribution. The series is used above 30
    degrees of freedom, where its error is below 2e-6; for up to 30, the quantile comes from a table.

    Raises:
        ValueError: `freedom` is below 1.

    Source: Abramowitz & Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    if freedom < 1:
        raise ValueError(f"Student's t needs at least one degree of freedom, got {freedom}")
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    z = Z_975
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def step_deltas(step: StepData) -> DecisionRewards:
    """Compute which achievements a decision reached, from the counters before and after the decision.

    The stored `decision_rewards` are not read, because they depend on the reward mode.
    """
    after = step.next_observation or step.observation_data
    before = step.observation_data.achievements_counts
    return decision_rewards(before, after.achievements_counts, turn=step.turn)


def unique_achievements(trajectory: Trajectory) -> int:
    """Count the achievements that the episode unlocked."""
    return sum(count > 0 for count in trajectory.achievements_counts.values())


def env_reward(trajectory: Trajectory) -> float:
    """Sum the environment's own rewards over the episode."""
    return math.fsum(reward for step in trajectory.steps for reward in step.env_rewards or ())


def have_achievements(trajectories: Sequence[Trajectory]) -> bool:
    """Return whether any episode has achievement counters, even if all counts are 0."""
    return any(item.achievements_counts for item in trajectories)


def outcome_definition(trajectories: Sequence[Trajectory]) -> str:
    """Return what the outcome of the episodes means; different definitions are joined by "; or "."""
    return "; or ".join(dict.fromkeys(item.outcome_definition for item in trajectories))


_ACHIEVEMENTS = "episode/unique_achievements"
DECISION_METRICS = (
    Row(
        Metric("decision/count", "decisions of the batch"),
        Metric("decision/nonzero", "decisions with `unique_delta > 0`"),
        Metric("decision/nonzero_frac", "their share", "event_reward", "decisions", needs=_ACHIEVEMENTS),
    ),
    Row(
        Metric("decision/unique_sum", "sum of `unique_delta`", "achieved", "unique", needs=_ACHIEVEMENTS),
        Metric("decision/ach_sum", "sum of `ach_delta`", "achieved", "all", needs=_ACHIEVEMENTS),
    ),
    Row(
        Metric("decision/batch_nonzero", "1 if any decision of the batch has `unique_delta > 0`, else 0"),
        note="Its mean over iterations is the share of batches with event reward",
    ),
    Row(
        Metric("decision/unique_by_turn", "mean `unique_delta` at each turn"),
        Metric("decision/ach_by_turn", "mean `ach_delta` at each turn"),
        note="An episode that ended earlier counts as 0",
    ),
    Row(
        Metric("reward/sum", "sum of `r_t` over the batch", "reward_sum", "sum of r_t"),
        Metric("reward/mean", "mean sum of an episode", "reward", "reward"),
    ),
    Row(
        Metric(
            "reward/nonzero_episode_frac", "share of episodes with a non-zero `r_t`", "event_reward",
            "episodes",
        ),
        Metric("reward/batch_nonzero", "1 if the batch has such an episode"),
        note="Any source counts, penalties too (in mode `off`: the outcome)",
    ),
)  # fmt: skip


def decision_metrics(
    trajectories: Sequence[Trajectory], rewards: Sequence[Sequence[float]]
) -> dict[str, float]:
    """Compute the decision and reward metrics of a batch. `rewards` has one list of r_t per episode.

    Source: 1-crafter-event-rewards.md, "Debugging & metrics".
    """
    # Most decisions change no counter. This filter spares them the cost of `step_deltas`.
    deltas = [
        step_deltas(step)
        for trajectory in trajectories
        for step in trajectory.steps
        if (after := step.next_observation) is not None
        and after.achievements_counts != step.observation_data.achievements_counts
    ]
    decisions = sum(len(trajectory.steps) for trajectory in trajectories)
    nonzero = sum(delta.unique_delta > 0 for delta in deltas)
    total = math.fsum(math.fsum(rewards_T) for rewards_T in rewards)
    rewarded = sum(any(rewards_T) for rewards_T in rewards)
    episodes = max(len(trajectories), 1)
    return {
        "decision/count": float(decisions),
        "decision/unique_sum": float(sum(delta.unique_delta for delta in deltas)),
        "decision/ach_sum": float(sum(delta.ach_delta for delta in deltas)),
        "decision/nonzero": float(nonzero),
        "decision/nonzero_frac": nonzero / max(decisions, 1),
        "decision/batch_nonzero": float(nonzero > 0),
        "reward/sum": total,
        "reward/mean": total / episodes,
        "reward/nonzero_episode_frac": rewarded / episodes,
        "reward/batch_nonzero": float(rewarded > 0),
    }


def average_by_turn(trajectories: Sequence[Trajectory]) -> dict[str, list[float]]:
    """Return the mean unique_delta and ach_delta of each turn, over all episodes, up to the longest episode.

    An episode that has ended before a turn counts as 0 at this turn.
    """
    longest = max((len(trajectory.steps) for trajectory in trajectories), default=0)
    unique, every = [0.0] * longest, [0.0] * longest
    for step in (step for trajectory in trajectories for step in trajectory.steps):
        delta = step_deltas(step)
        unique[step.turn - 1] += delta.unique_delta
        every[step.turn - 1] += delta.ach_delta
    sums = {"decision/unique_by_turn": unique, "decision/ach_by_turn": every}
    return {name: [value / len(trajectories) for value in values] for name, values in sums.items()}


EPISODE_METRICS = (
    Row(
        Metric("episode/count", "episodes"),
        Metric(
            "episode/outcome_reward",
            "mean outcome, with its 95 % interval over groups",
            "outcome",
            "training",
        ),
        Metric("episode/decisions", "mean decisions of an episode", "length", "decisions"),
        Metric("episode/env_steps", "mean env steps of an episode", "length", "env steps"),
        Metric("episode/invalid_frac", "share of refused decisions", "invalid", "training"),
        note="Siblings share their start, so only groups are independent",
    ),
    Row(
        Metric(_ACHIEVEMENTS, "unique achievements of an episode, mean", "unique", "training"),
        when="only where there are achievements",
        note="In Crafter this is the outcome",
    ),
    Row(Metric("stop/*", "share of each [stop reason](route.md#how-an-episode-ends)", "endings")),
)


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute metrics of the lengths, stop reasons, outcomes and achievements of a batch of episodes.

    The metric of achievements is absent if the environment does not count achievements.
    """
    count = max(len(trajectories), 1)
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    reasons = Counter(str(trajectory.stop_reason) for trajectory in trajectories)
    metrics = {
        "episode/count": float(len(trajectories)),
        "episode/outcome_reward": math.fsum(item.outcome_reward for item in trajectories) / count,
        "episode/decisions": len(steps) / count,
        "episode/env_steps": sum(item.env_steps for item in trajectories) / count,
        "episode/invalid_frac": sum(step.step_info.invalid_reason is not None for step in steps)
        / max(len(steps), 1),
    }
    if have_achievements(trajectories):
        metrics["episode/unique_achievements"] = sum(map(unique_achievements, trajectories)) / count
    metrics |= user_reward_metrics(trajectories)
    return metrics | {f"stop/{reason}": number / count for reason, number in sorted(reasons.items())}


STALENESS_METRICS = (
    Row(Metric("policy/version", "version that serves after the iteration")),
    Row(
        Metric("policy/staleness_max", "versions between the policy that sampled a token and the policy that "
               "learns from it, the most", "staleness", "largest"),
        Metric("policy/staleness_mean", "their mean over tokens", "staleness", "mean"),
    ),
)  # fmt: skip


def staleness_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Return the largest and mean staleness: how many versions before `version` the tokens were sampled.

    The result is empty if no episode has tokens with known versions.
    """
    behind: Counter[int] = Counter()
    for step in (step for item in trajectories for step in item.steps):
        call = exact_tokens(step)
        if call is None:
            continue
        ends = [first for first, _ in call.versions[1:]] + [len(call.token_ids)]
        for (first, sampler), end in zip(call.versions, ends, strict=True):
            behind[version - sampler] += end - first
    if not behind.total():
        return {}
    mean = sum(distance * tokens for distance, tokens in behind.items()) / behind.total()
    return {"policy/staleness_max": float(max(behind)), "policy/staleness_mean": mean}


USER_REWARD_METRICS = (
    Row(
        Metric("user_reward/score", "the score, which is the outcome"),
        Metric("user_reward/base_sum", "sum of an episode's `base_reward`s"),
        Metric(
            "episode/environment_outcome_reward", "the environment's own outcome, which the score replaced"
        ),
        Metric("user_reward/warnings", "step outputs that did not fit their episode, a sum over the batch"),
        when="only with a reward function, means over the episodes that it judged",
    ),
)


def user_reward_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute metrics of the episodes that a reward function scored; empty if there is no such episode."""
    judged = [(item, item.user_reward) for item in trajectories if item.user_reward is not None]
    if not judged:
        return {}
    means = {
        "user_reward/score": [reward.result.score for _, reward in judged],
        "user_reward/base_sum": [
            math.fsum(step.base_reward or 0.0 for step in item.steps) for item, _ in judged
        ],
        "episode/environment_outcome_reward": [reward.environment_outcome_reward for _, reward in judged],
    }
    metrics = {name: math.fsum(values) / len(judged) for name, values in means.items()}
    return metrics | {"user_reward/warnings": float(sum(len(item.warnings) for item, _ in judged))}


def progress(trajectories: Sequence[Trajectory], worlds: Sequence[str]) -> Interval:
    """Return the mean share of all achievements that an episode unlocked, in percent, with its interval.

    Mean and interval are computed by `over_worlds`. The trajectories must have achievement counters.

    Source: BALROG (arXiv 2411.13543), the measure of progress in Crafter.
    """
    total = len({name for item in trajectories for name in item.achievements_counts})
    shares = [100 * unique_achievements(item) / total for item in trajectories]
    return bounded(over_worlds(shares, worlds), 0.0, 100.0)


# Name of the environment for which the Crafter score is defined.
CRAFTER = "crafter"
