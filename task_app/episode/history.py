"""Pure: a conversation whose messages have ids, what was deleted from it, and the view that a model sees.

Every value here is immutable: appending or editing gives a new `History`, and all of them share what they
have in common. So the history as it was before any edit costs a few words, not a copy.
Source: 3-context-editing-tool-loop.md (names: full_history, deleted_msg_ids, msg_id,
msg_id(invoking_assistant), had_delete_operation; what stands in for its trajectory_snapshots says
docs/conversations.md); DESIGN.md 4.12.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shared_schemas.json_text import encodable
from shared_schemas.messages import FunctionCall, Message, ToolCall

MSG_ID = "msg_id"
INVOKING = "msg_id(invoking_assistant)"
TOOL_NAME = "tool_name"
STUB = "[deleted]"
# Templates print arguments as an object, and an empty one costs the fewest tokens.
STUB_ARGUMENTS = "{}"

EditKind = Literal["deleted", "summary", "cut"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A message with its id, as it was said and as the view shows it unless it is edited.

    Attributes:
        msg_id: counts all messages from 0, in order of append.
        message: as it was said; of a tool result the text alone.
        shown: the same with its ids in it, where the history shows ids.
        invoking: of a tool result: the id of the assistant message that called.
        tool_name: of a tool result.
    """

    msg_id: int
    message: Message
    shown: Message
    invoking: int | None = None
    tool_name: str | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """What stands in a message's place: a stub, a summary, or its text without the spans that were cut."""

    kind: EditKind
    shown: Message
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Edits:
    """The edits in force, newest first: an undo goes back to `before`."""

    changes: Mapping[int, Change]
    before: "_Edits | None"


