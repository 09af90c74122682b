"""Pure: the achievement counters before and after a decision, and the step metadata made from them."""

from collections.abc import Mapping

from shared_schemas.rewards import StepRewards, decision_rewards
from shared_schemas.trajectory import StepMetadata

NO_METADATA = StepMetadata()


def achievements_status(counts: Mapping[str, int]) -> dict[str, bool]:
    return {name: count > 0 for name, count in counts.items()}


def achievements_added(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Sorted names of the achievements that a decision unlocked for the first time in the episode."""
    if before == after:
        return []
    return sorted(name for name, count in after.items() if count > 0 and before.get(name, 0) == 0)


def step_metadata(
    before: Mapping[str, int], after: Mapping[str, int], *, turn: int, step_rewards: StepRewards
) -> StepMetadata:
    """The metadata of decision `turn`, with decision_rewards if the switches ask for them.

    Every decision gets the record, also one without an achievement, unless the environment has no
    achievements at all (DESIGN.md 4.2).
    """
    if not step_rewards.emits_decision_rewards or not after:
        return NO_METADATA
    return StepMetadata(decision_rewards=decision_rewards(before, after, turn=turn))
