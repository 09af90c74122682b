"""Check a model's chat template and tool-call format, and whether two tokenizers agree."""

import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from transformers import PreTrainedTokenizerFast

from trainer_backend.errors import BadChatRequest, ModelFolderError
from trainer_backend.inference.rendering import (
    PROBE_ANSWER,
    PROBE_CALL,
    PROBE_NAME,
    PROBE_THOUGHT,
    PROBE_TOOLS,
    ChatRenderer,
)
from trainer_backend.inference.tool_format import detect_tool_format
from trainer_backend.models.tokenizer import CHAT_TEMPLATE_KWARGS_KEY
from trainer_backend.plugins import TOOL_FORMATS

QUESTION = [{"role": "system", "content": "You play."}, {"role": "user", "content": "Say tree."}]


def refuse_without_tools(tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise ModelFolderError if the chat template cannot render what environments need.

    Environments need system messages, user messages, tools and tool calls. The template must write a call in
    the model's tool-call format, because the warm-up trains on calls as the template writes them, and the
    gateway parses calls in the model's format.
    """
    where = f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
    renderer, name = ChatRenderer(tokenizer), detect_tool_format(tokenizer)
    try:
        # The template of the presets shows no tools, because presets learn their calls in the warm-up.
        if name != "turnwise" and PROBE_NAME not in renderer.prompt_text(QUESTION, PROBE_TOOLS):
            raise ModelFolderError(
                "it shows no tools to the model, and the environments answer to tool calls alone",
                where=where,
                hint="Take an instruction-tuned model with tool calling, or a template that prints `tools`.",
            )
        answer = renderer.answer_text(QUESTION, PROBE_ANSWER, PROBE_TOOLS)
    except BadChatRequest as error:
        raise ModelFolderError(
            f"it refuses a system message, a user message and a call: {error.detail}", where=where
        ) from error
    if answer is None:
        raise ModelFolderError(
            "it does not continue its own prompts, so the answer that the model has to write is unknown",
            where=where,
            hint="Some do without thinking: model.chat_template_kwargs = { enable_thinking = false }.",
        )
    _refuse_unread_call(answer.removesuffix(tokenizer.eos_token or ""), name, where=where)


def _refuse_unread_call(answer: str, name: str | None, *, where: str) -> None:
    readers = [
        key
        for key, form in TOOL_FORMATS.items()
        if form.parse(answer, PROBE_TOOLS).tool_calls == (PROBE_CALL,)
    ]
    if name in readers:
        return
    reason = "in no format that is known here" if name is None else f"otherwise than {name!r} reads it"
    hint = (
        f"Set model.tool_call_format to {readers[0]!r}."
        if readers
        else f"Known are {', '.join(TOOL_FORMATS)}."
    )
    raise ModelFolderError(f"it writes a call {reason}: {answer!r:.200}", where=where, hint=hint)


_RESULT = {"role": "tool", "tool_call_id": "call_0", "content": "tree"}
_NEXT = [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "Say stone."}]


def describe_chat(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a text that names the tool-call format and says whether the template keeps earlier reasoning."""
    name, renderer = detect_tool_format(tokenizer), ChatRenderer(tokenizer)
    answer = renderer.with_thought(PROBE_ANSWER, PROBE_THOUGHT)
    try:
        shown = [
            PROBE_THOUGHT in renderer.prompt_text([*QUESTION, answer, _RESULT, *after], PROBE_TOOLS)
            for after in ([], _NEXT)
        ]
    except BadChatRequest:
        kept = "cannot be told from the template"
    else:
        kept = {
            (True, True): "stays in later prompts",
            (True, False): "is dropped behind the user's next question, where a new segment begins",
            (False, False): "is dropped behind every answer, where a new segment begins",
        }.get((shown[0], shown[1]), "is shown in some later prompts")
    return f"tool calls: {name or 'in no format that is known here'}; reasoning {kept} (docs/models.md)"


# Importance weights compare probabilities of equal ids, so both models must map an id to the same text.

Tokenizer = PreTrainedTokenizerFast
# The number of characters of a chat template that an error message about a difference quotes.
_EXCERPT = 40


def first_difference(own: Tokenizer, other: Tokenizer) -> str | None:
    """Return the first reason why samples of `other` cannot be importance-weighted under `own`, or None.

    In the returned sentence, "it" is the model of `other`, and "the actor" is the model of `own`. The
    tokenizers are compared in this order: size and entries of the vocabulary, special ids, chat template and
    its settings, tool-call format, and ids of a probe text.
    """
    return next(_differences(own, other), None)


def _differences(own: Tokenizer, other: Tokenizer) -> Iterator[str]:
    ours, theirs = _tokens(own), _tokens(other)
    if len(ours) != len(theirs):
        yield f"its vocabulary has {len(theirs)} tokens, the actor's {len(ours)}"
    for token in sorted(ours.keys() | theirs.keys()):
        if ours.get(token) != theirs.get(token):
            here, there = _quoted(theirs.get(token)), _quoted(ours.get(token))
            yield f"id {token} is {here} to it and {there} to the actor"
    yield from _special_ids(own, other)
    yield from _chat(own, other)
    # The probe covers what vocabularies do not show: merges, normalisation, splits.
    text = probe_text(ChatRenderer(own))
    difference = first_other_id(*(ChatRenderer(tokenizer).encode(text) for tokenizer in (own, other)))
    if difference is not None:
        yield difference


def _tokens(tokenizer: Tokenizer) -> dict[int, str]:
    vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True)
    return {number: token for token, number in vocabulary.items()}


