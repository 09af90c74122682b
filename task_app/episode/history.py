"""A conversation whose messages have ids, its edits, and the view that a model sees. Pure.

A history is immutable: appending or editing returns a new `History` that shares its messages with the old
one, so keeping an earlier history costs little memory. Source: 3-context-editing-tool-loop.md (names:
full_history, deleted_msg_ids, msg_id, msg_id(invoking_assistant), had_delete_operation; docs/conversations.md
describes the replacement of its trajectory_snapshots); DESIGN.md 4.12.
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
    """The original message; a tool result has only its text, without ids."""
    shown: Message
    """The message in an unedited view, with ids if the history shows them."""
    invoking: int | None = None
    """Id of the assistant message with the call; only for a tool result."""
    tool_name: str | None = None
    """Only for a tool result."""


@dataclass(frozen=True, slots=True)
class Change:
    """The replacement of a message: a stub, a summary, or the text without its cut spans."""

    kind: EditKind
    shown: Message
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The conversation so far. `History.start` makes one; the methods `with_...` extend it."""

    shows_ids: bool
    """Whether tool results show their ids, because the model may edit its context."""
    # All histories that grew from one share the list; each uses its own length. Only the longest appends in
    # place; another history copies its own part first.
    _log: list[Entry]
    _length: int = 0
    _edits: tuple[Mapping[int, Change], ...] = ()
    """The active edits, oldest first."""
    _redo: tuple[Mapping[int, Change], ...] = ()
    """The undone edits, last undone last."""
    _was_edited: bool = False

    @classmethod
    def start(cls, messages: Sequence[Message], *, shows_ids: bool) -> "History":
        """Make the history before the first decision from the opening messages."""
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

        If the text is an object, `fields` are its members, and the view adds the ids to them.
        """
        invoking = self.last_assistant_id
        if invoking is None:
            raise ValueError(f"the result of {call.function.name!r} has no assistant message that called it")
        text = encodable(text)
        message = Message(role="tool", content=text, tool_call_id=call.id)
        entry = Entry(self._length, message, message, invoking, call.function.name)
        return self._append(replace(entry, shown=self.with_text(entry, text, fields)))

    def with_edit(self, changes: Mapping[int, Change]) -> "History":
        """Apply an edit, after which nothing can be redone; an empty edit changes nothing."""
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
        """Redo the last undone edit; return None if there is none or another edit came after it."""
        if not self._redo:
            return None
        return replace(self, _edits=(*self._edits, self._redo[-1]), _redo=self._redo[:-1])

    def view(self) -> tuple[Message, ...]:
        """Return the messages that the model sees, with stubs or summaries for edited messages."""
        changes = self.changes()
        return tuple([changes[i].shown if i in changes else self._log[i].shown for i in range(self._length)])

    def changes(self) -> dict[int, Change]:
        """Return the active changes by message id."""
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
        """The id of the last assistant message, whose calls are answered."""
        return self._find_role("assistant", reversed(range(self._length)))

    @property
    def first_user_id(self) -> int | None:
        """The id of the first user message, which has the task and is never deleted."""
        return self._find_role("user", range(self._length))

    @property
    def deleted_msg_ids(self) -> tuple[int, ...]:
        """Sorted ids of the messages whose own text is no longer shown."""
        return tuple(sorted([i for i, change in self.changes().items() if change.kind != "cut"]))

    @property
    def had_delete_operation(self) -> bool:
        """Whether the context was ever edited, even if the edit was undone."""
        return self._was_edited

    def full_history(self) -> tuple[Message, ...]:
        """Return every original message, deleted or not, with the published keys.

        All messages have `msg_id`; tool results also have `tool_name` and `msg_id(invoking_assistant)`.
        """
        messages = []
        for entry in self:
            ids: dict[str, Any] = {MSG_ID: entry.msg_id}
            if entry.tool_name is not None:
                ids |= {TOOL_NAME: entry.tool_name, INVOKING: entry.invoking}
            messages.append(Message(**{**dict(entry.message), **(entry.message.model_extra or {}), **ids}))
        return tuple(messages)

    def with_text(self, entry: Entry, text: str, fields: Mapping[str, Any] | None = None) -> Message:
        """Return a message of this history with another text and the same ids.

        `fields` are the members of a tool result that is an object.
        """
        if entry.tool_name is None or not self.shows_ids:
            return entry.message.model_copy(update={"content": text})
        content = {MSG_ID: entry.msg_id, INVOKING: entry.invoking, **(fields or {"message": text})}
        return entry.message.model_copy(update={"content": json.dumps(content, ensure_ascii=False)})

    def stub(self, msg_id: int, summary: str | None = None) -> Message:
        """Return the message without its text, or with a summary in place of its text.

        Role, tool names and call ids are kept, so that chat templates can render the stub and every result
        has a call.
        """
        entry = self[msg_id]
        calls = entry.message.tool_calls
        if summary is not None:
            stub = self.with_text(entry, summary)
        else:
            # Short and without its id, because many stubs fill the context. The text of an assistant message
            # with only calls is empty already.
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
