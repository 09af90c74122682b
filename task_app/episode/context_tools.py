"""The context tools, with which a model edits its own history.

The docstrings of the public methods of `ContextEditor` are the tool descriptions that a model reads.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from shared_schemas.messages import ToolSpec
from shared_schemas.rollouts import CONTEXT_TOOLS as CONTEXT_TOOLS
from shared_schemas.rollouts import PUBLISHED
from task_app.episode.history import Change, History
from task_app.errors import clipped
from task_app.protocols import ToolRequest
from task_app.tools import Toolbox, ToolRefused, function_tool

MAX_IDS = 1_000
# The reply states reasons for at most this many refused ids: a longer reply would fill the model's context.
MAX_REASONS = 20


@dataclass(frozen=True, slots=True)
class Ids:
    """The message ids of one call: the accepted ids in the given order, and a reason for each refused id."""

    accepted: tuple[int, ...]
    refusals: tuple[str, ...]

    @property
    def complaints(self) -> str:
        """The refusals as the last part of a reply, such as `"; refused 0 (the system message stays)"`.

        The text is empty if no id was refused.
        """
        if not self.refusals:
            return ""
        count = len(self.refusals)
        more = f" and {count - MAX_REASONS} more" if count > MAX_REASONS else ""
        return f"; refused {', '.join(self.refusals[:MAX_REASONS])}{more}"


def explain_refusal(history: History, msg_id: Any, *, deleted: frozenset[int] | None = None) -> str | None:
    """Return the reason why a message may not be edited; return None if it may be edited.

    The reason begins with the message's id. `deleted` contains the ids of the deleted messages; by default
    they are computed from the history.
    """
    if deleted is None:
        deleted = frozenset(history.deleted_msg_ids) - summaries(history)
    # True == 1 and 3.0 == 3 in Python, but neither is an id.
    text = f"a {type(msg_id).__name__}" if isinstance(msg_id, list | dict) else clipped(repr(msg_id), 40)
    if type(msg_id) is not int:
        return f"{text} (an id is a whole number)"
    if not 0 <= msg_id < len(history):
        return f"{text} (there is no such message; ids run from 0 to {len(history) - 1})"
    if history[msg_id].message.role == "system":
        return f"{msg_id} (the system message stays)"
    if msg_id == history.first_user_id:
        return f"{msg_id} (the task stays)"
    own = history.last_assistant_id
    if own is not None and msg_id >= own:
        return f"{msg_id} (it belongs to this very turn)"
    return f"{msg_id} (already deleted)" if msg_id in deleted else None


def summaries(history: History) -> frozenset[int]:
    """Return the ids of messages that were replaced by a summary. Such a message may still be deleted."""
    return frozenset(i for i, change in history.changes().items() if change.kind == "summary")


# The schema that a model reads requires integers. A call with another value still reaches the tool, which
# refuses this value with a reason.
AnyId = Annotated[Any, WithJsonSchema({"type": "integer", "minimum": 0})]
_IDS = WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MAX_IDS})
AnyIds = Annotated[list[Any], _IDS]
Quote = Annotated[str, Field(min_length=1, max_length=2_000)]


@dataclass(frozen=True, slots=True)
class Budget:
    """What an episode has used of its budget, and what is left. A number that is not counted is None."""

    used_tokens: int | None = None
    """Number of tokens of the last prompt and its answer, as the server reports it."""
    max_tokens: int | None = None
    """Largest number of tokens of a prompt and its answer together."""
    decisions_left: int | None = None
    """Number of decisions that may follow the current one."""


class ContextEditor:
    """Executes one call of a context tool; each public method is one tool and returns its result as text.

    After the call, `history` is the edited history. `fields` is the result as a dict if the tool returns a
    JSON object, otherwise None.
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
        ids = self._sort_ids(message_ids or (), msg_id)
        changes = {i: Change("deleted", self.history.stub(i)) for i in ids.accepted}
        self.history = self.history.with_edit(changes)
        # `status` and `deleted_msg_ids` are the published keys; `message` is our addition for refused ids.
        self.fields = {
            "status": "success" if ids.accepted else "error",
            "deleted_msg_ids": list(ids.accepted),
        }
        if ids.refusals:
            self.fields |= {"message": ids.complaints.removeprefix("; ")}
        return json.dumps(self.fields, ensure_ascii=False)

    def summarizeContext(
        self,
        message_ids: Annotated[AnyIds, Field(description="msg_id of every message to replace")],
        summary: Annotated[str, Field(min_length=1, max_length=20_000, description="what to keep of them")],
    ) -> str:
        """Replace messages by a summary that you write. It stands in place of the first of them; a short stub
        stays of each other one."""
        ids = self._sort_ids(message_ids, None)
        if not ids.accepted:
            return f"summarized nothing{ids.complaints}"
        first, *others = sorted(ids.accepted)
        text = f"[summary of {_join(sorted(ids.accepted))}] {summary}"
        changes = {i: Change("deleted", self.history.stub(i)) for i in others}
        changes[first] = Change("summary", self.history.stub(first, text))
        self.history = self.history.with_edit(changes)
        return f"message {first} now holds the summary of {_join(sorted(ids.accepted))}{ids.complaints}"

    def deletePart(
        self,
        msg_id: AnyId,
        start: Annotated[Quote, Field(description="the first words of the part, as they stand there")],
        end: Annotated[Quote, Field(description="its last words")],
    ) -> str:
        """Delete a part of a message: from the words of `start` to the words of `end`, both included."""
        if (reason := explain_refusal(self.history, msg_id)) is not None:
            return f"deleted nothing; refused {reason}"
        entry = self.history[msg_id]
        before = self.history.changes().get(msg_id)
        if before is not None and before.kind == "summary":
            return f"deleted nothing; message {msg_id} holds a summary, which is deleted as a whole"
        try:
            rest = cut(entry.message.content or "", before.spans if before else (), start, end)
        except ValueError as exc:
            return f"deleted nothing; message {msg_id}: {exc}"
        change = Change("cut", self.history.with_text(entry, rest.text), rest.spans)
        self.history = self.history.with_edit({msg_id: change})
        return f"deleted {rest.chars} characters of message {msg_id}"

    def undoEdit(self) -> str:
        """Take back your last change of the context: what it deleted is shown again."""
        return self._switch_history(self.history.undo(), "undone", "no change of the context to undo")

    def redoEdit(self) -> str:
        """Make the change again that you took back last."""
        return self._switch_history(self.history.redo(), "done again", "no undone change to make again")

    def proposeDeletes(
        self, chars: Annotated[int, Field(ge=1, le=100_000_000, description="how many characters to free")]
    ) -> str:
        """Ask which messages matter least to the task. Deletes nothing: deleteContext does, if you agree."""
        proposals = propose_deletes(self.history, chars=chars)
        if not proposals:
            return "there is no message left to delete"
        lines = [
            f"{message.msg_id}: {message.chars} characters, importance {message.importance:.2f}"
            for message in proposals
        ]
        total = sum(message.chars for message in proposals)
        return "\n".join((f"least important first, {total} characters together:", *lines))

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

    def _sort_ids(self, message_ids: Sequence[Any], msg_id: Any) -> Ids:
        """Split the ids of a call into accepted and refused ids (DESIGN.md 4.12).

        Raises:
            ToolRefused: the call contains no id, or too many ids.
        """
        ids = [*message_ids, *([] if msg_id is None else [msg_id])]
        if not ids:
            raise ToolRefused("no message is named; give message_ids, a list of msg_id")
        if len(ids) > MAX_IDS:
            raise ToolRefused(f"message_ids holds {len(ids)} ids; at most {MAX_IDS} are read at once")
        deleted = frozenset(self.history.deleted_msg_ids) - summaries(self.history)
        accepted: dict[int, None] = {}
        refusals = []
        for message_id in ids:
            reason = explain_refusal(self.history, message_id, deleted=deleted)
            if reason is None and message_id in accepted:
                reason = f"{message_id} (named twice)"
            if reason is None:
                accepted[message_id] = None
            else:
                refusals.append(reason)
        return Ids(tuple(accepted), tuple(refusals))

    def _switch_history(self, history: History | None, prefix: str, nothing: str) -> str:
        if history is None:
            return f"there is {nothing}"
        self.history = history
        deleted = _join(history.deleted_msg_ids)
        return f"{prefix}; deleted now: {deleted or 'nothing'}"


