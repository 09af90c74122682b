"""Makes step metadata from the achievement counters before and after a decision. Pure."""

from collections.abc import Mapping

from shared_schemas.rewards import StepRewards, decision_rewards
from shared_schemas.trajectory import StepMetadata

NO_METADATA = StepMetadata()


def achievements_status(counts: Mapping[str, int]) -> dict[str, bool]:
    return {name: count > 0 for name, count in counts.items()}


def achievements_added(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Return the sorted names of the achievements that a decision unlocked for the first time."""
    if before == after:
        return []
    return sorted(name for name, count in after.items() if count > 0 and before.get(name, 0) == 0)


def step_metadata(
    before: Mapping[str, int], after: Mapping[str, int], *, turn: int, step_rewards: StepRewards
) -> StepMetadata:
    """Return the metadata of decision `turn`. It contains decision_rewards if `step_rewards` requires them.

    A decision that unlocked nothing has decision_rewards, too, but a decision in an environment without
    achievements has none (DESIGN.md 4.2).
    """
    if not step_rewards.emits_decision_rewards or not after:
        return NO_METADATA
    return StepMetadata(decision_rewards=decision_rewards(before, after, turn=turn))
