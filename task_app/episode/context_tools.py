"""The context tools, with which a model edits its own history; each such method returns its result text."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from shared_schemas.context_tools import CONTEXT_TOOLS as CONTEXT_TOOLS
from shared_schemas.context_tools import PUBLISHED
from shared_schemas.messages import ToolSpec
from task_app.episode.history import Change, History
from task_app.errors import clipped
from task_app.protocols import ToolRequest
from task_app.tools import Toolbox, ToolRefused, function_tool

# Pure: what a model wrote as message ids -> those that may be deleted, and why the others may not.

MAX_IDS = 1_000
# Of so many refused ids the reason is told; a result is read by a model whose window is small.
TOLD = 20


@dataclass(frozen=True, slots=True)
class Ids:
    """Ids sorted out: `accepted` in the order they were given, a reason for every other one."""

    accepted: tuple[int, ...]
    refused: tuple[str, ...]

    @property
    def complaints(self) -> str:
        """`"; refused 0 (the system message stays), ..."`, or nothing."""
        if not self.refused:
            return ""
        more = f" and {len(self.refused) - TOLD} more" if len(self.refused) > TOLD else ""
        return f"; refused {', '.join(self.refused[:TOLD])}{more}"


def sorted_out(history: History, asked: Sequence[Any]) -> Ids:
    """Which of the ids may be deleted (DESIGN.md 4.12)."""
    gone = frozenset(history.deleted_msg_ids) - summaries(history)
    accepted: dict[int, None] = {}
    refused = []
    for given in asked:
        reason = refused_id(history, given, gone=gone)
        if reason is None and given in accepted:
            reason = f"{given} (named twice)"
        if reason is None:
            accepted[given] = None
        else:
            refused.append(reason)
    return Ids(tuple(accepted), tuple(refused))


def refused_id(history: History, given: Any, *, gone: frozenset[int] | None = None) -> str | None:
    """Why this message may not be edited, with its id; None when it may."""
    if gone is None:
        gone = frozenset(history.deleted_msg_ids) - summaries(history)
    # True == 1 and 3.0 == 3 in Python: neither is an id that the model was told.
    shown = f"a {type(given).__name__}" if isinstance(given, list | dict) else clipped(repr(given), 40)
    if type(given) is not int:
        return f"{shown} (an id is a whole number)"
    if not 0 <= given < len(history):
        return f"{shown} (there is no such message; ids run from 0 to {len(history) - 1})"
    if history[given].message.role == "system":
        return f"{given} (the system message stays)"
    if given == history.first_user_id:
        return f"{given} (the task stays)"
    own = history.last_assistant_id
    if own is not None and given >= own:
        return f"{given} (it belongs to this very turn)"
    return f"{given} (already deleted)" if given in gone else None


def summaries(history: History) -> frozenset[int]:
    """Messages that hold a summary: their own text is gone, but they may be deleted in turn."""
    return frozenset(i for i, change in history.changes().items() if change.kind == "summary")


# Any JSON is accepted here: the tool itself refuses each value that is no id, with a reason.
AnyId = Annotated[Any, WithJsonSchema({"type": "integer", "minimum": 0})]
_IDS = WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MAX_IDS})
AnyIds = Annotated[list[Any], _IDS]
Quote = Annotated[str, Field(min_length=1, max_length=2_000)]


@dataclass(frozen=True, slots=True)
class Budget:
    """The rest of an episode's budget. The gateway's last reply has the token counts; None: nobody counts.

    Attributes:
        used_tokens: of the last prompt and its answer.
        max_tokens: that a prompt and its answer may have.
        decisions_left: after this one.
    """

    used_tokens: int | None = None
    max_tokens: int | None = None
    decisions_left: int | None = None


class ContextEditor:
    """Carries out one call on one history; `history` then holds the edited history, or the given one.

    `fields` holds the result key by key, if the call answers with more than a text.
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


Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """A text without its cut spans.

    Attributes:
        text: what is left, with a note in place of each span.
        spans: [start, end) of all that was cut so far, in the original text, sorted, none touching another.
        chars: how many characters this cut took away.
    """

    text: str
    spans: tuple[Span, ...]
    chars: int


def cut_out(text: str, spans: Sequence[Span], start: str, end: str) -> Cut:
    """Cut from the first place of `start` through the next place of `end` after it.

    Args:
        text: as it was said.
        spans: cut from it before.
    """
    begin = _first(text, start, spans, after=0)
    if begin is None:
        raise ValueError(f"it does not hold the words {start[:80]!r}")
    # `end` may be the same words, or overlap with them, but cannot end before they do.
    earliest = max(begin, begin + len(start) - len(end))
    last = _first(text, end, spans, after=earliest)
    if last is None:
        raise ValueError(f"the words {end[:80]!r} do not follow {start[:80]!r}")
    joined = tuple(_joined([*spans, (begin, last + len(end))]))
    return Cut(_without(text, joined), joined, _length(joined) - _length(spans))