def _join(ids: Iterable[int]) -> str:
    return ", ".join(map(str, ids))


Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """A message's text, after parts of it were cut out."""

    text: str
    """The text with a note in place of each cut span."""
    spans: tuple[Span, ...]
    """[start, end) of all cut spans, as positions in the original text; sorted and disjoint."""
    chars: int
    """Number of characters that the last cut removed; earlier cuts are not counted."""


def cut(text: str, spans: Sequence[Span], start: str, end: str) -> Cut:
    """Cut out the text from the first occurrence of `start` to the end of the next occurrence of `end`.

    `spans` are the parts of `text` that earlier cuts removed; `start` and `end` are not searched there.

    Raises:
        ValueError: the rest of the text does not contain `start`, or no `end` follows it.
    """
    begin = _find_shown(text, start, spans, after=0)
    if begin is None:
        raise ValueError(f"it does not hold the words {start[:80]!r}")
    # `end` may overlap with `start`, but must not end before `start` ends.
    earliest = max(begin, begin + len(start) - len(end))
    last = _find_shown(text, end, spans, after=earliest)
    if last is None:
        raise ValueError(f"the words {end[:80]!r} do not follow {start[:80]!r}")
    merged: list[Span] = []
    for span in sorted([*spans, (begin, last + len(end))]):
        if merged and span[0] <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span[1]))
        else:
            merged.append(span)
    parts, place = [], 0
    for a, b in merged:
        parts += [text[place:a], f"[{b - a} characters deleted]"]
        place = b
    chars = sum(b - a for a, b in merged) - sum(b - a for a, b in spans)
    return Cut("".join([*parts, text[place:]]), tuple(merged), chars)


