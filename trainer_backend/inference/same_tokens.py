"""Do two tokenizers speak the same language? What one model sampled, another can only be asked about if so.

The weight of a sample is a ratio of two probabilities of the same ids. Where an id is another piece of text
to one of them, that ratio compares two different texts, and nothing would show it.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from transformers import PreTrainedTokenizerFast

from trainer_backend.errors import BadChatRequest
from trainer_backend.inference.chat_check import ANSWER, ASKED, TOOLS
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.inference.tool_parsing import tool_format_of
from trainer_backend.models.tokenizer import CHAT_TEMPLATE_KWARGS_KEY

Tokenizer = PreTrainedTokenizerFast
# Characters of a chat template that are shown where two differ.
_SHOWN = 40


def first_difference(own: Tokenizer, other: Tokenizer) -> str | None:
    """What keeps samples of `other` from being weighed by `own`, as a sentence about `other`; None: nothing.

    In this order: the size of the vocabulary, each of its entries, the special ids, the chat template and
    what it is told, the tool-call format, and the ids of a probe.
    """
    return next(_differences(own, other), None)


def _differences(own: Tokenizer, other: Tokenizer) -> Iterator[str]:
    ours, theirs = _tokens(own), _tokens(other)
    if len(ours) != len(theirs):
        yield f"its vocabulary has {len(theirs)} tokens, the actor's {len(ours)}"
    for token in sorted(ours.keys() | theirs.keys()):
        if ours.get(token) != theirs.get(token):
            here, there = _named(theirs.get(token)), _named(ours.get(token))
            yield f"id {token} is {here} to it and {there} to the actor"
    yield from _special_ids(own, other)
    yield from _chat(own, other)
    yield from _probe(own, other)


def _tokens(tokenizer: Tokenizer) -> dict[int, str]:
    vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True)
    return {number: token for token, number in vocabulary.items()}


def _named(token: str | None) -> str:
    return "no token" if token is None else repr(token)


def _special_ids(own: Tokenizer, other: Tokenizer) -> Iterator[str]:
    for name in ("eos_token", "pad_token", "bos_token", "unk_token"):
        ours, theirs = getattr(own, name), getattr(other, name)
        if ours != theirs:
            yield f"its {name} is {_named(theirs)}, the actor's {_named(ours)}"
    ours, theirs = _special_among(own), _special_among(other)
    for token in sorted(ours ^ theirs):
        here, there = ("a special token", "plain text")[:: 1 if token in theirs else -1]
        yield f"id {token} ({_named(_tokens(own)[token])}) is {here} to it and {there} to the actor"


def _special_among(tokenizer: Tokenizer) -> set[int]:
    return {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def _chat(own: Tokenizer, other: Tokenizer) -> Iterator[str]:
    ours, theirs = _template(own), _template(other)
    if ours != theirs:
        pairs = enumerate(zip_longest(ours, theirs))
        place = next(i for i, (one, another) in pairs if one != another)
        here, there = (text[place : place + _SHOWN] for text in (theirs, ours))
        yield f"its chat template goes on with {here!r} after {place} characters, the actor's with {there!r}"
    settings = [tokenizer.init_kwargs.get(CHAT_TEMPLATE_KWARGS_KEY) or {} for tokenizer in (own, other)]
    if settings[0] != settings[1]:
        yield f"its chat template is told {settings[1]}, the actor's {settings[0]}"
    if tool_format_of(own) != tool_format_of(other):
        yield f"its tool-call format is {tool_format_of(other)!r}, the actor's {tool_format_of(own)!r}"


def _template(tokenizer: Tokenizer) -> str:
    """Of several templates all of them, by name."""
    template: Any = tokenizer.chat_template
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True)


def _probe(own: Tokenizer, other: Tokenizer) -> Iterator[str]:
    """What is not written in any of the above: merges, normalising, where a text is split."""
    text = probe_text(ChatRenderer(own))
    difference = first_other_id(*(ChatRenderer(tokenizer).encode(text) for tokenizer in (own, other)))
    if difference is not None:
        yield difference


def probe_text(renderer: ChatRenderer) -> str:
    """A conversation with a call, as the template writes it."""
    try:
        return renderer.prompt_text([*ASKED, ANSWER, {"role": "user", "content": "Go on."}], TOOLS)
    except BadChatRequest:
        return renderer.prompt_text(ASKED, TOOLS)


def first_other_id(own: Sequence[int], other: Sequence[int]) -> str | None:
    """Where the ids of one text differ, as a sentence about who made `other`; None: nowhere."""
    for place, (ours, theirs) in enumerate(zip_longest(own, other)):
        if theirs != ours:
            return (
                f"the same text becomes other ids: number {place} is {theirs} to it and {ours} to the actor"
            )
    return None
