"""Stores a conversation: its messages with ids, its edits, and the view that a model sees. Pure.

A history is immutable: appending a message or editing returns a new `History`. The new history and the old
history share their messages, so an earlier history can be kept at a small cost in memory.

Source: 3-context-editing-tool-loop.md; DESIGN.md 4.12. The names full_history, deleted_msg_ids, msg_id,
msg_id(invoking_assistant) and had_delete_operation are the source's. docs/sources.md says what replaces the
source's trajectory_snapshots.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shared_schemas.messages import FunctionCall, Message, ToolCall
from shared_schemas.plain_text import encodable

MSG_ID = "msg_id"
INVOKING = "msg_id(invoking_assistant)"
TOOL_NAME = "tool_name"
STUB = "[deleted]"
# Chat templates print arguments as an object, and an empty object has the fewest tokens.
STUB_ARGUMENTS = "{}"

EditKind = Literal["deleted", "summary", "cut"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A message of the history."""

    msg_id: int
    """Index of the message in the whole history."""
    message: Message
    """The original message. The content of a tool result is its bare text, without ids."""
    shown: Message
    """The message as an unedited view shows it. With `shows_ids`, a tool result contains its ids."""
    invoking: int | None = None
    """For a tool result, the id of the assistant message that made the call."""
    tool_name: str | None = None
    """For a tool result, the name of the called tool."""


