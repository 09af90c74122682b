"""r_t: the reward of every decision of one episode, under the switches of `[training]` (DESIGN.md 4.3)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shared_schemas.rewards import DecisionRewards, EventRewardsKind, StepRewardsMode
from shared_schemas.trajectory import StepData
from trainer_backend.core.rounding import add_up
from trainer_backend.errors import RewardError, place

Horizon = Literal["realised", "max_decisions"]


@dataclass(frozen=True, slots=True)
class RewardConfig:
    """The step-reward switches, under the names that they have inside the trainer.

    enabled           step_rewards_enabled
    mode              step_rewards_mode
    kind              event_rewards_kind: which delta of a decision is its reward
    beta              step_rewards_beta: reward for unlocking early, per decision left
    indicator_lambda  step_rewards_indicator_lambda: reward for unlocking at all, once a decision
    horizon           step_rewards_horizon: what "decisions left" counts down from: the T that the
                      episode turned out to have (as published; looks into the future) or max_decisions
    max_decisions     the job's limit of decisions an episode; needed by that horizon alone

    Raises:
        ValueError: beta or lambda is negative or not finite; the horizon lacks its max_decisions.

    Source: 1-crafter-event-rewards.md, "Switches/Flags in TOML"; DESIGN.md 4.3.
    """

    enabled: bool = False
    mode: StepRewardsMode = "off"
    kind: EventRewardsKind = "unique"
    beta: float = 0.0
    indicator_lambda: float = 0.0
    horizon: Horizon = "realised"
    max_decisions: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("beta", self.beta), ("indicator_lambda", self.indicator_lambda)):
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name} must be finite and at least 0, got {value}")
        if self.horizon == "max_decisions" and (self.max_decisions is None or self.max_decisions < 1):
            raise ValueError(f"horizon 'max_decisions' needs max_decisions >= 1, got {self.max_decisions}")

    @property
    def effective_mode(self) -> StepRewardsMode:
        """The mode that acts: `off` whenever the master switch is off."""
        return self.mode if self.enabled else "off"


def reward_vector(
    steps: Sequence[StepData], outcome_reward: float, config: RewardConfig, *, rollout_id: str = ""
) -> list[float]:
    """r_t of every decision of one episode.

        off                r[T-1] = outcome_reward + all penalties;  every other r[t] = 0
        decision_stepwise  r[t] = delta_t + [unique_delta_t > 0] * (lambda + beta * (H - t)) + parts_t
        env_sparse         r[t] = sum of the decision's env_rewards + parts_t

    delta_t is unique_delta or ach_delta, parts_t the sum of the decision's reward_parts, H the horizon.
    `off` never reads decision metadata, and the other two never read the outcome: an achievement
    would count twice. An environment without achievements has no deltas: there r[t] is parts_t.

    Args:
        steps: [T] decisions in order; steps[t].turn is t + 1.
        outcome_reward: what the episode as a whole was worth, in reward units.
        config: the switches.
        rollout_id: named in errors.

    Returns:
        [T] rewards, in reward units.

    Raises:
        RewardError: no decision; a turn outside 1..T or out of order; two records for one turn; a
            missing record or reward in a mode that needs it; a value that is not finite; more
            decisions than the horizon allows.

    Source: 1-crafter-event-rewards.md, "Collector changes"; DESIGN.md 4.3.
    """
    _check_turns(steps, rollout_id)
    mode = config.effective_mode
    if mode == "off":
        rewards_T = _outcome_at_the_end(steps, outcome_reward)
    elif mode == "env_sparse":
        rewards_T = [_environment_reward(step, rollout_id) for step in steps]
    else:
        rewards_T = _event_rewards(steps, config, rollout_id)
    for t, reward in enumerate(rewards_T):
        if not math.isfinite(reward):
            raise RewardError(f"the reward is {reward}; it must be finite", where=place(rollout_id, t + 1))
    return rewards_T


def _check_turns(steps: Sequence[StepData], rollout_id: str) -> None:
    if not steps:
        raise RewardError("an episode without a decision is a failure, not a reward", where=place(rollout_id))
    for t, step in enumerate(steps):
        if not 1 <= step.turn <= len(steps):
            raise RewardError(
                f"turns of this episode are 1..{len(steps)}", where=place(rollout_id, step.turn)
            )
        if step.turn != t + 1:
            raise RewardError(f"found where turn {t + 1} belongs", where=place(rollout_id, step.turn))


def _outcome_at_the_end(steps: Sequence[StepData], outcome_reward: float) -> list[float]:
    penalties = [part.value for step in steps for part in step.reward_parts if part.source == "penalty"]
    return [0.0] * (len(steps) - 1) + [add_up([outcome_reward, *penalties])]


def _parts(step: StepData) -> list[float]:
    return [part.value for part in step.reward_parts]


def _environment_reward(step: StepData, rollout_id: str) -> float:
    if step.env_rewards is None:
        raise RewardError("no env_rewards, which mode 'env_sparse' needs", where=place(rollout_id, step.turn))
    return add_up([*step.env_rewards, *_parts(step)])


def _event_rewards(steps: Sequence[StepData], config: RewardConfig, rollout_id: str) -> list[float]:
    if not has_achievements(steps):
        return [add_up(_parts(step)) for step in steps]
    horizon = _horizon(len(steps), config, rollout_id)
    records_T = _records(steps, rollout_id)
    return [
        add_up([*_event_reward(record, config, decisions_left=horizon - t), *_parts(step)])
        for t, (step, record) in enumerate(zip(steps, records_T, strict=True))
    ]


def has_achievements(steps: Sequence[StepData]) -> bool:
    """Whether the environment of an episode has achievements: any step has a counter, or a record of them.

    An environment that has any shows all its counters, zeros too, from the start on (`task_app.testing`
    checks that). So a single step that lacks its record, or its counters, is found by those of the others.
    """
    return any(
        step.metadata.decision_rewards is not None
        or step.observation_data.achievements_counts
        or (step.next_observation is not None and step.next_observation.achievements_counts)
        for step in steps
    )


def _horizon(length: int, config: RewardConfig, rollout_id: str) -> int:
    if config.horizon == "realised" or config.max_decisions is None:
        return length
    if length > config.max_decisions:
        # Beyond the horizon the time weight would turn negative and punish an achievement.
        raise RewardError(
            f"{length} decisions, but the horizon is max_decisions = {config.max_decisions}",
            where=place(rollout_id),
        )
    return config.max_decisions


def _records(steps: Sequence[StepData], rollout_id: str) -> list[DecisionRewards]:
    """[T] the record of each decision, each found in its own step."""
    seen: set[int] = set()
    records_T: list[DecisionRewards] = []
    for step in steps:
        record = step.metadata.decision_rewards
        if record is None or record.turn != step.turn:
            raise RewardError(_mismatch(record, seen, len(steps)), where=place(rollout_id, step.turn))
        seen.add(record.turn)
        records_T.append(record)
    return records_T


def _mismatch(record: DecisionRewards | None, seen: set[int], length: int) -> str:
    """Say why a record does not belong to the decision that holds it.

    Args:
        seen: turns whose records were read before.
        length: decisions of the episode.
    """
    if record is None:
        return "no decision_rewards, which mode 'decision_stepwise' needs"
    if not 1 <= record.turn <= length:
        return f"its record names turn {record.turn}, outside 1..{length}"
    if record.turn in seen:
        return f"holds a second record for turn {record.turn}"
    return f"holds the record of turn {record.turn}"


def _event_reward(record: DecisionRewards, config: RewardConfig, *, decisions_left: int) -> list[float]:
    """The terms of a decision's event reward."""
    delta = float(record.unique_delta if config.kind == "unique" else record.ach_delta)
    if record.unique_delta == 0:
        return [delta]
    return [delta, config.indicator_lambda, config.beta * decisions_left]


