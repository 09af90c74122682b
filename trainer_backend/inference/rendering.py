"""Messages and tools to token ids, and ids back to text: the only place that knows a chat template."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerFast

from trainer_backend.errors import BadChatRequest, ModelFolderError
from trainer_backend.models.tokenizer import CHAT_TEMPLATE_KWARGS_KEY, id_count

JsonObject = Mapping[str, Any]

# Mistral's templates raise on any other call id; no template minds this one.
_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")
# What stands in the text for an id that the model embeds and the tokenizer does not know.
UNKNOWN = "\N{REPLACEMENT CHARACTER}"

# Characters for each token that may be: at the usual three or four a token, several times too many.
_BEGINNING = 16

# Something to answer to.
ASKED: JsonObject = {"role": "user", "content": "?"}


class ChatRenderer:
    """Renders through the tokenizer's own chat template, which `transformers` compiles once."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        if not tokenizer.chat_template:
            raise ModelFolderError(
                "the tokenizer has no chat template",
                where=tokenizer.name_or_path or "tokenizer_config.json",
                hint="Base models have none: take the instruction-tuned one, or add a chat_template.jinja.",
            )
        self.tokenizer = tokenizer
        # The library's wrapper around it costs ten times the call itself when decoding six tokens.
        self._backend = tokenizer.backend_tokenizer
        # Some tokenizer.json files ask for cutting and padding, which the wrapper would have undone.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._template_kwargs: dict[str, Any] = tokenizer.init_kwargs.get(CHAT_TEMPLATE_KWARGS_KEY) or {}
        self._known_ids = id_count(tokenizer)
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        spelled = json.dumps([tokenizer.chat_template, self._template_kwargs], sort_keys=True, default=str)
        self.template_digest = hashlib.blake2b(spelled.encode(), digest_size=6).hexdigest()
        # Decoders after SentencePiece drop a space at the beginning of what they are given; behind some other
        # token it stays.
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
        """The text that the model continues."""
        plain = [plain_message(message, where=f"messages.{i}") for i, message in enumerate(messages)]
        # Templates are programs of others: whatever one raises means that it cannot render these messages.
        try:
            text = self.tokenizer.apply_chat_template(
                plain,
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._template_kwargs,
            )
        except Exception as error:
            raise BadChatRequest(
                f"the chat template cannot render this: {error}", where="messages"
            ) from error
        return str(text)

    def refuse_other_settings(self, asked: JsonObject) -> None:
        """Refuse template settings other than the model folder's, which hold for all prompts of a policy."""
        for name, value in asked.items():
            if name not in self._template_kwargs or self._template_kwargs[name] != value:
                raise BadChatRequest(
                    f"{name[:80]} = {value!r:.80} is not what this model's template is told, which is "
                    f"{self._template_kwargs}",
                    where="chat_template_kwargs",
                    hint="Set model.chat_template_kwargs of the job.",
                )

    @cached_property
    def asked(self) -> str:
        """The prompt with ASKED alone. Raises BadChatRequest as `prompt_text`."""
        return self.prompt_text([ASKED], [])

    def answer_text(
        self, messages: Sequence[JsonObject], answer: JsonObject, tools: Sequence[JsonObject]
    ) -> str | None:
        """What the model would have to write, end token included, to give `answer` to `messages`.

        None where that cannot be told: with the answer behind it, the template changes the prompt.
        """
        without_system = [message for message in messages if message.get("role") != "system"]
        # Mistral's templates show the system message only while the last user message has no answer yet.
        for asked in (messages, without_system):
            prompt = self.prompt_text(asked, tools)
            whole = self.prompt_text([*asked, answer], tools, add_generation_prompt=False)
            if whole.startswith(prompt):
                end = self.tokenizer.eos_token
                # A newline may follow the end token, which the model never gets to write.
                length = whole.find(end, len(prompt)) if end else -1
                return whole[len(prompt) : length + len(end) if length >= 0 else None]
        return None

    def encode(self, text: str) -> list[int]:
        """The ids of rendered text; special tokens written in it count as such, none are added."""
        # A batch, since a lone text is encoded under Python's global lock: for 3 MB nobody would be answered.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def surely_more_than(self, most: int, text: str) -> int | None:
        """How many tokens a text has at least, where that is more than `most`; None where it may be fewer.

        Told without encoding all of it. First by its length: no token stands for more characters than the
        longest one (vLLM bounds a prompt so too). Then by its beginning, which holds about as many tokens
        alone as it does in the whole text, for merges change at its end; half of them is on the safe side.
        """
        if (tokens := -(-len(text) // self._longest_token)) > most:
            return tokens
        beginning = text[: _BEGINNING * most]
        if len(beginning) == len(text) or (tokens := len(self.encode(beginning)) // 2) <= most:
            return None
        return tokens

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, special tokens included.

        Many models embed more ids than their tokenizer knows. Such an id has no text; a replacement character
        stands for it, so that a call that was broken by it does not read as if it were whole.
        """
        if ids and max(ids) >= self._known_ids:
            return "".join(
                UNKNOWN * len(list(run)) if unknown else self.decode(list(run))
                for unknown, run in groupby(ids, key=lambda token: token >= self._known_ids)
            )
        if self._drops_space:
            return self._decode([*self._before, *ids])[len(self._decode(self._before)) :]
        return self._decode(ids)

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text


def plain_message(message: JsonObject, *, where: str) -> dict[str, Any]:
    """A message as templates expect it: text content, and call arguments as an object where they are one.

    Templates test whether `tool_calls` is there, so an empty one is left out. A call id that is not of nine
    letters and digits is replaced, in call and result alike, by nine that follow from it.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise BadChatRequest("a message needs a role", where=f"{where}.role")
    plain = {**message, "content": _text(content, where=f"{where}.content")}
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list | tuple):
        raise BadChatRequest("tool_calls must be a list", where=f"{where}.tool_calls")
    plain.pop("tool_calls", None)
    if calls:
        plain["tool_calls"] = [
            _plain_call(call, where=f"{where}.tool_calls.{i}") for i, call in enumerate(calls)
        ]
    if "tool_call_id" in message:
        plain["tool_call_id"] = _call_id(message["tool_call_id"])
    return plain


def _text(content: object, *, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        return "".join(str(part.get("text", "")) for part in content)
    raise BadChatRequest("content must be text, a list of text parts, or null", where=where)


def _plain_call(call: object, *, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(call, dict)
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
    ):
        raise BadChatRequest('a tool call is {"id", "type", "function": {"name", "arguments"}}', where=where)
    plain = {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}
    return {**plain, "id": _call_id(call["id"])} if "id" in call else plain


def _call_id(given: object) -> str:
    text = str(given)
    if _CALL_ID.fullmatch(text):
        return text
    return hashlib.blake2b(text.encode("utf-8", "replace")).hexdigest()[:9]


def _arguments(arguments: object) -> object:
    """Arguments arrive as JSON text; templates print objects. Text that is no object stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
