"""The context tools: every method whose name a model may call gives its result text."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from task_app.context_tools.ids import MAX_IDS, Ids, refused_id, sorted_out
from task_app.context_tools.spans import cut_out
from task_app.context_tools.window import proposed_deletes
from task_app.history import Change, History
from task_app.tools import ToolRefused

# What a model writes in place of an id is told apart one by one, so any JSON comes this far.
AnyId = Annotated[Any, WithJsonSchema({"type": "integer", "minimum": 0})]
_IDS = WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MAX_IDS})
AnyIds = Annotated[list[Any], _IDS]
Quote = Annotated[str, Field(min_length=1, max_length=2_000)]


@dataclass(frozen=True, slots=True)
class Budget:
    """What is left of an episode. Tokens are those of the gateway's last reply; None where nobody counts.

    Attributes:
        used_tokens: of the last prompt and its answer.
        max_tokens: that a prompt and its answer may have.
        decisions_left: after this one.
    """

    used_tokens: int | None = None
    max_tokens: int | None = None
    decisions_left: int | None = None


class ContextEditor:
    """One call on one history: `history` is the edited one afterwards, or the one that was given.

    `fields`, of a call that answers with more than a text: what its result says, key by key.
    """

    def __init__(self, history: History, budget: Budget) -> None:
        self.history = history
        self.fields: dict[str, Any] | None = None
        self._budget = budget

    def deleteContext(
        self,
        message_ids: Annotated[list[Any] | None, _IDS, Field(description="the messages, by msg_id")] = None,
        msg_id: Annotated[AnyId, Field(description="or the one message to delete")] = None,
    ) -> str:
        """Delete messages from your context to make room. A short stub stays in place of each; what is gone
        can not be read again, so note what matters first."""
        ids = self._sorted_out(message_ids or (), msg_id)
        changes = {i: Change("deleted", self.history.stub(i)) for i in ids.accepted}
        self.history = self.history.with_edit(changes)
        # As published: a status, and the ids. The message has what was refused of it.
        self.fields = {
            "status": "success" if ids.accepted else "error",
            "deleted_msg_ids": list(ids.accepted),
        }
        if ids.refused:
            self.fields |= {"message": ids.complaints.removeprefix("; ")}
        return json.dumps(self.fields, ensure_ascii=False)

    def summarizeContext(
        self,
        message_ids: Annotated[AnyIds, Field(description="msg_id of every message to replace")],
        summary: Annotated[str, Field(min_length=1, max_length=20_000, description="what to keep of them")],
    ) -> str:
        """Replace messages by a summary that you write. It stands in place of the first of them; a short stub
        stays of each other one."""
        ids = self._sorted_out(message_ids, None)
        if not ids.accepted:
            return f"summarized nothing{ids.complaints}"
        first, *others = sorted(ids.accepted)
        told = f"[summary of {_listed(sorted(ids.accepted))}] {summary}"
        changes = {i: Change("deleted", self.history.stub(i)) for i in others}
        changes[first] = Change("summary", self.history.stub(first, told))
        self.history = self.history.with_edit(changes)
        return f"message {first} now holds the summary of {_listed(sorted(ids.accepted))}{ids.complaints}"

    def deletePart(
        self,
        msg_id: AnyId,
        start: Annotated[Quote, Field(description="the first words of the part, as they stand there")],
        end: Annotated[Quote, Field(description="its last words")],
    ) -> str:
        """Delete a part of a message: from the words of `start` to the words of `end`, both included."""
        if (reason := refused_id(self.history, msg_id)) is not None:
            return f"deleted nothing; refused {reason}"
        entry = self.history[msg_id]
        before = self.history.changes().get(msg_id)
        if before is not None and before.kind == "summary":
            return f"deleted nothing; message {msg_id} holds a summary, which is deleted as a whole"
        try:
            cut = cut_out(entry.message.content or "", before.spans if before else (), start, end)
        except ValueError as exc:
            return f"deleted nothing; message {msg_id}: {exc}"
        change = Change("cut", self.history.shown_as(entry, cut.text), cut.spans)
        self.history = self.history.with_edit({msg_id: change})
        return f"deleted {cut.chars} characters of message {msg_id}"

    def undoEdit(self) -> str:
        """Take back your last change of the context: what it deleted is shown again."""
        return self._moved(self.history.undone(), "undone", "no change of the context to undo")

    def redoEdit(self) -> str:
        """Make the change again that you took back last."""
        return self._moved(self.history.redone(), "done again", "no undone change to make again")

    def proposeDeletes(
        self,
        chars: Annotated[int, Field(ge=1, le=100_000_000, description="how many characters to free")],
    ) -> str:
        """Ask which messages matter least to the task. Deletes nothing: deleteContext does, if you agree."""
        proposed = proposed_deletes(self.history, chars=chars)
        if not proposed:
            return "there is no message left to delete"
        lines = [f"{one.msg_id}: {one.chars} characters, importance {one.importance:.2f}" for one in proposed]
        freed = sum(one.chars for one in proposed)
        return "\n".join((f"least important first, {freed} characters together:", *lines))

    def checkBudget(self) -> str:
        """Ask how much of your context and how many turns are left."""
        budget = self._budget
        lines = []
        if budget.used_tokens is not None:
            limit = f" of {budget.max_tokens}" if budget.max_tokens is not None else ""
            lines.append(f"{budget.used_tokens}{limit} tokens of context used")
        if budget.decisions_left is not None:
            lines.append(f"{budget.decisions_left} turns left")
        count = len(self.history) - len(self.history.deleted_msg_ids)
        return "; ".join((*lines, f"{count} of {len(self.history)} messages shown in full"))

    def _sorted_out(self, message_ids: Sequence[Any], msg_id: Any) -> Ids:
        asked = [*message_ids, *([] if msg_id is None else [msg_id])]
        if not asked:
            raise ToolRefused("no message is named; give message_ids, a list of msg_id")
        if len(asked) > MAX_IDS:
            raise ToolRefused(f"message_ids holds {len(asked)} ids; at most {MAX_IDS} are read at once")
        return sorted_out(self.history, asked)

    def _moved(self, history: History | None, done: str, nothing: str) -> str:
        if history is None:
            return f"there is {nothing}"
        self.history = history
        gone = _listed(history.deleted_msg_ids)
        return f"{done}; deleted now: {gone or 'nothing'}"


def _listed(ids: Iterable[int]) -> str:
    return ", ".join(map(str, ids))