def discounted_returns(rewards_T: Sequence[float], gamma: float) -> list[float]:
    """Return-to-go G_t of every decision of one episode.

        G_t = r_t + gamma * G_{t+1},   with G_T = 0

    r_t is the reward earned *by* decision t (t = 0 .. T-1), so G_0 is the
    discounted return of the whole episode. An empty episode has no returns.

    Args:
        rewards_T: [T] reward of each decision, in reward units.
        gamma: discount per *decision* (not per token, not per env step), in [0, 1].

    Returns:
        [T] returns, same units as the rewards.

    Raises:
        ValueError: gamma is outside [0, 1].

    Source: Sutton & Barto, Reinforcement Learning, 2nd ed., eq. 3.9 (their R_{t+1} is our r_t).
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma must lie in [0, 1], got {gamma}")
    returns_T = [0.0] * len(rewards_T)
    return_to_go = 0.0
    for t in reversed(range(len(rewards_T))):
        return_to_go = rewards_T[t] + gamma * return_to_go
        returns_T[t] = return_to_go
    return returns_T


def discounted_sizes(rewards_T: Sequence[float], gamma: float) -> list[float]:
    """[T] returns-to-go of |r_t|: what rounding errors of `discounted_returns` are measured by."""
    return discounted_returns([abs(reward) for reward in rewards_T], gamma)