@dataclass(frozen=True, slots=True)
class Change:
    """What the view shows in place of a message: a stub, a summary, or the text without its cut spans."""

    kind: EditKind
    shown: Message
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The conversation so far. Methods such as `with_message` return a changed copy."""

    shows_ids: bool
    """Whether tool results contain message ids, which a model needs for editing its context."""
    # All histories with the same start share this list, and each uses only its first `_length` entries. The
    # longest history appends in place; a shorter history copies its entries before it appends.
    _log: list[Entry]
    _length: int = 0
    _edits: tuple[Mapping[int, Change], ...] = ()
    """The active edits, oldest first."""
    _redo: tuple[Mapping[int, Change], ...] = ()
    """The undone edits; the edit that was undone last is the last element."""
    _was_edited: bool = False

    @classmethod
    def start(cls, messages: Sequence[Message], *, shows_ids: bool) -> "History":
        """Create the history before the first decision; it consists of the opening messages."""
        if not messages:
            raise ValueError("a conversation opens with at least one message, and there is none")
        history = cls(shows_ids, [])
        for message in messages:
            history = history.with_message(message)
        return history

    def with_message(self, message: Message) -> "History":
        """Append a message of the system, the user or the assistant."""
        return self._append(Entry(self._length, message, message))

    def with_result(self, call: ToolCall, text: str, *, fields: Mapping[str, Any] | None = None) -> "History":
        """Append `text` as the result of a call of the last assistant message.

        If the result is a JSON object, `fields` contains its members. The view of a history with `shows_ids`
        shows these members and the ids in one object.
        """
        invoking = self.last_assistant_id
        if invoking is None:
            raise ValueError(f"the result of {call.function.name!r} has no assistant message that called it")
        text = encodable(text)
        message = Message(role="tool", content=text, tool_call_id=call.id)
        entry = Entry(self._length, message, message, invoking, call.function.name)
        return self._append(replace(entry, shown=self.with_text(entry, text, fields)))

    def with_edit(self, changes: Mapping[int, Change]) -> "History":
        """Apply an edit, and forget the undone edits, so that `redo` returns None.

        An edit without `changes` has no effect.
        """
        if not changes:
            return self
        unknown = sorted(changes.keys() - range(self._length))
        if unknown:
            raise ValueError(f"no message has the id {unknown[0]}; ids run from 0 to {self._length - 1}")
        return replace(self, _edits=(*self._edits, dict(changes)), _redo=(), _was_edited=True)

    def undo(self) -> "History | None":
        """Undo the last active edit; return None if there is none."""
        if not self._edits:
            return None
        return replace(self, _edits=self._edits[:-1], _redo=(*self._redo, self._edits[-1]))

    def redo(self) -> "History | None":
        """Redo the last undone edit; return None if no edit was undone or a new edit followed the undo."""
        if not self._redo:
            return None
        return replace(self, _edits=(*self._edits, self._redo[-1]), _redo=self._redo[:-1])

    def view(self) -> tuple[Message, ...]:
        """Return the messages that the model sees. `Change.shown` takes the place of each edited message."""
        changes = self.changes()
        return tuple([changes[i].shown if i in changes else self._log[i].shown for i in range(self._length)])

    def changes(self) -> dict[int, Change]:
        """Return the latest active change of each edited message, by message id."""
        changes: dict[int, Change] = {}
        for edit in reversed(self._edits):
            for msg_id, change in edit.items():
                changes.setdefault(msg_id, change)
        return changes

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
        """The id of the last assistant message, to whose calls new tool results belong."""
        return self._find_role("assistant", reversed(range(self._length)))

    @property
    def first_user_id(self) -> int | None:
        """The id of the first user message, which contains the task and is never deleted."""
        return self._find_role("user", range(self._length))

    @property
    def deleted_msg_ids(self) -> tuple[int, ...]:
        """Sorted ids of the messages that the view shows as a stub or as a summary."""
        return tuple(sorted([i for i, change in self.changes().items() if change.kind != "cut"]))

    @property
    def had_delete_operation(self) -> bool:
        """Whether the context was ever edited, even if the edit was undone."""
        return self._was_edited

    def full_history(self) -> tuple[Message, ...]:
        """Return all messages in their original form, including deleted messages, with the published keys.

        Every message has the key `msg_id`. Tool results also have the keys `tool_name` and
        `msg_id(invoking_assistant)`.
        """
        messages = []
        for entry in self:
            ids: dict[str, Any] = {MSG_ID: entry.msg_id}
            if entry.tool_name is not None:
                ids |= {TOOL_NAME: entry.tool_name, INVOKING: entry.invoking}
            messages.append(Message(**{**dict(entry.message), **(entry.message.model_extra or {}), **ids}))
        return tuple(messages)

    def with_text(self, entry: Entry, text: str, fields: Mapping[str, Any] | None = None) -> Message:
        """Return a copy of a message of this history with another text and the same ids.

        If the history has `shows_ids`, the content of a tool result becomes a JSON object. It contains the
        ids and either the members in `fields` or, without `fields`, the text.
        """
        if entry.tool_name is None or not self.shows_ids:
            return entry.message.model_copy(update={"content": text})
        content = {MSG_ID: entry.msg_id, INVOKING: entry.invoking, **(fields or {"message": text})}
        return entry.message.model_copy(update={"content": json.dumps(content, ensure_ascii=False)})

    def stub(self, msg_id: int, summary: str | None = None) -> Message:
        """Return the message without its text, or with a summary in place of its text.

        Role, tool names and call ids are kept, so that chat templates can render the stub, and so that every
        tool result still has its call.
        """
        entry = self[msg_id]
        calls = entry.message.tool_calls
        if summary is not None:
            stub = self.with_text(entry, summary)
        else:
            # The stub is short and shows no id, because a context may contain many stubs. The text of an
            # assistant message that only calls tools is already empty.
            text = STUB if entry.message.content or not calls else ""
            stub = entry.message.model_copy(update={"content": text})
        if not calls:
            return stub
        bare = [FunctionCall(name=call.function.name, arguments=STUB_ARGUMENTS) for call in calls]
        ids = [call.id for call in calls]
        stubs = tuple(ToolCall(id=i, function=function) for i, function in zip(ids, bare, strict=True))
        return stub.model_copy(update={"tool_calls": stubs})

    def _append(self, entry: Entry) -> "History":
        log = self._log if len(self._log) == self._length else self._log[: self._length]
        log.append(entry)
        return replace(self, _log=log, _length=self._length + 1)

    def _find_role(self, role: str, ids: "range | Iterator[int]") -> int | None:
        return next((i for i in ids if self._log[i].message.role == role), None)
