"""Store the conversation of each rollout in the gateway, so that its next prompt continues the exact tokens.

Tokenising an earlier answer again may give ids other than the sampled ones, and rendering its tool call again
may give other text. In both cases the next prompt would not begin with the tokens of the previous prompt and
answer, and the decisions could not be trained as one token sequence.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from cachetools import LRUCache

from trainer_backend.inference.answers import Answer, View, hash_message, text_with
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
    measure_drift,
)
from trainer_backend.inference.rendering import ChatRenderer, JsonObject

# An index into a text, and the index of the same place in the token ids of the text.
Cut = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RequestHashes:
    messages: tuple[int, ...]
    tools: int

    @classmethod
    def of(cls, messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> "RequestHashes":
        return cls(tuple(map(hash_message, messages)), hash(repr(tools)))


@dataclass(frozen=True)  # without slots: `ids` is a cached property
class Prompt:
    """A rendered prompt, and how it continues the rollout's previous prompt and response."""

    text: str
    packed_ids: "array[int]"
    """The prompt's token ids, in four bytes each, because the gateway keeps thousands of conversations."""
    hashes: RequestHashes
    plain: str
    """The template's output, without `opening`. Where the template writes an answer differently from the
    sampled text, `text` contains the sampled text instead."""
    opening: str = ""
    """The beginning of a forced call, with which `text` ends; "" if no call is forced."""
    reused: int = 0
    """How many of the first ids were copied from the previous prompt and response."""
    break_cause: str | None = None
    """Why the prompt does not begin with all of the previous prompt and response: one of `drift.CAUSES`. None
    if the prompt does, if it has no rollout, or if it is the first of its rollout and contains no answer."""
    answers: tuple[Answer, ...] = ()
    """The earlier answers whose sampled text the gateway knows."""
    cuts: tuple[Cut, ...] = ()
    """The ends of earlier prompts and answers, where the text and the ids can be cut at the same place."""
    drift: Drift | None = None
    """The drift measured for the last answer; None if the caller did not send the answer back unedited."""

    @cached_property
    def ids(self) -> list[int]:
        return self.packed_ids.tolist()

    @property
    def extends(self) -> bool:
        """Return whether the prompt begins with all of the previous prompt and response."""
        return self.break_cause is None and bool(self.cuts)


@dataclass(frozen=True, slots=True)
class Turn:
    """The last prompt of a rollout and its response, as one text. Its size is linear in the conversation."""

    text: str
    ids: "array[int]"
    hashes: RequestHashes
    plain: str | None  # `Prompt.plain`; None if the text begins with it
    answers: tuple[Answer, ...]  # the prompt's, then the new one, whose form the next prompt determines
    cuts: tuple[Cut, ...]  # the prompt's, then the ends of the prompt and the response
    renderer: ChatRenderer  # `ids` belong to the tokenizer of this renderer

    @classmethod
    def of(cls, prompt: Prompt, answer: Answer, token_ids: Sequence[int], renderer: ChatRenderer) -> "Turn":
        """Join a prompt and its answer. `token_ids` are the sampled ids, including a stop token."""
        text = prompt.text + answer.raw_text + answer.stop_text
        ids = prompt.packed_ids + array("i", token_ids)
        ends = (len(prompt.text), len(prompt.packed_ids)), (len(text), len(ids))
        answers, cuts = (*prompt.answers, answer), (*prompt.cuts, *ends)
        plain = None if prompt.text == prompt.plain + prompt.opening else prompt.plain
        return cls(text, ids, prompt.hashes, plain, answers, cuts, renderer)

    @property
    def plain_prompt(self) -> str:
        """Return the prompt as the template wrote it, without the beginning of a forced call."""
        end = self.cuts[-2][0] - len(self.answers[-1].opening)
        return self.text[:end] if self.plain is None else self.plain


class Conversations:
    """Stores the last turn of each rollout, for at most `most` rollouts.

    The least recently used rollout is forgotten first; its next prompt then reuses no ids. A rollout
    requests one decision at a time. If two requests of a rollout overlap, the later answer is stored.
    """

    def __init__(self, *, most: int) -> None:
        self._turns: LRUCache[str, Turn] = LRUCache(most)

    def prompt(
        self,
        rollout_id: str,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
        renderer: ChatRenderer,
        refuse_too_long: Callable[[str], None] = lambda text: None,
        opening: str = "",
    ) -> Prompt:
        """Render and tokenise the messages. The unchanged part of the conversation keeps its exact ids.

        Args:
            refuse_too_long: is called with the text before the text is tokenised; raises if it is too long.
            opening: the beginning of a forced call, which is appended to the prompt.
        """
        turn = self._turns.get(rollout_id)
        if turn is not None and turn.renderer is renderer:
            return next_prompt(turn, messages, tools, refuse_too_long, opening)
        plain = renderer.prompt_text(messages, tools)
        text = plain + opening
        refuse_too_long(text)
        break_cause = None if turn is None else OTHER_MODEL
        if turn is None and rollout_id and any(message.get("role") == "assistant" for message in messages):
            break_cause = UNKNOWN
        ids, hashes = array("i", renderer.encode(text)), RequestHashes.of(messages, tools)
        return Prompt(text, ids, hashes, plain, opening=opening, break_cause=break_cause)

    def remember(self, rollout_id: str, turn: Turn) -> None:
        self._turns[rollout_id] = turn