def _find_shown(text: str, words: str, spans: Sequence[Span], *, after: int) -> int | None:
    """Return the first position from `after` on at which `words` occurs outside of the cut spans, or None."""
    place = text.find(words, after)
    while place >= 0:
        hidden_end = next((b for a, b in spans if a < place + len(words) and place < b), None)
        if hidden_end is None:
            return place
        place = text.find(words, hidden_end)
    return None


# Matches words of at least four characters: shorter words occur in almost every message.
_WORD = re.compile(r"\w{4,}")


@dataclass(frozen=True, slots=True)
class Proposal:
    """A message that may be deleted, the characters that its deletion frees, and its importance in [0, 1]."""

    msg_id: int
    chars: int
    importance: float


def propose_deletes(history: History, *, chars: int) -> tuple[Proposal, ...]:
    """Return the least important messages: as many as are needed to free `chars` characters, or all.

    importance = (recency + use) / 2, where both terms are in [0, 1]. `recency` is the message's position in
    the history, divided by the history's length. `use` is the share of the message's words that also occur in
    the task or in a later assistant message.
    """
    proposals: list[Proposal] = []
    total = 0
    for proposal in sorted(_rate_messages(history), key=lambda item: (item.importance, item.msg_id)):
        if total >= chars:
            break
        proposals.append(proposal)
        total += proposal.chars
    return tuple(proposals)


def _rate_messages(history: History) -> list[Proposal]:
    """Compute the importance of every message that may be deleted and is longer than its stub."""
    view = history.view()
    deleted = frozenset(history.deleted_msg_ids) - summaries(history)
    task = history.first_user_id
    words_in_use = _words(view[task].content) if task is not None else set()
    proposals = []
    for msg_id in range(len(view) - 1, -1, -1):
        message = view[msg_id]
        chars = len(message.content or "") - len(history.stub(msg_id).content or "")
        if chars > 0 and explain_refusal(history, msg_id, deleted=deleted) is None:
            words = _words(history[msg_id].message.content)
            use = len(words & words_in_use) / len(words) if words else 0.0
            proposals.append(Proposal(msg_id, chars, (msg_id / len(view) + use) / 2))
        if message.role == "assistant":
            words_in_use |= _words(message.content)
    return proposals


def _words(text: str | None) -> set[str]:
    return set(_WORD.findall((text or "").casefold()))


@dataclass(frozen=True, slots=True)
class EditResult:
    """The result of a context tool."""

    history: History
    """The history after the edit. The result of this call is not appended yet."""
    text: str
    """The result of the call, as the model will read it."""
    changes_view: bool
    """Whether the view changed. If it did not, the next prompt begins with the whole previous prompt."""
    refused: str | None = None
    """The reason why the whole call was refused; None if the tool ran, even if it refused some ids."""
    fields: Mapping[str, Any] | None = None
    """The result as a dict, if the tool returns a JSON object. A history with `shows_ids` adds ids to it."""


def context_specs(names: Sequence[str] = PUBLISHED) -> tuple[ToolSpec, ...]:
    """Return the specifications of the named context tools, in the form in which a policy gets its tools."""
    return tuple(function_tool(getattr(ContextEditor, name)).spec for name in names)


def apply(history: History, call: ToolRequest, *, budget: Budget | None = None) -> EditResult:
    """Execute a call of a context tool from the last assistant message of `history`.

    `call.name` must be in CONTEXT_TOOLS. The tool `checkBudget` reports the numbers in `budget`.
    """
    editor = ContextEditor(history, budget or Budget())
    answer = Toolbox(function_tool(getattr(editor, name)) for name in CONTEXT_TOOLS).answer(call)
    changes_view = editor.history is not history
    return EditResult(editor.history, answer.text, changes_view, answer.refused, editor.fields)
