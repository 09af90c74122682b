"""Tool calls -> Crafter actions, or the reason why not, in words that a model can act on."""

from collections.abc import Sequence
from typing import Any

from shared_schemas.base import did_you_mean
from task_app.protocols import ToolRequest

TOOL_NAME = "interact_many"
CLIP = 500


class InvalidCall(ValueError):
    """A decision that cannot be carried out; its message is the `invalid_reason`."""


def read_actions(calls: Sequence[ToolRequest], *, known: Sequence[str], max_actions: int) -> list[str]:
    """The actions of all calls of one decision, in order.

    Raises:
        InvalidCall: there is no call, any call is not a proper one, or all together hold more than
            `max_actions` actions (then none is carried out).
    """
    if not calls:
        raise InvalidCall(f"no tool call; call {TOOL_NAME} once with 1 to {max_actions} actions")
    actions = [name for call in calls for name in _actions_of(call, known=known, max_actions=max_actions)]
    if len(actions) > max_actions:
        raise InvalidCall(
            f"{len(calls)} calls hold {len(actions)} actions together; a decision has 1 to {max_actions}"
        )
    return actions


def _actions_of(call: ToolRequest, *, known: Sequence[str], max_actions: int) -> list[str]:
    if call.name != TOOL_NAME:
        raise InvalidCall(f"unknown tool {_clip(call.name)!r}{did_you_mean(call.name[:CLIP], [TOOL_NAME])}")
    if call.arguments is None:
        raise InvalidCall(f"the arguments of {TOOL_NAME} are no JSON object: {_clip(call.raw_arguments)!r}")
    extra = sorted(str(key) for key in call.arguments if key != "actions")
    if extra:
        raise InvalidCall(f"unknown argument {_clip(extra[0])!r}{did_you_mean(extra[0][:CLIP], ['actions'])}")
    return _checked(call.arguments.get("actions"), known=known, max_actions=max_actions)


def _checked(actions: Any, *, known: Sequence[str], max_actions: int) -> list[str]:
    if not isinstance(actions, list | tuple):
        raise InvalidCall(f"'actions' must be a list of 1 to {max_actions} action names")
    if not 1 <= len(actions) <= max_actions:
        raise InvalidCall(f"'actions' holds {len(actions)} names; allowed are 1 to {max_actions}")
    for action in actions:
        if not isinstance(action, str):
            raise InvalidCall(f"'actions' must hold names, not {_clip(repr(action))}")
        if action not in known:
            raise InvalidCall(f"unknown action {_clip(action)!r}{did_you_mean(action[:CLIP], known)}")
    return list(actions)


def _clip(text: str, limit: int = 40) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
