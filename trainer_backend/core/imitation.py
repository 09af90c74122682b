"""Selects the decisions that the supervised warm-up before RL imitates, and their target outputs. Pure.

Exports of training data use the same selection.
"""

from typing import Any

from shared_schemas.trajectory import StepData

# Key of `action_taken`; the value is what a teacher would have done (task_app.policies.labelled).
LABEL = "label"


def worth_imitating(step: StepData) -> bool:
    """Return whether the warm-up imitates a decision.

    A decision is not imitated if it was refused, is empty, or is marked `exploratory`. If it has a teacher's
    label (LABEL), the label is imitated instead of the action, even if the action was refused. In this case,
    the label must not be empty or `exploratory`.
    """
    label = step.action_taken.get(LABEL)
    refused = step.step_info.invalid_reason is not None and label is None
    source = step.action_taken if label is None else label
    return any(find_target(step)) and not refused and not source.get("exploratory", False)


def find_target(step: StepData) -> tuple[list[dict[str, Any]], str]:
    """Return the tool calls and the text to imitate: the teacher's label if there is one, else the action."""
    label = step.action_taken.get(LABEL)
    if label is not None:
        return label["tool_calls"], label["content"] or ""
    return [call.model_dump() for call in step.tool_calls], step.action_taken.get("content") or ""