def next_prompt(
    turn: Turn,
    messages: Sequence[JsonObject],
    tools: Sequence[JsonObject],
    refuse_too_long: Callable[[str], None] = lambda text: None,
    opening: str = "",
) -> Prompt:
    """Return the prompt that follows a turn. It keeps the turn's ids up to the first difference in the text.

    Every unedited answer appears as it was sampled. For this, the template gets the sampled text as content;
    if the template writes that text differently, the sampled text replaces the template's output. The prompt
    may still not begin with the whole text of the turn, because a message was edited, or because the template
    drops or rewrites a part of it. Then only the ids before the first difference are kept.
    """
    hashes = RequestHashes.of(messages, tools)
    text, plain, answers = _render(turn, hashes, messages, tools)
    text += opening
    refuse_too_long(text)
    cut_count = len(turn.cuts)  # the number of cuts in the beginning that both texts share
    if not text.startswith(turn.text):
        cut_count = bisect_left(turn.cuts, True, key=lambda cut: not text.startswith(turn.text[: cut[0]]))
    text_end, ids_end = turn.cuts[cut_count - 1] if cut_count else (0, 0)
    ids = turn.ids[:ids_end] + array("i", turn.renderer.encode(text[text_end:]))
    newest, drift = turn.answers[-1], None
    if newest.stands_in(hashes.messages):
        start, first = turn.cuts[-2]
        before, sampled = turn.text[max(0, start - TAIL) : start], turn.ids[first:]
        drift = measure_drift(newest, sampled, before, messages[newest.index :], turn.renderer)
    is_repeat = ids_end == len(ids)  # the request repeats an earlier prompt, so it counts as a new one
    return Prompt(
        text,
        ids,
        hashes,
        plain,
        opening=opening,
        reused=0 if is_repeat else ids_end,
        break_cause=None if ids_end == len(turn.ids) else _cause(turn, hashes, text),
        answers=answers,
        cuts=turn.cuts[: cut_count - is_repeat],
        drift=drift,
    )


def _render(
    turn: Turn, hashes: RequestHashes, messages: Sequence[JsonObject], tools: Sequence[JsonObject]
) -> tuple[str, str, tuple[Answer, ...]]:
    """Render the messages of a request, with the sampled texts of earlier answers where possible.

    Return the text, the template's own output (`Prompt.plain`), and the answers, in the forms that were used.
    """
    *earlier, newest = turn.answers
    present = tuple([answer for answer in earlier if answer.stands_in(hashes.messages)])
    if newest.stands_in(hashes.messages):
        view = View(messages, tools, present, turn.renderer)
        is_unedited = turn.hashes.messages == hashes.messages[: newest.index]
        form = None
        if is_unedited:
            # If the template did not write an earlier answer as sampled, no form reproduces the turn's text.
            if turn.plain is None:
                form = view.form_extending(newest, turn.text)
            if form is None and (place := view.continuation(newest, turn.plain_prompt)) is not None:
                form, end = place
                plain = view.text(form) or ""
                return turn.text + plain[end:], plain, (*present, form)
        form = form or view.exact(newest)
        present, text = (*present, form), view.text(form)
    else:
        text = text_with(messages, present, tools, turn.renderer)
    if text is None:  # the template cannot render the sampled texts, but perhaps the plain messages
        text, present = turn.renderer.prompt_text(messages, tools), ()
    return text, text, present


def _cause(turn: Turn, hashes: RequestHashes, text: str) -> str:
    newest = turn.answers[-1]
    if len(hashes.messages) <= newest.index:
        return FRESH
    if hashes.tools != turn.hashes.tools:
        return TOOLS
    if not newest.stands_in(hashes.messages) or turn.hashes.messages != hashes.messages[: newest.index]:
        return EDITED
    thoughts = {answer.thought(turn.renderer) for answer in turn.answers} - {""}
    is_dropped = any(text.count(thought) < turn.text.count(thought) for thought in thoughts)
    return REASONING if is_dropped else TEMPLATE
