"""Writes the messages and the tool of Crafter for models, and reads the models' tool calls.

The rules and costs in the messages are those of the installed crafter package.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from shared_schemas.base import suggest_to_policy
from shared_schemas.messages import FunctionSpec, ToolSpec
from shared_schemas.plain_text import encodable
from task_app.environments.crafter.rules import ACHIEVEMENTS, ACTIONS, RULES
from task_app.protocols import PastDecision, ToolRequest

MAX_PAST = 3
_NOOP_RAN = "One noop was executed instead."
NO_NEWS: dict[str, Any] = {"unlocked": [], "health_change": 0, "no_effect": False, "invalid": None}

_INTRODUCTION = """\
You play Crafter, the survival game by Danijar Hafner. You are on a 64x64 map and see the 9x7 cells around
you. Your aim is to unlock as many different achievements as you can.

Rules
- A move turns you that way and takes one step if the cell is free. You can walk on {walkable};
  everything else blocks you, except lava, which kills.
- `do` acts on the cell you face: it collects, drinks, attacks, or eats. Face a thing by moving towards it.
- health, food, drink and energy run from 0 to 9. Food comes from cows (several hits) and ripe plants,
  drink from water, energy from sleep. When one of them is 0 you lose health.
- `sleep` goes on until energy is full again; you wake up earlier when hurt. It does nothing at full energy.
- Zombies live on grass, more of them in the dark. Skeletons live in tunnels and shoot arrows.
- The map is printed row by row: the first line is the north (up), the first name of a line the west (left).
- Nearby means within the 3x3 cells around you."""


@cache
def system_prompt(max_actions: int) -> str:
    """Make the system message, which lists rules, costs, achievements and actions."""
    return "\n\n".join(
        (
            _INTRODUCTION.format(walkable=", ".join(RULES.walkable)),
            "Costs\n" + "\n".join(_cost_lines()),
            "Achievements\n" + ", ".join(ACHIEVEMENTS),
            "Actions\n" + ", ".join(ACTIONS),
            f"Always answer with one `{TOOL_NAME}` call of 1 to {max_actions} actions, carried out in order.",
        )
    )


def _cost_lines() -> list[str]:
    lines = [
        f"- do on {material}: {_amounts(rule.receives)}"
        + (f", needs {_amounts(rule.requires)}" if rule.requires else "")
        + (f", with probability {rule.probability:g}" if rule.probability < 1 else "")
        + (f"; leaves {rule.leaves}" if rule.leaves != material else "")
        for material, rule in RULES.collect.items()
    ]
    lines += [
        f"- place_{name}: uses {_amounts(rule.uses)}; onto {', '.join(rule.where)}"
        for name, rule in RULES.place.items()
    ]
    lines += [
        f"- make_{name}: uses {_amounts(rule.uses)}; nearby {' and '.join(rule.nearby)}"
        for name, rule in RULES.make.items()
    ]
    return lines


def _amounts(items: Mapping[str, int]) -> str:
    return " and ".join(f"{count} {name}" for name, count in items.items())


@cache
def tool_spec(max_actions: int) -> ToolSpec:
    """Make the specification of `interact_many(actions)`, the only tool of Crafter."""
    description = f"Carry out 1 to {max_actions} Crafter actions in order."
    actions = {
        "type": "array",
        "items": {"type": "string", "enum": list(ACTIONS)},
        "minItems": 1,
        "maxItems": max_actions,
        "description": "names of the actions, carried out in order",
    }
    parameters = {
        "type": "object",
        "properties": {"actions": actions},
        "required": ["actions"],
        "additionalProperties": False,
    }
    function = FunctionSpec(name=TOOL_NAME, description=description, parameters=parameters)
    return ToolSpec(function=function)


def user_text(observation_text: str, past: Sequence[PastDecision]) -> str:
    """Make the text of the user message.

    It contains the observation, the tool calls of up to three past decisions (latest first), and the reason
    if the last call was refused.
    """
    decisions = list(past[: -MAX_PAST - 1 : -1])
    calls = []
    for decision in decisions:
        line = "; ".join(f"{call.name}: {_dump_arguments(call)}" for call in decision.tool_calls)
        calls.append(f"- {line[:CLIP] or 'no call'}")
    lines = [observation_text, "", "Previous tool calls (most recent first):", *(calls or ["- none"])]
    if decisions and (reason := decisions[0].outcome.invalid_reason):
        lines += ["", f"Your last call was not carried out: {_end_sentence(reason)} {_NOOP_RAN}"]
    return "\n".join(lines)


def _dump_arguments(call: ToolRequest) -> str:
    if call.arguments is None:
        return call.raw_arguments
    # A lone surrogate is valid in JSON, but cannot be sent or stored.
    return encodable(json.dumps(dict(call.arguments), separators=(",", ":"), ensure_ascii=False))


def result_text(action_names: Sequence[str], news: Mapping[str, Any]) -> str:
    """Make the tool's result: the executed actions and their effects, or why the call was refused."""
    if news["invalid"]:
        return f"error: {_end_sentence(news['invalid'])} {_NOOP_RAN}"
    return "; ".join((f"executed: {', '.join(action_names)}", *news_lines(news)))


