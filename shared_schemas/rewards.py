"""Decision rewards on the wire, and the pure function that computes them.

The function is here and not in the task app, so that the trainer can credit stored rollouts again.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from shared_schemas.base import Body

StepRewardsMode = Literal["off", "decision_stepwise", "env_sparse"]
EventRewardsKind = Literal["unique", "absolute"]
RewardSource = Literal["interaction", "tool", "penalty", "user"]


class StepRewards(Body):
    """The training switches in the task app's form (`config.step_rewards`).

    The task app reads only `enabled` and `mode`, which decide whether a step's metadata carries
    `decision_rewards`. The other three make a stored request tell how it was credited. Source:
    1-crafter-event-rewards.md; names of the wire form: existing Crafter task apps.
    """

    enabled: bool = False
    mode: StepRewardsMode = "off"
    kind: EventRewardsKind = "unique"
    indicator_lambda: float = Field(default=0.0, ge=0.0)
    step_beta: float = Field(default=0.0, ge=0.0)

    @property
    def emits_decision_rewards(self) -> bool:
        return self.enabled and self.mode == "decision_stepwise"


class TrainingSwitches(Body):
    """The same switches with the names that source 1 publishes for [training]."""

    step_rewards_enabled: bool = False
    step_rewards_mode: StepRewardsMode = "off"
    step_rewards_beta: float = Field(default=0.0, ge=0.0)
    step_rewards_indicator_lambda: float = Field(default=0.0, ge=0.0)
    event_rewards_kind: EventRewardsKind = "unique"

    @property
    def step_rewards(self) -> StepRewards:
        return StepRewards(
            enabled=self.step_rewards_enabled,
            mode=self.step_rewards_mode,
            kind=self.event_rewards_kind,
            indicator_lambda=self.step_rewards_indicator_lambda,
            step_beta=self.step_rewards_beta,
        )


class DecisionRewards(Body):
    """The achievements of one decision; `turn` counts from 1 (decision index t is turn - 1)."""

    turn: int = Field(ge=1)
    ach_delta: int = Field(ge=0)
    unique_delta: int = Field(ge=0)
    all: tuple[str, ...]
    unique: tuple[str, ...]

    @model_validator(mode="after")
    def _counts_match_names(self) -> "DecisionRewards":
        if self.ach_delta != len(self.all) or self.unique_delta != len(self.unique):
            raise ValueError("ach_delta and unique_delta must count the names in 'all' and 'unique'")
        return self


class RewardPart(Body):
    """A named part of a decision's reward, beside those of the environment."""

    source: RewardSource
    value: float


def decision_rewards(before: Mapping[str, int], after: Mapping[str, int], *, turn: int) -> DecisionRewards:
    """The achievements of a decision, from the counters before and after it.

        all    = achievements whose counter rose during the decision
        unique = those whose counter was 0 before: first unlocked in the episode

    Crafter's counters only grow, so `unique` is a subset of `all` and unique_delta <= ach_delta.

    Args:
        before: counter of every achievement before the decision.
        after: the same counters after its last env step; a missing name counts 0.
        turn: the decision's number in its episode, from 1.

    Raises:
        ValueError: a counter fell.

    Source: 1-crafter-event-rewards.md, "What to compute per decision"; DESIGN.md 4.1.
    """
    if before == after:  # most decisions move no counter
        return DecisionRewards(turn=turn, ach_delta=0, unique_delta=0, all=(), unique=())
    fell = sorted(name for name, count in before.items() if after.get(name, 0) < count)
    if fell:
        raise ValueError(f"achievement counters may only grow; fell during turn {turn}: {', '.join(fell)}")
    rose = sorted(name for name, count in after.items() if count > before.get(name, 0))
    first = [name for name in rose if before.get(name, 0) == 0]
    return DecisionRewards(
        turn=turn, ach_delta=len(rose), unique_delta=len(first), all=tuple(rose), unique=tuple(first)
    )
