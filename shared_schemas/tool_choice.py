"""Reads the `tool_choice` of a model call, in the forms of three APIs, for our gateway and for captures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shared_schemas.base import shown


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools a model may call in an answer, and whether it must call one."""

    mode: Literal["auto", "none", "required"] = "auto"
    """"none" hides the tools, "auto" lets the model decide, "required" demands a call."""
    names: tuple[str, ...] | None = None
    """The allowed tools; None allows all."""


_MODES: Mapping[object, ToolChoice] = {
    "auto": ToolChoice("auto"),
    "none": ToolChoice("none"),
    **dict.fromkeys(("required", "any"), ToolChoice("required")),
}
_CHOICES = "'auto', 'none', 'required', or a function to call"


def read_tool_choice(value: Any) -> ToolChoice:
    """Read a `tool_choice` in the form of Chat Completions, of Responses, or of Anthropic's Messages.

    Raises ValueError for any other form.
    """
    kind = value.get("type") if isinstance(value, dict) else value
    if isinstance(kind, str) and kind in _MODES:
        return _MODES[kind]
    if isinstance(value, dict) and kind in ("function", "tool"):
        return ToolChoice("required", (_read_name(value),))
    if isinstance(value, dict) and kind == "allowed_tools":
        allowed = value.get("allowed_tools", value)
        tools = allowed.get("tools") if isinstance(allowed, dict) else None
        mode = allowed.get("mode", "auto") if isinstance(allowed, dict) else None
        if isinstance(tools, list) and mode in ("auto", "required"):
            return ToolChoice(mode, tuple(_read_name(tool) for tool in tools))
    raise ValueError(f"tool_choice is {shown(value)}; allowed: {_CHOICES}")


def _read_name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ValueError(f"tool_choice names no function: {shown(tool)}")
    return name


def chosen_tools(choice: ToolChoice, names: Sequence[str]) -> list[int]:
    """Return the indices in `names` of the tools that a choice allows.

    Raises ValueError if the choice names an unknown tool, or requires a call when no tool is allowed.
    """
    if choice.mode == "none":
        return []
    for name in choice.names or ():
        if name not in names:
            raise ValueError(f"tool_choice names {name[:80]!r}; tools: {', '.join(names) or 'none'}"[:500])
    places = [i for i, name in enumerate(names) if choice.names is None or name in choice.names]
    if choice.mode == "required" and not places:
        raise ValueError("tool_choice forces a call, and tools holds none")
    return places
