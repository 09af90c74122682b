"""Computes the reward r_t of each decision of an episode, and defines the settings for it. Pure.

Both services use this module: the task app to report the rewards of an episode, the trainer to compute them
for stored rollouts.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal

from pydantic import ConfigDict, Field

from shared_schemas.base import Body
from shared_schemas.rounding import add_up
from shared_schemas.trajectory import DecisionRewards, StepData

StepRewardsMode = Literal["off", "decision_stepwise", "env_sparse"]
EventRewardsKind = Literal["unique", "absolute"]


class StepRewardKeys(Body):
    """The settings of decision rewards, with their names in the table [training].

    The first two settings decide whether the task app writes `decision_rewards` into a step's metadata. The
    other three affect only how rewards are computed; a request contains them so that they are recorded.

    Source: 1-crafter-event-rewards.md, "Switches/Flags in TOML"; DESIGN.md 4.3.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    step_rewards_enabled: bool = Field(default=False, description="master switch of decision rewards")
    step_rewards_mode: StepRewardsMode = Field(default="off", description="source of r_t")
    event_rewards_kind: EventRewardsKind = Field(
        default="unique", description="count first unlocks, or every achievement whose counter rose"
    )
    step_rewards_beta: float = Field(default=0.0, ge=0, description="bonus beta * (T - t) for a first unlock")
    step_rewards_indicator_lambda: float = Field(
        default=0.0, ge=0, description="bonus for a decision with a first unlock"
    )

    @property
    def reward_mode(self) -> StepRewardsMode:
        """`step_rewards_mode`, or `off` if `step_rewards_enabled` is false."""
        return self.step_rewards_mode if self.step_rewards_enabled else "off"

    @property
    def emits_decision_rewards(self) -> bool:
        return self.reward_mode == "decision_stepwise"

    @property
    def step_rewards(self) -> "StepRewards":
        """The same settings in the form of a rollout request."""
        values = {name: getattr(self, name) for name in StepRewardKeys.model_fields}
        return StepRewards.model_validate(values, by_alias=False, by_name=True)


# Names of the settings in `step_rewards`, which are those of existing Crafter task apps.
WIRE_NAMES = {
    "step_rewards_enabled": "enabled",
    "step_rewards_mode": "mode",
    "event_rewards_kind": "kind",
    "step_rewards_indicator_lambda": "indicator_lambda",
    "step_rewards_beta": "step_beta",
}


class StepRewards(StepRewardKeys):
    """The table `step_rewards` of a config or request, with the key names of existing Crafter task apps."""

    model_config = ConfigDict(
        alias_generator=lambda name: WIRE_NAMES.get(name, name), serialize_by_alias=True
    )


# Published names of the `strategy` in which all achievements count the same, the only one of the trainer.
CONSISTENT_STRATEGIES = ("consistent", "simple", "consistent_stepwise", "decision_consistent")


class UndefinedReward(ValueError):
    """Raised if rewards of an episode are undefined; `turn` is the faulty decision, if there is just one."""

    def __init__(self, fault: str, *, turn: int | None = None) -> None:
        super().__init__(fault)
        self.turn = turn


def reward_vector(
    steps: Sequence[StepData], outcome_reward: float, keys: StepRewardKeys, *, horizon: int | None = None
) -> list[float]:
    """Return the reward r[t] of every decision t of one episode of T decisions.

        off                r[T-1] = outcome_reward + all penalties;  every other r[t] = 0
        decision_stepwise  r[t] = delta_t + [unique_delta_t > 0] * (lambda + beta * (H - t)) + parts_t
        env_sparse         r[t] = sum of the decision's env_rewards + parts_t

    delta_t is unique_delta or ach_delta (by `event_rewards_kind`), lambda and beta are the settings that end
    in these names, parts_t is the sum of the decision's reward_parts, and H is the horizon. `off` ignores
    decision metadata, and the other modes ignore the outcome, so that no achievement counts twice. In an
    environment without achievements, the `decision_stepwise` reward r[t] is parts_t.

    If `horizon` is None, H is T, as in the source. A reward then depends on how many decisions follow it.
    Raises UndefinedReward if the episode has no decisions or more than the horizon, if its turns are not 1..T
    in order, if a record that the mode needs is missing or belongs to another turn, or if a reward is missing
    or not finite.

    Source: 1-crafter-event-rewards.md, "Collector changes"; DESIGN.md 4.3.
    """
    _check_turns(steps)
    mode = keys.reward_mode
    if mode == "off":
        penalties = [part.value for step in steps for part in step.reward_parts if part.source == "penalty"]
        rewards_T = [0.0] * (len(steps) - 1) + [add_up([outcome_reward, *penalties])]
    elif mode == "env_sparse":
        if (bare := next((step for step in steps if step.env_rewards is None), None)) is not None:
            raise UndefinedReward("no env_rewards, which mode 'env_sparse' needs", turn=bare.turn)
        rewards_T = [add_up([*(step.env_rewards or ()), *_parts(step)]) for step in steps]
    elif has_achievements(steps):
        rewards_T = _event_rewards(steps, keys, horizon)
    else:
        rewards_T = [add_up(_parts(step)) for step in steps]
    for t, reward in enumerate(rewards_T):
        if not math.isfinite(reward):
            raise UndefinedReward(f"the reward is {reward}; it must be finite", turn=t + 1)
    return rewards_T