@dataclass(frozen=True, slots=True, eq=False)
class _Undone:
    edits: _Edits
    rest: "_Undone | None"


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """A conversation so far. `History.opened` begins one; the methods `with_...` continue it.

    Attributes:
        shows_ids: tool results tell their ids (where a model may edit its context).
    """

    shows_ids: bool
    # Shared by all that grew out of one another; each sees its own length, and only the longest one appends
    # in place: whatever continues an earlier moment copies what is its own first.
    _log: list[Entry]
    _length: int = 0
    _edits: _Edits | None = None
    _undone: _Undone | None = None
    _was_edited: bool = False

    @classmethod
    def opened(cls, messages: Sequence[Message], *, shows_ids: bool) -> "History":
        """The history of an episode that has not begun: what its environment opens with."""
        if not messages:
            raise ValueError("a conversation opens with at least one message, and there is none")
        history = cls(shows_ids, [])
        for message in messages:
            history = history.with_message(message)
        return history

    def with_message(self, message: Message) -> "History":
        """After a message of the system, the user or the assistant, as it was said."""
        return self._appended(Entry(self._length, message, message))

    def with_result(self, call: ToolCall, text: str, *, fields: Mapping[str, Any] | None = None) -> "History":
        """After the answer to a call of the last assistant message.

        Args:
            fields: what the text says, where that is an object: shown beside the ids, not as text in text.
        """
        invoking = self.last_assistant_id
        if invoking is None:
            raise ValueError(f"the result of {call.function.name!r} has no assistant message that called it")
        text = encodable(text)
        message = Message(role="tool", content=text, tool_call_id=call.id)
        entry = Entry(self._length, message, message, invoking, call.function.name)
        return self._appended(replace(entry, shown=self._shown(entry, text, fields or {"message": text})))

    def with_edit(self, changes: Mapping[int, Change]) -> "History":
        """Return the history after one edit, which ends redoing; an empty edit changes nothing."""
        if not changes:
            return self
        unknown = sorted(changes.keys() - range(self._length))
        if unknown:
            raise ValueError(f"no message has the id {unknown[0]}; ids run from 0 to {self._length - 1}")
        return replace(self, _edits=_Edits(dict(changes), self._edits), _undone=None, _was_edited=True)

    def undone(self) -> "History | None":
        """Undo the last edit in force; None if there is none."""
        if self._edits is None:
            return None
        return replace(self, _edits=self._edits.before, _undone=_Undone(self._edits, self._undone))

    def redone(self) -> "History | None":
        """Redo the edit that was undone last; None if there is none, or another edit came after it."""
        if self._undone is None:
            return None
        return replace(self, _edits=self._undone.edits, _undone=self._undone.rest)

    def view(self) -> tuple[Message, ...]:
        """What the model is shown: every message in its place, edited ones as their stubs or summaries."""
        changes = self.changes()
        return tuple([changes[i].shown if i in changes else self._log[i].shown for i in range(self._length)])

    def changes(self) -> dict[int, Change]:
        """What stands in place of which message now, by id."""
        found: dict[int, Change] = {}
        edits = self._edits
        while edits is not None:
            for msg_id, change in edits.changes.items():
                found.setdefault(msg_id, change)
            edits = edits.before
        return found

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, msg_id: int) -> Entry:
        if not 0 <= msg_id < self._length:
            raise IndexError(f"no message has the id {msg_id}; ids run from 0 to {self._length - 1}")
        return self._log[msg_id]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._log[: self._length])

    @property
    def last_assistant_id(self) -> int | None:
        """The message whose calls are being answered."""
        return self._found("assistant", reversed(range(self._length)))

    @property
    def first_user_id(self) -> int | None:
        """The task: it is never deleted."""
        return self._found("user", range(self._length))

    @property
    def deleted_msg_ids(self) -> tuple[int, ...]:
        """Ids of the messages whose own text is shown no more, sorted."""
        return tuple(sorted([i for i, change in self.changes().items() if change.kind != "cut"]))

    @property
    def had_delete_operation(self) -> bool:
        """Whether the context was ever edited, also where that was undone."""
        return self._was_edited

    def full_history(self, *, start: int = 0) -> tuple[Message, ...]:
        """Every message from id `start` on as it was said, deleted or not, with the published keys.

        All carry `msg_id`; tool results also `tool_name` and `msg_id(invoking_assistant)`.
        """
        return tuple([_with_ids(entry) for entry in self._log[start : self._length]])

    def shown_as(self, entry: Entry, text: str) -> Message:
        """A message of this history with another text, as the view shows it: ids stay, a result stays one."""
        return self._shown(entry, text, {"message": text})

    def _shown(self, entry: Entry, text: str, fields: Mapping[str, Any]) -> Message:
        if entry.tool_name is None or not self.shows_ids:
            return entry.message.model_copy(update={"content": text})
        told = {MSG_ID: entry.msg_id, INVOKING: entry.invoking, **fields}
        return entry.message.model_copy(update={"content": _json(told)})

    def stub(self, msg_id: int, summary: str | None = None) -> Message:
        """The message without what it said: its role, tool names and call ids stay, so that every template
        still renders it and every result still has its call. A summary stands in its text's place.
        """
        entry = self[msg_id]
        calls = entry.message.tool_calls
        if summary is not None:
            stub = self.shown_as(entry, summary)
        else:
            # As short as can be, without its id: where much is deleted, stubs are what fills the window. An
            # assistant that only called has said nothing else.
            text = STUB if entry.message.content or not calls else ""
            stub = entry.message.model_copy(update={"content": text})
        return (
            stub.model_copy(update={"tool_calls": tuple(map(_without_arguments, calls))}) if calls else stub
        )

    def _appended(self, entry: Entry) -> "History":
        log = self._log if len(self._log) == self._length else self._log[: self._length]
        log.append(entry)
        return replace(self, _log=log, _length=self._length + 1)

    def _found(self, role: str, ids: "range | Iterator[int]") -> int | None:
        return next((i for i in ids if self._log[i].message.role == role), None)


def _with_ids(entry: Entry) -> Message:
    ids: dict[str, Any] = {MSG_ID: entry.msg_id}
    if entry.tool_name is not None:
        ids |= {TOOL_NAME: entry.tool_name, INVOKING: entry.invoking}
    return Message(**{**dict(entry.message), **(entry.message.model_extra or {}), **ids})


def _without_arguments(call: ToolCall) -> ToolCall:
    bare = FunctionCall(name=call.function.name, arguments=STUB_ARGUMENTS)
    return ToolCall(id=call.id, function=bare)


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
