"""What the dialects (model APIs) of captures share: model calls, answers, and readers of request bodies."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic_core import to_json

from shared_schemas.base import is_among, say_needed, shown
from shared_schemas.chat import RESPONSE_FORMAT, without_nulls
from shared_schemas.json_text import MAX_DEPTH, read_json, read_quotation
from shared_schemas.messages import FunctionCall, FunctionSpec, Message, ToolCall, ToolSpec
from shared_schemas.tool_choice import chosen_tools, read_tool_choice
from task_app.errors import InvalidRequest, clipped

Json = dict[str, Any]
# A server-sent event: its name, if the dialect has names, and its data.
Event = tuple[str | None, Json | str]
# Values of a response format's `type`.
_FORMS = ("text", "json_object", "json_schema")
# Depth of JSON nesting at which a stored rollout contains a tool's schema, plus a margin.
_ABOVE_SCHEMA = 11


@dataclass(frozen=True, slots=True)
class Call:
    """A model call of an agent, in a form that is independent of the dialect of the request."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    max_tokens: int | None = None
    """The agent's limit of tokens in the answer; the policy's own limit applies too."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer."""
    stream: bool = False
    include_usage: bool = False
    ignored: tuple[str, ...] = ()
    """Settings of the call that have no effect, because the policy uses its own settings."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings that only some policies follow (`protocols.FollowsOptions`), in the form of Chat Completions:
    `tool_choice` (only "required"), `response_format` and `parallel_tool_calls` (only false)."""


@dataclass(frozen=True, slots=True)
class Answer:
    call_id: str
    """The capture's id and the turn, joined by a hyphen. Each dialect adds its own prefix."""
    turn: int
    """Number of the decision, from 1."""
    created: int
    """Seconds since the epoch."""
    model: str
    text: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    """One of "stop", "length" and "tool_calls"."""
    prompt_tokens: int
    completion_tokens: int
    ignored: tuple[str, ...] = ()
    """Settings of the call that had no effect."""
    dropped: tuple[str, ...] = ()
    """Names of the `Call.options` that were not followed. `ignored` contains these names too."""


class Dialect(Protocol):
    """Reads the requests and makes the replies of one model API.

    `read` raises InvalidRequest if the body requests an unsupported feature.
    """

    def read(self, body: Json) -> Call: ...

    def body(self, answer: Answer, call: Call) -> Json: ...

    def events(self, answer: Answer, call: Call) -> Iterable[Event]: ...

    def count(self, tokens: int) -> Json: ...

    def error(self, status: int, code: str, sentence: str, where: str | None) -> Json: ...


