"""Selects the decisions that the warm-up imitates, and their parts; exports select the same. Pure."""

from typing import Any

from shared_schemas.trajectory import StepData

# The key of an action that holds what a teacher would have done (task_app.policies.labelled).
LABEL = "label"


def worth_imitating(step: StepData) -> bool:
    """Return whether to imitate a decision: not if it was refused, is empty, or is marked `exploratory`.

    If the decision has a label (LABEL), the label is imitated instead of the action, so the label's mark
    counts. A label was never executed, so it was not refused.
    """
    label = step.action_taken.get(LABEL)
    refused = step.step_info.invalid_reason is not None and label is None
    source = step.action_taken if label is None else label
    return any(find_target(step)) and not refused and not source.get("exploratory", False)


def find_target(step: StepData) -> tuple[list[dict[str, Any]], str]:
    """Return the calls and the text to imitate: a teacher's label if the decision has one, else its own."""
    label = step.action_taken.get(LABEL)
    if label is not None:
        return label["tool_calls"], label["content"] or ""
    return [call.model_dump() for call in step.tool_calls], step.action_taken.get("content") or ""