def _end_sentence(reason: str) -> str:
    """Add a full stop, unless the text already ends a sentence, as in "Did you mean 'x'?"."""
    return reason if reason.endswith((".", "?", "!")) else f"{reason}."


def news_lines(news: Mapping[str, Any]) -> list[str]:
    """Describe the effects of the last decision in short sentences."""
    change = news["health_change"]
    lines = [f"unlocked {name}" for name in news["unlocked"]]
    if change:
        lines.append(f"health {'rose' if change > 0 else 'fell'} by {abs(change)}")
    if news["invalid"]:
        # Do not add "the last action changed nothing": the last action was our noop, not the model's.
        lines.append("the last call was not carried out, one noop was executed instead")
    elif news["no_effect"]:
        lines.append("the last action changed nothing")
    return lines


TOOL_NAME = "interact_many"
CLIP = 500


class InvalidCall(ValueError):
    """Raised for a decision that cannot be executed; the message becomes its `invalid_reason`."""


def read_actions(calls: Sequence[ToolRequest], *, known: Sequence[str], max_actions: int) -> list[str]:
    """Return the actions of all calls of a decision, in order.

    Raises:
        InvalidCall: there is no call, a call is faulty, or the calls have more than `max_actions` actions.
    """
    if not calls:
        raise InvalidCall(f"no tool call; call {TOOL_NAME} once with 1 to {max_actions} actions")
    actions = [name for call in calls for name in _read_call(call, known=known, max_actions=max_actions)]
    if len(actions) > max_actions:
        raise InvalidCall(
            f"{len(calls)} calls hold {len(actions)} actions together; a decision has 1 to {max_actions}"
        )
    return actions


def _read_call(call: ToolRequest, *, known: Sequence[str], max_actions: int) -> list[str]:
    if call.name != TOOL_NAME:
        raise _unknown("tool", call.name, [TOOL_NAME])
    if call.arguments is None:
        raise InvalidCall(f"the arguments of {TOOL_NAME} are no JSON object: {_clip(call.raw_arguments)!r}")
    extra = sorted(str(key) for key in call.arguments if key != "actions")
    if extra:
        raise _unknown("argument", extra[0], ["actions"])
    actions: Any = call.arguments.get("actions")
    if not isinstance(actions, list | tuple):
        raise InvalidCall(f"'actions' must be a list of 1 to {max_actions} action names")
    if not 1 <= len(actions) <= max_actions:
        raise InvalidCall(f"'actions' holds {len(actions)} names; allowed are 1 to {max_actions}")
    for action in actions:
        if not isinstance(action, str):
            raise InvalidCall(f"'actions' must hold names, not {_clip(repr(action))}")
        if action not in known:
            raise _unknown("action", action, known)
    return list(actions)


def _unknown(what: str, name: str, known: Sequence[str]) -> InvalidCall:
    return InvalidCall(f"unknown {what} {_clip(name)!r}{suggest_to_policy(name[:CLIP], known)}")


def _clip(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
