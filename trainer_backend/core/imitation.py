"""Which decisions are worth learning by heart: for the warm-up, and for rows that other trainers get."""

from shared_schemas.trajectory import StepData


def worth_imitating(step: StepData) -> bool:
    """Not what was refused, nor an end without words, and not a detour that a policy marked `exploratory`."""
    refused = step.step_info.invalid_reason is not None
    says_something = bool(step.tool_calls or step.action_taken.get("content"))
    return says_something and not refused and not step.action_taken.get("exploratory", False)
