"""What the gateway remembers of each rollout, so that a conversation goes on from the exact tokens it had.

Tokenising an earlier answer again may give other ids than were sampled, and writing its tool call again may
give other text. Both would break the prefix, and with it the training sequence, for nothing.
"""

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from trainer_backend.inference.answers import Answer, JsonObject, View, said, text_with
from trainer_backend.inference.drift import (
    EDITED,
    FRESH,
    OTHER_MODEL,
    REASONING,
    TAIL,
    TEMPLATE,
    TOOLS,
    UNKNOWN,
    Drift,
    drift_of,
)
from trainer_backend.inference.rendering import ChatRenderer

THOUGHT_ENDS = "</think>"
# A place in a text, and the same place in its ids.
Cut = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Asked:
    """What each message of a request says, and what tools it offers, as numbers."""

    messages: tuple[int, ...]
    tools: int

    @classmethod
    def of(cls, messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> "Asked":
        return cls(tuple(map(said, messages)), hash(repr(tools)))


@dataclass(frozen=True)  # without slots: `ids` is made once
class Prompt:
    """A rendered prompt, and how it goes on from the rollout's last one.

    Attributes:
        packed: its ids, four bytes each: what is kept of 10,000 conversations.
        reused: how many of its first ids are the first ones of the last prompt and response.
        broken: why those are not all of them, one of `figures.CAUSES`; None where they are, and in the first
            prompt of a rollout.
        answers: what was sampled for its assistant messages, where that is known.
        cuts: ends of the earlier prompts and answers in it, where text and ids may both be cut.
        drift: of the last answer, where that was sent back unedited.
    """

    text: str
    packed: "array[int]"
    asked: Asked
    reused: int = 0
    broken: str | None = None
    answers: tuple[Answer, ...] = ()
    cuts: tuple[Cut, ...] = ()
    drift: Drift | None = None

    @cached_property
    def ids(self) -> list[int]:
        """[L] all of them."""
        return self.packed.tolist()

    @property
    def extends(self) -> bool:
        """Whether it goes on from all of the last prompt and response."""
        return self.broken is None and bool(self.cuts)


@dataclass(frozen=True, slots=True)
class Turn:
    """The last prompt of a rollout and what was sampled after it; its size is linear in the conversation.

    Attributes:
        text, ids: of the prompt and the response together.
        answers: those that stood in the prompt, and the new one, whose form the next prompt settles.
        cuts: as in a prompt; the last two are the ends of prompt and response.
        renderer: ids mean something to its tokenizer alone.
    """

    text: str
    ids: "array[int]"
    asked: Asked
    answers: tuple[Answer, ...]
    cuts: tuple[Cut, ...]
    renderer: ChatRenderer

    @classmethod
    def of(cls, prompt: Prompt, answer: Answer, token_ids: Sequence[int], renderer: ChatRenderer) -> "Turn":
        """What a prompt becomes by its answer; token_ids as sampled, stop token included."""
        text = prompt.text + answer.raw_text + answer.stop_text
        ids = prompt.packed + array("i", token_ids)
        ends = (len(prompt.text), len(prompt.packed)), (len(text), len(ids))
        return cls(text, ids, prompt.asked, (*prompt.answers, answer), (*prompt.cuts, *ends), renderer)


class Conversations:
    """A bounded memory, least recently used first out. Forgetting one costs a full prompt, no more.

    A rollout asks for one decision at a time; of two that overlap, the later answer counts.
    """

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._turns: OrderedDict[str, Turn] = OrderedDict()

    def prompt(
        self,
        rollout_id: str,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
        renderer: ChatRenderer,
        refuse_too_long: Callable[[str], None] = lambda text: None,
    ) -> Prompt:
        """Render the messages, going on from the exact ids of all that they leave unchanged.

        Args:
            refuse_too_long: is given the text before it is encoded, and may raise.
        """
        turn = self._turns.get(rollout_id)
        if turn is not None and turn.renderer is renderer:
            return next_prompt(turn, messages, tools, refuse_too_long)
        text = renderer.prompt_text(messages, tools)
        refuse_too_long(text)
        broken = None if turn is None else OTHER_MODEL
        if turn is None and rollout_id and any(message.get("role") == "assistant" for message in messages):
            broken = UNKNOWN
        return Prompt(text, array("i", renderer.encode(text)), Asked.of(messages, tools), broken=broken)

    def remember(self, rollout_id: str, turn: Turn) -> None:
        self._turns[rollout_id] = turn
        self._turns.move_to_end(rollout_id)
        if len(self._turns) > self._most:
            self._turns.popitem(last=False)


def next_prompt(
    turn: Turn,
    messages: Sequence[JsonObject],
    tools: Sequence[JsonObject],
    refuse_too_long: Callable[[str], None] = lambda text: None,
) -> Prompt:
    """The prompt that follows a turn: its ids as they are, up to the first place where the text differs.

    The raw text takes the place of every answer that stands unedited. If the rendering then does not begin
    with all that the model saw and wrote, something was edited, or the template drops or rewrites it: that is
    another prompt, which shares with the last one what stands before that place.
    """
    asked = Asked.of(messages, tools)
    text, answers = _rendered(turn, asked, messages, tools)
    refuse_too_long(text)
    kept = _unchanged(turn, text)
    text_kept, ids_kept = turn.cuts[kept - 1] if kept else (0, 0)
    ids = turn.ids[:ids_kept] + array("i", turn.renderer.encode(text[text_kept:]))
    repeated = ids_kept == len(ids)  # the same prompt once more goes on from nothing: it is asked anew
    return Prompt(
        text,
        ids,
        asked,
        reused=0 if repeated else ids_kept,
        broken=None if ids_kept == len(turn.ids) else _cause(turn, asked, text),
        answers=answers,
        cuts=turn.cuts[: kept - repeated],
        drift=_drift(turn, messages) if turn.answers[-1].stands_in(asked.messages) else None,
    )


def _rendered(
    turn: Turn, asked: Asked, messages: Sequence[JsonObject], tools: Sequence[JsonObject]
) -> tuple[str, tuple[Answer, ...]]:
    """The text, and the answers that stand in it with the forms that they have there."""
    *earlier, newest = turn.answers
    stand = tuple([answer for answer in earlier if answer.stands_in(asked.messages)])
    if newest.stands_in(asked.messages):
        view = View(messages, tools, stand, turn.renderer)
        unedited = turn.asked.messages == asked.messages[: newest.index]
        form = (view.extending(newest, turn.text) if unedited else None) or view.exact(newest)
        stand, text = (*stand, form), view.text(form)
    else:
        text = text_with(messages, stand, tools, turn.renderer)
    if text is None:  # with what was sampled in it, the template cannot render it; if at all, without
        return turn.renderer.prompt_text(messages, tools), ()
    return text, stand


def _unchanged(turn: Turn, text: str) -> int:
    """How many of the turn's cuts lie in what the text begins with."""
    if text.startswith(turn.text):
        return len(turn.cuts)
    return bisect_left(turn.cuts, True, key=lambda cut: not text.startswith(turn.text[: cut[0]]))


def _cause(turn: Turn, asked: Asked, text: str) -> str:
    newest = turn.answers[-1]
    if len(asked.messages) <= newest.index:
        return FRESH
    if asked.tools != turn.asked.tools:
        return TOOLS
    if not newest.stands_in(asked.messages) or turn.asked.messages != asked.messages[: newest.index]:
        return EDITED
    thoughts = [a.raw_text.partition(THOUGHT_ENDS)[0] for a in turn.answers if THOUGHT_ENDS in a.raw_text]
    return REASONING if any(thought.strip() not in text for thought in thoughts) else TEMPLATE


def _drift(turn: Turn, messages: Sequence[JsonObject]) -> Drift:
    newest = turn.answers[-1]
    text_end, ids_end = turn.cuts[-2]
    before, sampled = turn.text[max(0, text_end - TAIL) : text_end], turn.ids[ids_end:]
    return drift_of(newest, sampled, before, messages[newest.index :], turn.renderer)