@dataclass(slots=True)
class Keys:
    """Reads a request's body key by key. Keys that no method has read are reported as ignored settings.

    A key whose value is null counts as absent.
    """

    body: Json
    ignored: list[str] = field(default_factory=list)
    """Names of the keys that have been read so far and have no effect."""
    options: Json = field(default_factory=dict)
    """The `Call.options` found in the keys that have been read so far."""
    _read: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.body = without_nulls(self.body)

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        self._read.add(name)
        if name not in self.body:
            return default
        value = self.body[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise InvalidRequest(f"{name} is {shown(value)}", where=name)
        return value

    def skip(self, *names: str) -> None:
        """Accept keys that have no effect, without reporting them as ignored."""
        self._read.update(names)

    def refuse(self, name: str, allowed: Sequence[Any], hint: str) -> None:
        """Raise InvalidRequest if the body has the key `name` with a value that is not in `allowed`."""
        self._read.add(name)
        value = self.body.get(name)
        if name in self.body and not is_among(value, allowed):
            raise refusal_at(name, f"= {clipped(repr(value))} is not offered here", hint=hint)

    def tools(self, read: Callable[["Item"], ToolSpec]) -> tuple[ToolSpec, ...]:
        """Return the tools that `tool_choice` allows.

        If the body requires a tool call or forbids parallel tool calls, store this in `options`.
        """
        specs = [read(item) for item in objects(self.take("tools", list, []), "tools")]
        value = self.take("tool_choice", (str, dict), "auto")
        try:
            choice = read_tool_choice(value)
            places = chosen_tools(choice, [spec.function.name for spec in specs])
        except ValueError as exc:
            raise InvalidRequest(str(exc), where="tool_choice") from exc
        if choice.mode == "required":
            self.options["tool_choice"] = "required"
        is_single = isinstance(value, dict) and value.get("disable_parallel_tool_use") is True
        if self.take("parallel_tool_calls", bool, not is_single) is False and places:
            self.options["parallel_tool_calls"] = False
        return tuple(specs[place] for place in places)

    def form(self, value: Any, where: str) -> None:
        """Store the requested response format in `options`, unless it is plain text.

        In Chat Completions, the schema and its name are inside `value["json_schema"]`; in the other dialects,
        they are keys of `value` itself.
        """
        kind = value.get("type") if isinstance(value, dict) else value
        if kind in (None, "text"):
            return
        if not isinstance(value, dict) or kind not in _FORMS:
            raise InvalidRequest(f"{where} is {shown(value)}; known types: {', '.join(_FORMS)}", where=where)
        if kind == "json_schema" and "json_schema" not in value:
            inner = {name: part for name, part in value.items() if name != "type"}
            value = {"type": kind, "json_schema": {"name": "answer", **inner}}
        self.options[RESPONSE_FORMAT] = value

    def form_in(self, name: str) -> None:
        """Store the response format found in the body at `name`.`format`.

        All other settings inside `name` are reported as ignored.
        """
        part = self.take(name, dict, {})
        self.form(part.get("format"), f"{name}.format")
        self.ignored += [f"{name}.{clipped(other)}" for other in part if other != "format"]

    def max_tokens(self, *names: str) -> int | None:
        values = [value for name in names if (value := self.take(name, int)) is not None]
        for name in names:
            if (value := self.body.get(name)) is not None and value < 1:
                raise InvalidRequest(f"{name} is {value}; at least 1 is needed", where=name)
        return min(values, default=None)

    def stop(self, name: str) -> tuple[str, ...]:
        value = self.take(name, (str, list), [])
        texts = [value] if isinstance(value, str) else value
        if len(texts) > 4:
            raise InvalidRequest(f"{name} holds {len(texts)} texts; at most 4 are allowed", where=name)
        for place, text in enumerate(texts):
            if not isinstance(text, str):
                raise refusal_at(f"{name}.{place}", f"is {shown(text)}; a text is needed")
        return tuple(filter(None, texts))

    def rest(self) -> tuple[str, ...]:
        """Return the names of all settings without effect: `ignored`, and the keys that were never read.

        Unread keys whose value is an empty list or object are left out.
        """
        full = [name for name, value in self.body.items() if value not in ([], {})]
        unread = [clipped(name) for name in full if name not in self._read]
        return tuple(dict.fromkeys([*self.ignored, *unread]))

    def call(self, messages: Iterable[Message], read_tool: Callable[["Item"], ToolSpec], **own: Any) -> Call:
        """Build the Call: read the keys that all dialects share, and take the other fields from `own`.

        This must be the last call on this object, because all keys still unread are reported as ignored.
        """
        return Call(
            model=self.take("model", str, ""),
            messages=tuple(messages),
            tools=self.tools(read_tool),
            stream=self.take("stream", bool, False),
            ignored=self.rest(),
            options=self.options,
            **own,
        )

    def messages(self) -> list["Item"]:
        items = objects(self.take("messages", list, []), "messages")
        if not items:
            raise refusal_at("messages", "is empty")
        return items


def refusal_at(where: str, fault: str, *, hint: str | None = None) -> InvalidRequest:
    """Make an error about a part of a body. Its text is `where`, the path of the part, and then `fault`."""
    return InvalidRequest(f"{where} {fault}", where=where, hint=hint)


@dataclass(frozen=True, slots=True)
class Item:
    """A JSON object inside a body, and its path in the body, such as `messages.3`."""

    value: Json
    where: str

    def get(self, name: str, default: Any = None) -> Any:
        return self.value.get(name, default)

    def refusal(self, name: str, fault: str, *, hint: str | None = None) -> InvalidRequest:
        """Make an error about the value of the key `name`."""
        return refusal_at(f"{self.where}.{name}", fault, hint=hint)

    def part(self, name: str, kind: type, needed: str) -> Any:
        """Return a key's value. Raise InvalidRequest if it is no `kind`; `needed` names the type in words."""
        if not isinstance(self.get(name), kind):
            fault = f"{self.where}.{say_needed(self.value, name, needed)}"
            raise InvalidRequest(fault, where=f"{self.where}.{name}")
        return self.value[name]

    def text(self, name: str, default: str | None = None) -> str:
        """Return the text at a key. Without a default, the key is required."""
        if name not in self.value and default is not None:
            return default
        text: str = self.part(name, str, "a text")
        return text

    def role(self, roles: Mapping[str, str]) -> str:
        """Return the message's role; `roles` maps the dialect's role names to those that policies know."""
        role = self.get("role")
        if not isinstance(role, str) or role not in roles:
            raise self.refusal("role", f"is {clipped(repr(role))}; known: {', '.join(roles)}")
        return roles[role]

    def part_text(self, kinds: Iterable[str]) -> str:
        """Return the text of this content part, whose `type` must be one of `kinds`."""
        kind = self.get("type")
        if not isinstance(kind, str) or kind not in kinds:
            fault = f"is {clipped(repr(kind))}; the policy reads text alone"
            raise self.refusal("type", fault, hint="images, sound and files are not offered here")
        # In Chat Completions, a part of type `refusal` has its text under the key `refusal`.
        return self.text("refusal" if kind == "refusal" else "text")

    def content(self, name: str, kinds: Iterable[str]) -> str:
        """Return the text of the message content under the key `name`, as `parts_text` does."""
        return parts_text(self.get(name), kinds, where=f"{self.where}.{name}")


def parts_text(content: Any, kinds: Iterable[str], *, where: str) -> str:
    """Return a message's content as one text.

    `content` is None, a text, or a list of content parts, each of which has a `type` from `kinds`.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} is {shown(content)}; a text or a list of parts is needed", where=where)
    texts = []
    for place, part in enumerate(content):
        if not isinstance(part, dict):
            raise refusal_at(f"{where}.{place}", f"is {shown(part)}; a part is an object")
        texts.append(Item(part, f"{where}.{place}").part_text(kinds))
    return "".join(texts)


def objects(value: Any, where: str) -> list[Item]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} is {shown(value)}; a list is needed", where=where)
    for place, item in enumerate(value):
        if not isinstance(item, dict):
            raise refusal_at(f"{where}.{place}", f"is {shown(item)}")
    return [Item(item, f"{where}.{place}") for place, item in enumerate(value)]


def tool_call(call_id: str, name: str, arguments: str) -> ToolCall:
    return ToolCall(id=call_id, function=FunctionCall(name=name, arguments=arguments))


def tool_spec(function: Item, schema_key: str) -> ToolSpec:
    """Convert a tool to OpenAI's form; `schema_key` is the dialect's key for the schema of arguments."""
    schema = function.part(schema_key, dict, "a JSON Schema") if schema_key in function.value else {}
    try:
        read_json(b"[" * _ABOVE_SCHEMA + to_json(schema) + b"]" * _ABOVE_SCHEMA, keeps_nul=True)
    except ValueError as exc:
        most = MAX_DEPTH - _ABOVE_SCHEMA
        fault = f"the schema of {function.where} is nested deeper than {most} levels"
        raise InvalidRequest(fault, where=function.where) from exc
    name, description = function.text("name"), function.text("description", default="")
    return ToolSpec(function=FunctionSpec(name=name, description=description, parameters=schema))


def append_calls(messages: list[Message], calls: Sequence[ToolCall], text: str = "") -> None:
    """Add text and tool calls to the last message if its role is assistant, else append a new message."""
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if last is None:
        messages.append(Message(role="assistant", content=text, tool_calls=tuple(calls) or None))
        return
    both = (*(last.tool_calls or ()), *calls)
    messages[-1] = Message(role="assistant", content=(last.content or "") + text, tool_calls=both or None)


def arguments_object(call: ToolCall) -> Json:
    """Return a tool call's arguments as an object, for dialects in which arguments are not a text.

    If the text is not a JSON object, or contains a number that JSON does not allow (such as NaN), return
    `{"arguments": text}`.
    """
    try:
        value = read_quotation(call.function.arguments.encode())
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": call.function.arguments}
