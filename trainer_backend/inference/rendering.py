"""Convert messages and tools to token ids, and ids to text. Only this module uses chat templates."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from itertools import groupby, product
from typing import Any

from jinja2 import Environment
from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import chat_template_utils

from shared_schemas.base import did_you_mean, is_among
from trainer_backend.core.prompt_lengths import LongPrompt
from trainer_backend.errors import BadChatRequest, ContextLengthExceeded, ModelFolderError
from trainer_backend.inference.tool_format import tool_format_in_use
from trainer_backend.models.tokenizer import CHAT_TEMPLATE_KWARGS_KEY, id_count
from trainer_backend.tool_formats.calls import ParsedCall
from trainer_backend.tool_formats.tags import THINK_END, THINK_START, split_reasoning

JsonObject = Mapping[str, Any]

# The form of a call id: Mistral's templates raise on any other form, and no template rejects this one.
_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")
# The text of an id that the model embeds but the tokenizer lacks.
UNKNOWN = "\N{REPLACEMENT CHARACTER}"

# The text of a byte token in SentencePiece's tokenizers; the byte of each character in byte-level tokenizers.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_BYTES = {text: byte for byte, text in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]

# `surely_more_than` encodes this many characters per token of the limit; a token usually has three or four.
_START = 16

# A placeholder for empty reasoning, which no template trims away. Unicode reserves it for internal use.
BLANK = "\ufdd2"
# The names under which templates read the reasoning of an answer; gpt-oss and LFM2.5 use the last name.
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

# A minimal user message.
QUESTION: JsonObject = {"role": "user", "content": "?"}
# A tool, a call of this tool, and reasoning: they test what a template shows and how it writes a call.
PROBE_NAME, PROBE_THOUGHT = "turnwise_probe", "turnwise_thought"
_SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
PROBE_TOOLS: Sequence[JsonObject] = (
    {
        "type": "function",
        "function": {"name": PROBE_NAME, "description": "Takes a word.", "parameters": _SCHEMA},
    },
)
PROBE_CALL = ParsedCall(PROBE_NAME, '{"word": "tree"}')
PROBE_ANSWER: JsonObject = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_0", "type": "function", "function": asdict(PROBE_CALL)}],
}
_PROBE: Sequence[JsonObject] = (QUESTION, {**PROBE_ANSWER, _REASONING_KEYS[0]: PROBE_THOUGHT})
# The library's function that compiles a template. We call it because the library's renderer copies every
# message and tool at each call, which takes twice the time of the rendering. Ours need no copies.
_COMPILE: Any = getattr(chat_template_utils, "_compile_jinja_template", None)


# The variables of a chat template that the library or jinja sets, in addition to the special tokens.
_SET_FOR_TEMPLATES = {
    "messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now",
    "cycler", "dict", "joiner", "lipsum", "namespace", "range",
}  # fmt: skip
# A tag that only `transformers` supports. It is removed before jinja parses a template.
_GENERATION = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")


class ChatRenderer:
    """Renders conversations with the tokenizer's own chat template, and converts between text and ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        if not tokenizer.chat_template:
            raise ModelFolderError(
                "the tokenizer has no chat template",
                where=tokenizer.name_or_path or "tokenizer_config.json",
                hint="Base models have none: take the instruction-tuned one, or add a chat_template.jinja.",
            )
        self.tokenizer = tokenizer
        # Decoding six tokens through the library's wrapper takes ten times as long as this object does.
        self._backend = tokenizer.backend_tokenizer
        # Some tokenizer.json files request truncation and padding, which the wrapper would undo.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._template_kwargs: dict[str, Any] = tokenizer.init_kwargs.get(CHAT_TEMPLATE_KWARGS_KEY) or {}
        self._id_count = id_count(tokenizer)
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        settings = json.dumps([tokenizer.chat_template, self._template_kwargs], sort_keys=True, default=str)
        added = tokenizer.added_tokens_decoder.values()
        self._specials = tuple([token.content for token in added if token.special])
        self._arguments_as_text = False  # set when a template concatenates them
        self._special_texts = dict(tokenizer.special_tokens_map)
        self._renders_alone = _COMPILE is not None and self._renders_as_the_library()
        self.template_digest = hashlib.blake2b(settings.encode(), digest_size=6).hexdigest()
        # SentencePiece decoders drop a space at the start of a text, but not after another token.
        self._before: list[int] = self._backend.encode("x", add_special_tokens=False).ids
        whole = self._backend.encode("x x", add_special_tokens=False).ids
        self._drops_space = self._decode(whole) != self._decode(self._before) + self._decode(
            whole[len(self._before) :]
        )

    def prompt_text(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of a conversation, which the model continues.

        Without a generation prompt, the text ends with the last message.

        Raises:
            BadChatRequest: the chat template cannot render the messages.
        """
        return self.prompt_texts([messages], tools, add_generation_prompt=add_generation_prompt)[0]

    def prompt_texts(
        self,
        conversations: Sequence[Sequence[JsonObject]],
        tools: Sequence[JsonObject],
        *,
        add_generation_prompt: bool = True,
    ) -> list[str]:
        """Return the `prompt_text` of several conversations with the same tools."""
        if not conversations:
            return []
        # Templates are other people's programs, so any error means that they cannot render these messages.
        # Messages in rows of a data set may also be invalid; messages of requests were checked (chat_form).
        try:
            plain = [list(map(_plain_message, messages)) for messages in conversations]
            if any(map(_has_calls, plain)) and self._drops_calls:
                plain = [list(map(self._with_written_calls, messages)) for messages in plain]
            try:
                return self._apply(plain, tools, add_generation_prompt)
            except TypeError:
                if self._arguments_as_text or not any(map(_has_calls, plain)):
                    raise
                # DeepSeek's templates concatenate the arguments, which other templates print as an object.
                self._arguments_as_text = True
                try:
                    return self._apply(plain, tools, add_generation_prompt)
                except Exception:
                    self._arguments_as_text = False
                    raise
        except Exception as error:
            raise BadChatRequest(
                f"the chat template cannot render this: {error}", where="messages"
            ) from error

    def _apply(
        self,
        conversations: list[list[dict[str, Any]]],
        tools: Sequence[JsonObject],
        add_generation_prompt: bool,
    ) -> list[str]:
        if self._arguments_as_text:
            conversations = [list(map(_with_text_arguments, messages)) for messages in conversations]
        render = self._render_alone if self._renders_alone else self._render_by_library
        return render(conversations, [dict(tool) for tool in tools] or None, add_generation_prompt)

    def _render_by_library(
        self,
        conversations: list[list[dict[str, Any]]],
        tools: list[Any] | None,
        add_generation_prompt: bool,
    ) -> list[str]:
        texts = self.tokenizer.apply_chat_template(
            conversations,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self._template_kwargs,
        )
        return [str(text) for text in texts]

    def _render_alone(
        self,
        conversations: list[list[dict[str, Any]]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> list[str]:
        template = _COMPILE(self.tokenizer.get_chat_template(None, tools))
        given = {**self._special_texts, **self._template_kwargs, "tools": tools, "documents": None}
        return [
            str(template.render(messages=messages, add_generation_prompt=add_generation_prompt, **given))
            for messages in conversations
        ]

    def _renders_as_the_library(self) -> bool:
        """Return whether `_render_alone` and the library give the same text for test messages."""
        empty = {"role": "assistant", "content": f"<think>{PROBE_THOUGHT}</think>?", _REASONING_KEYS[1]: ""}
        messages = [list(map(_plain_message, (*_PROBE, QUESTION, empty)))]
        cases = product([messages], (None, [dict(tool) for tool in PROBE_TOOLS]), (False, True))
        with suppress(Exception):  # if the probe cannot be rendered, use the library
            return all(self._render_alone(*case) == self._render_by_library(*case) for case in cases)
        return False

    def prompt_ids(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> list[int]:
        return self.encode(self.prompt_text(messages, tools))

    def refuse_unread_settings(self, settings: JsonObject) -> None:
        """Refuse `model.chat_template_kwargs` that the template does not read, because jinja ignores them."""
        template: str | Mapping[str, str] = self.tokenizer.chat_template
        jinja = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)
        variables = set[str]()  # the names that any of the templates reads but does not set
        for text in [template] if isinstance(template, str) else template.values():
            variables |= find_undeclared_variables(jinja.parse(_GENERATION.sub("", text)))
        for name in settings.keys() - variables:
            known = variables - _SET_FOR_TEMPLATES - self.tokenizer.special_tokens_map.keys()
            raise ModelFolderError(
                f"the chat template reads no {name!r}"
                + (did_you_mean(name, known) if known else "; it has no settings"),
                where="model.chat_template_kwargs",
                hint="To drop all of them: --set model.chat_template_kwargs={}",
            )

    def refuse_other_settings(self, settings: JsonObject) -> None:
        """Refuse template settings of a request that differ from the model folder's settings.

        All prompts of a policy use the settings of the model folder.
        """
        for name, value in settings.items():
            if name not in self._template_kwargs or not is_among(value, [self._template_kwargs[name]]):
                raise BadChatRequest(
                    f"{name[:80]} = {value!r:.80} is not what this model's template is told, which is "
                    f"{self._template_kwargs}",
                    where="chat_template_kwargs",
                    hint="Set model.chat_template_kwargs of the job.",
                )

    @cached_property
    def question(self) -> str:
        """Return the prompt of a conversation that consists of QUESTION; see `prompt_text` for errors."""
        return self.prompt_text([QUESTION], [])

    def find_reasoning(self, content: str) -> str:
        """Return the reasoning in the content of an answer; "" if there is none."""
        return split_reasoning(content, str(self.tokenizer.chat_template))[0]

    def with_reasoning(self, message: JsonObject, reasoning: str) -> JsonObject:
        """Return an answer with its reasoning under the key that templates read, and not in its content.

        If the template reads no such key, or if there is no reasoning, return the message unchanged.

        Args:
            reasoning: the reasoning of the answer; "": take the reasoning from the content, if there is any.
        """
        thought, content = split_reasoning(_text(message.get("content")), str(self.tokenizer.chat_template))
        reasoning = reasoning or thought
        if not reasoning or not self._shows_reasoning:
            return message
        return {**message, "content": content, _REASONING_KEYS[0]: reasoning}

    def with_thought(self, answer: JsonObject, thought: str) -> JsonObject:
        """Add reasoning to an answer that has no content, and return the new answer."""
        if self._shows_reasoning:
            return {**answer, _REASONING_KEYS[0]: thought}
        return {**answer, "content": f"{THINK_START}\n{thought}\n{THINK_END}\n\n"}

    @cached_property
    def _shows_reasoning(self) -> bool:
        """Return whether the template writes reasoning that a message has outside its content."""
        try:
            text = self.prompt_text(_PROBE, [], add_generation_prompt=False)
        except BadChatRequest:
            return False
        return PROBE_THOUGHT in text

    @cached_property
    def _drops_calls(self) -> bool:
        """Return whether the template omits tool calls that the tool-call format can write instead.

        The templates of SmolLM3 and LFM2 omit the tool calls of answers.
        """
        form = tool_format_in_use(self.tokenizer)
        try:
            (text,) = self._apply([list(map(_plain_message, _PROBE))], [], add_generation_prompt=False)
        except Exception:  # it is reported when the template is used
            return False
        return form.write is not None and PROBE_NAME not in text

    def _with_written_calls(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return an answer with its tool calls written into its content, in the form that the model uses."""
        write = tool_format_in_use(self.tokenizer).write
        if "tool_calls" not in message or write is None:
            return message
        functions = [call["function"] for call in message["tool_calls"]]
        calls = [ParsedCall(function["name"], _argument_text(function)) for function in functions]
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        return {**rest, "content": "\n".join(filter(None, [message["content"], write(calls)]))}

    def answer_text(
        self, messages: Sequence[JsonObject], answer: JsonObject, tools: Sequence[JsonObject]
    ) -> str | None:
        """Return the text that the model must write to give `answer` to `messages`, end token included.

        Return None if this text is unknown, because the template renders the prompt differently when an
        answer follows.
        """
        (text,) = self.answer_texts([messages], [answer], tools)[1]
        return text

    def answer_texts(
        self,
        conversations: Sequence[Sequence[JsonObject]],
        answers: Sequence[JsonObject],
        tools: Sequence[JsonObject],
    ) -> tuple[list[str], list[str | None]]:
        """Return the prompt of each conversation, and the `answer_text` of each answer.

        All conversations have the same tools.
        """
        prompts = self.prompt_texts(conversations, tools)
        texts = self._render_answers(prompts, conversations, answers, tools)
        # Mistral's templates show the system message only while the last user message is unanswered.
        without_system = [
            [message for message in messages if message.get("role") != "system"] for messages in conversations
        ]
        unknown = [
            number
            for number, text in enumerate(texts)
            if text is None and len(without_system[number]) < len(conversations[number])
        ]
        self._fill_in(texts, unknown, without_system, answers, tools)
        # Nemotron's prompts open the reasoning, but its template renders an answer without reasoning in
        # another form. So render it with a placeholder as its reasoning.
        unknown = [number for number, text in enumerate(texts) if text is None]
        if unknown and self._shows_reasoning:
            thinking = [{**answer, _REASONING_KEYS[0]: BLANK} for answer in answers]
            self._fill_in(texts, unknown, conversations, thinking, tools)
        return prompts, texts

    def _fill_in(
        self,
        texts: list[str | None],
        unknown: Sequence[int],
        conversations: Sequence[Sequence[JsonObject]],
        answers: Sequence[JsonObject],
        tools: Sequence[JsonObject],
    ) -> None:
        """Render the answers with the indices `unknown` once more, and write the results into `texts`.

        The caller has altered the conversations or answers, so that their texts may become known.
        """
        asked, own = [conversations[number] for number in unknown], [answers[number] for number in unknown]
        found = self._render_answers(self.prompt_texts(asked, tools), asked, own, tools)
        for number, text in zip(unknown, found, strict=True):
            texts[number] = text and text.replace(BLANK, "")

    def _render_answers(
        self,
        prompts: Sequence[str],
        conversations: Sequence[Sequence[JsonObject]],
        answers: Sequence[JsonObject],
        tools: Sequence[JsonObject],
    ) -> list[str | None]:
        whole = [[*messages, answer] for messages, answer in zip(conversations, answers, strict=True)]
        texts = self.prompt_texts(whole, tools, add_generation_prompt=False)
        found = [self._after(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        for number, text in enumerate(found):
            if text is not None and self._specials and not text.endswith(self._specials):
                found[number] = text + self._next_special(whole[number], texts[number], tools)
        return found

    def _after(self, prompt: str, whole: str) -> str | None:
        """Return the text of `whole` after the prompt, up to and including the end token.

        Return None if `whole` does not begin with the prompt.
        """
        if not whole.startswith(prompt):
            return None
        end = self.tokenizer.eos_token
        length = whole.find(end, len(prompt)) if end else -1
        if end and length >= 0:
            return whole[len(prompt) : length + len(end)]
        # A newline may follow the end token; the model never writes it.
        body = whole.rstrip()
        return (body if body.endswith(self._specials) else whole)[len(prompt) :]

    def _next_special(self, messages: Sequence[JsonObject], text: str, tools: Sequence[JsonObject]) -> str:
        """Return the special token with which a further message after `messages` would begin, or "".

        Some models, such as GLM, end an answer with this token. `text` is the rendered text of `messages`.
        """
        result = {"role": "tool", "tool_call_id": "call00000", "content": "?"}
        try:
            follower = result if messages[-1].get("tool_calls") else QUESTION
            longer = self.prompt_text([*messages, follower], tools)
        except BadChatRequest:
            return ""
        if not longer.startswith(text):
            return ""
        return next((token for token in self._specials if longer.startswith(token, len(text))), "")

    def encode(self, text: str) -> list[int]:
        """Encode rendered text. Special tokens in the text are recognised; no special tokens are added."""
        # As a batch, because encoding a single text of 3 MB would hold Python's global lock all the time.
        (ids,) = self.encode_all([text])
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts, in parallel on all cores."""
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def surely_more_than(self, most: int, text: str) -> int | None:
        """Return a lower bound on a text's number of tokens if the bound exceeds `most`, else None.

        The whole text is not encoded. The first bound is the length of the text divided by the length of the
        longest token (as in vLLM). For the second bound, only the start of the text is encoded, and half of
        its number of tokens is taken. This is safe, because only the merges at the end of the start differ
        from the merges in the whole text.
        """
        if (tokens := -(-len(text) // self._longest_token)) > most:
            return tokens
        start = text[: _START * most]
        if len(start) == len(text) or (tokens := len(self.encode(start)) // 2) <= most:
            return None
        return tokens

    def refuse_too_long(
        self, text: str, *, most: int, max_tokens: int, whose: str = "the model's own"
    ) -> None:
        """Raise ContextLengthExceeded if a prompt surely has more than `most` tokens.

        The check is fast, while encoding such a prompt would take seconds.
        """
        tokens = self.surely_more_than(most, text)
        if tokens is not None:
            raise ContextLengthExceeded(
                prompt_tokens=tokens, max_tokens=max_tokens, max_model_len=most, whose=whose, at_least=True
            )

    def find_long(self, conversations: Sequence[Sequence[JsonObject]], most: int) -> list[LongPrompt]:
        """Return the conversations that have more than `most` tokens when they are rendered without tools.

        Conversations that the template cannot render are skipped: their rollouts fail later, with the reason.
        """
        texts, long = self._texts_by_place(conversations), []
        for place in [place for place, text in texts.items() if len(text) > _START * most]:
            if (tokens := self.surely_more_than(most, texts[place])) is not None:
                long.append(LongPrompt(place, tokens, is_bound=True))
                del texts[place]
        counts = zip(texts, map(len, self.encode_all(list(texts.values()))), strict=True)
        return sorted([*long, *(LongPrompt(place, tokens) for place, tokens in counts if tokens > most)])

    def _texts_by_place(self, conversations: Sequence[Sequence[JsonObject]]) -> dict[int, str]:
        """Return the prompts of the conversations that the template can render, by conversation index."""
        try:
            return dict(enumerate(self.prompt_texts(conversations, [])))
        except BadChatRequest:  # at least one conversation cannot be rendered
            texts = {}
            for place, messages in enumerate(conversations):
                with suppress(BadChatRequest):
                    texts[place] = self.prompt_text(messages, [])
            return texts

    def decode(self, ids: Sequence[int]) -> str:
        """Decode sampled ids to text, special tokens included.

        Many models embed more ids than their tokenizer has. Each id that the tokenizer lacks becomes a
        replacement character, so that a tool call with such an id does not look intact.
        """
        if ids and max(ids) >= self._id_count:
            return "".join(
                UNKNOWN * len(list(run)) if unknown else self.decode(list(run))
                for unknown, run in groupby(ids, key=lambda token: token >= self._id_count)
            )
        if self._drops_space:
            return self._decode([*self._before, *ids])[len(self._decode(self._before)) :]
        return self._decode(ids)

    def token_bytes(self, token_id: int) -> list[int] | None:
        """Return the bytes of a token, which may be a part of a character; None if they are unknown."""
        text = self.decode([token_id])
        if UNKNOWN not in text:
            return list(text.encode())
        token = self._backend.id_to_token(token_id) or ""
        if match := _BYTE_TOKEN.fullmatch(token):
            return [int(match[1], 16)]
        known = token and self._is_byte_level and all([character in _BYTES for character in token])
        return [_BYTES[character] for character in token] if known else None

    @cached_property
    def _is_byte_level(self) -> bool:
        """Return whether each character of a token in the vocabulary stands for a byte, as in GPT-2."""
        decoder = self._backend.decoder
        return decoder is not None and decoder.decode(["\u0120"]) == " "

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text


def _plain_message(message: JsonObject) -> dict[str, Any]:
    """Return a message in the form that templates expect: content as text, call arguments as an object.

    An empty `tool_calls` is omitted, because templates only test whether the key exists. A call id that is
    not nine letters or digits is replaced by nine characters derived from it, both in the call and in its
    result. The reasoning is stored under every key that a template may read.
    """
    plain = {name: value for name, value in message.items() if value is not None}
    plain["content"] = _text(message.get("content"))
    if told := [message[key] for key in _REASONING_KEYS if message.get(key) is not None]:
        plain |= dict.fromkeys(_REASONING_KEYS, next(filter(None, told), ""))
    if calls := plain.pop("tool_calls", None):
        plain["tool_calls"] = list(map(_plain_call, calls))
    if message.get("tool_call_id") is not None:
        plain["tool_call_id"] = _call_id(message["tool_call_id"])
    return plain


def _text(content: str | Sequence[JsonObject] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join([part["text"] for part in content])


def _plain_call(call: JsonObject) -> dict[str, Any]:
    function = call["function"]
    plain = {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}
    return {**plain, "id": _call_id(call["id"])} if "id" in call else plain


def _has_calls(messages: Sequence[JsonObject]) -> bool:
    return any("tool_calls" in message for message in messages)


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _argument_text(call["function"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _argument_text(function: JsonObject) -> str:
    arguments = function["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _call_id(text: str) -> str:
    if _CALL_ID.fullmatch(text):
        return text
    return hashlib.blake2b(text.encode("utf-8", "replace")).hexdigest()[:9]


def _arguments(arguments: object) -> object:
    """Parse call arguments, because templates print objects. Text that is no JSON object stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
