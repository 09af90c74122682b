"""Checks of a model's chat: its template, its format of tool calls, and whether two tokenizers agree."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from transformers import PreTrainedTokenizerFast

from shared_schemas.base import did_you_mean
from trainer_backend.errors import BadChatRequest, ModelFolderError
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.models.tokenizer import CHAT_TEMPLATE_KWARGS_KEY, TOOL_CALL_FORMAT_KEY
from trainer_backend.plugins import TOOL_FORMATS
from trainer_backend.tool_formats.reading import ParsedCall, ParsedReply, ToolFormat

NAME = "turnwise_probe"
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
TOOLS = [
    {"type": "function", "function": {"name": NAME, "description": "Takes a word.", "parameters": SCHEMA}}
]
CALL = ParsedCall(NAME, '{"word": "tree"}')
ASKED = [{"role": "system", "content": "You play."}, {"role": "user", "content": "Say tree."}]
_FUNCTION = {"name": CALL.name, "arguments": CALL.arguments}
ANSWER = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_0", "type": "function", "function": _FUNCTION}],
}


def refuse_without_tools(tokenizer: PreTrainedTokenizerFast) -> None:
    """Environments ask with a system and a user message and offer tools: the template must carry all of it.

    It must show a tool to the model, and write a call so that the model's tool-call format reads it back:
    the warm-up teaches calls as the template writes them, and the gateway reads them in that format.
    """
    where = f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
    renderer, name = ChatRenderer(tokenizer), tool_format_of(tokenizer)
    try:
        # The presets never see a tool: what they may call they learn in the warm-up.
        if name != "turnwise" and NAME not in renderer.prompt_text(ASKED, TOOLS):
            raise ModelFolderError(
                "it shows no tools to the model, and the environments answer to tool calls alone",
                where=where,
                hint="Take an instruction-tuned model with tool calling, or a template that prints `tools`.",
            )
        answer = renderer.answer_text(ASKED, ANSWER, TOOLS)
    except BadChatRequest as error:
        raise ModelFolderError(
            f"it refuses a system message, a user message and a call: {error.detail}", where=where
        ) from error
    if answer is None:
        raise ModelFolderError(
            "it does not continue its own prompts, so what the model has to write cannot be told from it",
            where=where,
            hint="Some do without thinking: model.chat_template_kwargs = { enable_thinking = false }.",
        )
    _refuse_unread_call(answer.removesuffix(tokenizer.eos_token or ""), name, where=where)


def _refuse_unread_call(answer: str, name: str | None, *, where: str) -> None:
    readers = [
        known for known, form in TOOL_FORMATS.items() if form.parse(answer, TOOLS).tool_calls == (CALL,)
    ]
    if name in readers:
        return
    otherwise = "in no format that is known here" if name is None else f"otherwise than {name!r} reads it"
    raise ModelFolderError(
        f"it writes a call {otherwise}: {answer!r:.200}",
        where=where,
        hint=f"Set model.tool_call_format to {readers[0]!r}."
        if readers
        else f"Known are {', '.join(TOOL_FORMATS)}.",
    )


# Parsers never raise or rewrite: an unreadable call comes back as whole text with the reason.


def tool_format_in_use(tokenizer: PreTrainedTokenizerFast) -> ToolFormat:
    """The model's format; everything is text where none is known."""
    name = tool_format_of(tokenizer)
    return TEXT if name is None else TOOL_FORMATS[name]


def parse_text(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
    """For models without a known tool-call format: everything is text."""
    return ParsedReply(text)


TEXT = ToolFormat(parse_text, marker="", openers=())


def tool_format_of(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """The format that tokenizer_config.json names, else the first whose marker the chat template holds."""
    named = tokenizer.init_kwargs.get(TOOL_CALL_FORMAT_KEY)
    if named is not None and named not in TOOL_FORMATS:
        raise ModelFolderError(
            f"{TOOL_CALL_FORMAT_KEY} is {named!r}{did_you_mean(str(named), TOOL_FORMATS)}",
            where="tokenizer_config.json",
        )
    # Some models have a template of its own for conversations with tools.
    template = str(tokenizer.chat_template)
    found = (name for name, known in TOOL_FORMATS.items() if known.marker in template)
    return str(named) if named is not None else next(found, None)


# A sample's weight compares probabilities of the same ids, so both models must read an id as the same text.

Tokenizer = PreTrainedTokenizerFast
# Characters of a chat template that are shown where two differ.
_SHOWN = 40


def first_difference(own: Tokenizer, other: Tokenizer) -> str | None:
    """Return why `own` cannot weigh samples of `other`, as a sentence about `other`; None: it can.

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
    """Probe the parts that vocabularies do not show: merges, normalising, splits of a text."""
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