def _quoted(token: str | None) -> str:
    return "no token" if token is None else repr(token)


def _special_ids(own: Tokenizer, other: Tokenizer) -> Iterator[str]:
    for name in ("eos_token", "pad_token", "bos_token", "unk_token"):
        ours, theirs = getattr(own, name), getattr(other, name)
        if ours != theirs:
            yield f"its {name} is {_quoted(theirs)}, the actor's {_quoted(ours)}"
    ours, theirs = _special_among(own), _special_among(other)
    for token in sorted(ours ^ theirs):
        here, there = ("a special token", "plain text")[:: 1 if token in theirs else -1]
        yield f"id {token} ({_quoted(_tokens(own)[token])}) is {here} to it and {there} to the actor"


def _special_among(tokenizer: Tokenizer) -> set[int]:
    return {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def _chat(own: Tokenizer, other: Tokenizer) -> Iterator[str]:
    ours, theirs = _template(own), _template(other)
    if ours != theirs:
        pairs = enumerate(zip_longest(ours, theirs))
        place = next(i for i, (one, another) in pairs if one != another)
        here, there = (text[place : place + _EXCERPT] for text in (theirs, ours))
        yield f"its chat template goes on with {here!r} after {place} characters, the actor's with {there!r}"
    settings = [tokenizer.init_kwargs.get(CHAT_TEMPLATE_KWARGS_KEY) or {} for tokenizer in (own, other)]
    if settings[0] != settings[1]:
        yield f"its chat template is told {settings[1]}, the actor's {settings[0]}"
    formats = detect_tool_format(own), detect_tool_format(other)
    if formats[0] != formats[1]:
        yield f"its tool-call format is {formats[1]!r}, the actor's {formats[0]!r}"


def _template(tokenizer: Tokenizer) -> str:
    """Return the chat template. If there are several, return all of them by name, as JSON."""
    template: Any = tokenizer.chat_template
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True)


def probe_text(renderer: ChatRenderer) -> str:
    """Render a short conversation with a tool call, or without the call if the template refuses it."""
    try:
        return renderer.prompt_text(
            [*QUESTION, PROBE_ANSWER, {"role": "user", "content": "Go on."}], PROBE_TOOLS
        )
    except BadChatRequest:
        return renderer.prompt_text(QUESTION, PROBE_TOOLS)


def first_other_id(own: Sequence[int], other: Sequence[int]) -> str | None:
    """Return a sentence about the first id that differs between two encodings of a text, or None.

    In the sentence, "it" is the model of `other`, and "the actor" is the model of `own`.
    """
    pairs = enumerate(zip_longest(own, other))
    others = (
        f"the same text becomes other ids: number {place} is {theirs} to it and {ours} to the actor"
        for place, (ours, theirs) in pairs
        if theirs != ours
    )
    return next(others, None)