def _first(text: str, words: str, spans: Sequence[Span], *, after: int) -> int | None:
    """The first place of the words that is still shown."""
    place = text.find(words, after)
    while place >= 0:
        hidden = next((b for a, b in spans if a < place + len(words) and place < b), None)
        if hidden is None:
            return place
        place = text.find(words, hidden)
    return None


def _joined(spans: Sequence[Span]) -> Iterator[Span]:
    current: Span | None = None
    for span in sorted(spans):
        if current is None:
            current = span
        elif span[0] <= current[1]:
            current = (current[0], max(current[1], span[1]))
        else:
            yield current
            current = span
    if current is not None:
        yield current


def _without(text: str, spans: Sequence[Span]) -> str:
    parts, place = [], 0
    for begin, end in spans:
        parts += [text[place:begin], f"[{end - begin} characters deleted]"]
        place = end
    return "".join([*parts, text[place:]])


def _length(spans: Sequence[Span]) -> int:
    return sum(end - begin for begin, end in spans)


# Short words stand everywhere and say nothing about use.
_WORD = re.compile(r"\w{4,}")


@dataclass(frozen=True, slots=True)
class Proposal:
    """A message that could go, how many characters that frees, and how much it matters (0 to 1)."""

    msg_id: int
    chars: int
    importance: float


def proposed_deletes(history: History, *, chars: int) -> tuple[Proposal, ...]:
    """Propose the least important messages that together free `chars` characters; all if that is too few.

    Nothing is deleted here. importance = (age + use) / 2, both in [0, 1]: `age` is the message's place in the
    history, 0 the oldest; `use` is the share of its different words that the task or a later message of the
    assistant also uses.
    """
    chosen: list[Proposal] = []
    freed = 0
    for proposal in sorted(_deletable(history), key=lambda one: (one.importance, one.msg_id)):
        if freed >= chars:
            break
        chosen.append(proposal)
        freed += proposal.chars
    return tuple(chosen)


def _deletable(history: History) -> list[Proposal]:
    """Every message that may be deleted and is longer than the stub that would stay."""
    view = history.view()
    gone = frozenset(history.deleted_msg_ids) - summaries(history)
    task = history.first_user_id
    named = _words(view[task].content) if task is not None else set()
    found = []
    for msg_id in range(len(view) - 1, -1, -1):
        message = view[msg_id]
        freed = len(message.content or "") - len(history.stub(msg_id).content or "")
        if freed > 0 and refused_id(history, msg_id, gone=gone) is None:
            words = _words(history[msg_id].message.content)
            use = len(words & named) / len(words) if words else 0.0
            found.append(Proposal(msg_id, freed, (msg_id / len(view) + use) / 2))
        if message.role == "assistant":
            named |= _words(message.content)
    return found


def _words(text: str | None) -> set[str]:
    return set(_WORD.findall((text or "").casefold()))


@dataclass(frozen=True, slots=True)
class Applied:
    """What a context tool did.

    Attributes:
        history: with the edit, or the one that was given. The result is not in it yet.
        text: the result of the call.
        fields: the result key by key, if it is an object; a history that shows ids adds them to these.
        edited: whether the view changed; if not, the next prompt continues the previous one.
        refused: why the call itself could not be read; a refused id does not count.
    """

    history: History
    text: str
    edited: bool
    refused: str | None = None
    fields: Mapping[str, Any] | None = None


def context_specs(names: Sequence[str] = PUBLISHED) -> tuple[ToolSpec, ...]:
    """Return the named context tools, which the loop offers beside the environment's tools."""
    return tuple(_specs()[name] for name in names)


def apply(history: History, call: ToolRequest, *, budget: Budget | None = None) -> Applied:
    """Carry out one call of the last assistant message, whose name is one of CONTEXT_TOOLS.

    Args:
        history: which already holds that assistant message.
        budget: for `checkBudget`.
    """
    editor = ContextEditor(history, budget or Budget())
    answer = _toolbox(editor).answer(call)
    edited = editor.history is not history
    return Applied(editor.history, answer.text, edited, answer.refused, editor.fields)


def _toolbox(editor: ContextEditor) -> Toolbox:
    return Toolbox(function_tool(getattr(editor, name)) for name in CONTEXT_TOOLS)


@cache
def _specs() -> dict[str, ToolSpec]:
    return {name: function_tool(getattr(ContextEditor, name)).spec for name in CONTEXT_TOOLS}