def event_terms(record: DecisionRewards, keys: StepRewardKeys, *, decisions_left: int) -> list[float]:
    """Return the terms of a decision's reward for achievements: delta, and any bonuses for a first unlock.

    `decisions_left` is H - t: it counts the decision itself.
    """
    delta = float(record.unique_delta if keys.event_rewards_kind == "unique" else record.ach_delta)
    if record.unique_delta == 0:
        return [delta]
    return [delta, keys.step_rewards_indicator_lambda, keys.step_rewards_beta * decisions_left]


def has_achievements(steps: Sequence[StepData]) -> bool:
    """Whether any step of an episode has counters or a record of achievements.

    An environment with achievements shows all its counters in every step (`task_app.testing` checks that).
    All steps are searched, because single steps of a faulty episode may lack counters and record.
    """
    return any(
        step.metadata.decision_rewards is not None
        or step.observation_data.achievements_counts
        or (step.next_observation is not None and step.next_observation.achievements_counts)
        for step in steps
    )


def _check_turns(steps: Sequence[StepData]) -> None:
    if not steps:
        raise UndefinedReward("an episode without a decision is a failure, not a reward")
    for t, step in enumerate(steps):
        if not 1 <= step.turn <= len(steps):
            raise UndefinedReward(f"turns of this episode are 1..{len(steps)}", turn=step.turn)
        if step.turn != t + 1:
            raise UndefinedReward(f"found where turn {t + 1} belongs", turn=step.turn)


def _parts(step: StepData) -> list[float]:
    return [part.value for part in step.reward_parts]


def _event_rewards(steps: Sequence[StepData], keys: StepRewardKeys, horizon: int | None) -> list[float]:
    end = len(steps) if horizon is None else horizon
    if len(steps) > end:
        # Beyond the horizon the time weight would turn negative and punish an achievement.
        raise UndefinedReward(f"{len(steps)} decisions, but the horizon is max_decisions = {end}")
    return [
        add_up([*event_terms(_record(step, len(steps)), keys, decisions_left=end - t), *_parts(step)])
        for t, step in enumerate(steps)
    ]


def _record(step: StepData, length: int) -> DecisionRewards:
    """Return the achievements of a step. Raises UndefinedReward if they are missing or of another turn.

    `length` is the episode's number of decisions.
    """
    record = step.metadata.decision_rewards
    if record is not None and record.turn == step.turn:
        return record
    if record is None:
        fault = "no decision_rewards, which mode 'decision_stepwise' needs"
    elif not 1 <= record.turn <= length:
        fault = f"its record names turn {record.turn}, outside 1..{length}"
    elif record.turn < step.turn:  # the step of that turn was read before, with its own record
        fault = f"holds a second record for turn {record.turn}"
    else:
        fault = f"holds the record of turn {record.turn}"
    raise UndefinedReward(fault, turn=step.turn)


@lru_cache(maxsize=1024)
def _no_rewards(turn: int) -> DecisionRewards:
    """Return the record of a decision without achievements. It is cached and shared, because it is frozen."""
    return DecisionRewards(turn=turn, ach_delta=0, unique_delta=0, all=(), unique=())


def decision_rewards(before: Mapping[str, int], after: Mapping[str, int], *, turn: int) -> DecisionRewards:
    """Compute a decision's achievements from the counters before and after it; `turn` counts from 1.

        all    = achievements whose counter rose during the decision
        unique = the achievements in `all` whose counter was 0 before: first unlocked in the episode

    A missing counter counts as 0. Raises ValueError if a counter fell.

    Source: 1-crafter-event-rewards.md, "What to compute per decision"; DESIGN.md 4.1.
    """
    if before == after:  # most decisions move no counter
        return _no_rewards(turn)
    fell = sorted(name for name, count in before.items() if after.get(name, 0) < count)
    if fell:
        raise ValueError(f"achievement counters may only grow; fell during turn {turn}: {', '.join(fell)}")
    rose = sorted(name for name, count in after.items() if count > before.get(name, 0))
    first = [name for name in rose if before.get(name, 0) == 0]
    return DecisionRewards(
        turn=turn, ach_delta=len(rose), unique_delta=len(first), all=tuple(rose), unique=tuple(first)
    )
