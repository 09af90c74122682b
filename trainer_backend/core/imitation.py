"""Which decisions the warm-up imitates, and what of them; exports mark the same. Pure."""

from typing import Any

from shared_schemas.trajectory import StepData

# The key of an action that holds what a teacher would have done (task_app.policies.labelled).
LABEL = "label"


def worth_imitating(step: StepData) -> bool:
    """Whether to imitate a decision: not if refused, without calls and words, or marked `exploratory`.

    With a label, the label's mark counts instead of the action's, which is not imitated. A label was never
    executed, so the environment did not refuse it.
    """
    label = step.action_taken.get(LABEL)
    refused = step.step_info.invalid_reason is not None and label is None
    source = step.action_taken if label is None else label
    return any(find_target(step)) and not refused and not source.get("exploratory", False)


def find_target(step: StepData) -> tuple[list[dict[str, Any]], str]:
    """The calls and words to imitate: those of the label, where another policy labelled the decision."""
    label = step.action_taken.get(LABEL)
    if label is not None:
        return label["tool_calls"], label["content"] or ""
    return [call.model_dump() for call in step.tool_calls], step.action_taken.get("content") or ""
