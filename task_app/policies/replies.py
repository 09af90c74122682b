"""Reads action, text and exact tokens of a chat completion, from our gateway or another server; no I/O.

A model's mistakes, such as a missing tool call or bad arguments, become part of the action. A server's
mistakes, such as missing choices or a NaN, raise PolicyUnavailable with the code `inference_protocol`. The
error's message names the field, the value found and the values allowed.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from pydantic import Field, JsonValue
from pydantic_core import to_json

from service_kit import replies
from service_kit.replies import Model
from shared_schemas.base import Count, StrictReply
from shared_schemas.json_text import read_json, read_quotation, read_typed
from shared_schemas.trajectory import DrawnLogprob, ExpertChoices, Logprob, PolicyLogprobs, TokenId, cover
from task_app.episode.actions import NO_TOOL_CALL, json_object
from task_app.errors import PolicyUnavailable

PROTOCOL = "inference_protocol"
WITHHELD = "the server's content filter withheld the reply or a part of it; call one of the tools"
KEY_STATUSES = frozenset({401, 403})


@dataclass(frozen=True, slots=True)
class Reply:
    """A chat completion. `tokens` is None if the server sends no token ids or log-probs.

    `logprobs` contains (token as text, log-prob) for each token in OpenAI's `logprobs`; it is None if they
    were not requested or not sent. `reasoning_tokens` is the part of `completion_tokens` that is not in the
    message. `ignored` names the settings of the request that our gateway did not apply.
    """

    action: dict[str, Any]
    text: str
    tokens: PolicyLogprobs | None
    finish_reason: str | None
    model: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    reasoning_tokens: int = 0
    logprobs: list[tuple[str, float]] | None = None
    ignored: tuple[str, ...] = ()

    @property
    def reusable_tokens(self) -> int | None:
        """Return how many tokens of this prompt and answer the next prompt will repeat; None if unknown."""
        if self.prompt_tokens is None or self.completion_tokens is None:
            return None
        return self.prompt_tokens + max(0, self.completion_tokens - self.reasoning_tokens)


class _Part(StrictReply):
    text: JsonValue = None


class _Message(StrictReply):
    """The text and calls that the model wrote; the calls are not validated here."""

    content: str | tuple[_Part, ...] | None = None
    refusal: str | None = None
    tool_calls: JsonValue = None
    tool_call_error: str | None = None


class _Choice(StrictReply):
    message: _Message
    finish_reason: str | None = None
    sampling_finish_reason: str | None = None
    raw_text: str | None = None
    """All sampled text; only our gateway sends it."""

    @property
    def ending(self) -> str | None:
        """Why sampling ended; our gateway's `finish_reason` may only say that a call was parsed."""
        return self.sampling_finish_reason or self.finish_reason


class _OwnChoice(_Choice):
    """A choice of our gateway, or of a server that sends no exact tokens."""

    token_ids: tuple[TokenId, ...] | None = None
    token_logprobs: tuple[DrawnLogprob, ...] | None = None
    versions: tuple[tuple[TokenId, Count], ...] | None = None
    experts: ExpertChoices | None = None


class _PlainToken(StrictReply):
    token: str
    logprob: Logprob


class _PlainTokens(StrictReply):
    content: tuple[_PlainToken, ...] | None = None


class _PlainChoice(_OwnChoice):
    """A choice of a reply for which OpenAI's log-probs were requested; most servers omit them for calls."""

    logprobs: _PlainTokens | None = None


class _WholeToken(StrictReply):
    logprob: DrawnLogprob


class _WholeTokens(StrictReply):
    content: tuple[_WholeToken, ...]


class _WholeChoice(_Choice):
    """A choice of a server like vLLM, which sends exact tokens in each reply."""

    token_ids: tuple[TokenId, ...]
    logprobs: _WholeTokens


class _Details(StrictReply):
    reasoning_tokens: Count | None = None


class _Usage(StrictReply):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    completion_tokens_details: _Details | None = None


AnyChoice = TypeVar("AnyChoice", bound=_Choice)


class Completion(StrictReply, Generic[AnyChoice]):
    """The fields of a chat completion that this module reads."""

    choices: tuple[AnyChoice, ...] = Field(min_length=1)
    model: str | None = None
    usage: _Usage | None = None
    prompt_token_ids: tuple[TokenId, ...] | None = None
    prompt_ids_reused: Count | None = None


# Built once, because evaluating `Completion[...]` takes as long as reading the calls of a reply.
_OWN, _PLAIN, _WHOLE = Completion[_OwnChoice], Completion[_PlainChoice], Completion[_WholeChoice]
_NO_USAGE, _NO_DETAILS = _Usage(), _Details()


class _Counted(StrictReply):
    count: Count


class _PromptUsage(StrictReply):
    prompt_tokens: Count


class _Billed(StrictReply):
    usage: _PromptUsage


class ReadTokens(Protocol):
    """Reads the exact tokens from the replies of one kind of server; returns None if a reply lacks them.

    `hint` is appended to the error message about a wrong field.
    """

    hint: str

    def kind(self, *, logprobs: bool) -> type[Completion[Any]]:
        """Return the model class of a reply; `logprobs`: whether OpenAI's log-probs were requested."""

    def __call__(self, reply: Completion[Any]) -> PolicyLogprobs | None: ...


def read_reply(body: bytes, read_tokens: ReadTokens, *, logprobs: bool = False) -> Reply:
    """Read the body of a reply with status 200; `logprobs`: whether OpenAI's log-probs were requested."""
    reply = _read(read_tokens.kind(logprobs=logprobs), body, read_tokens.hint)
    choice, usage = reply.choices[0], reply.usage or _NO_USAGE
    plain = choice.logprobs if isinstance(choice, _PlainChoice) else None
    text = _join_text(choice.message)
    return Reply(
        action=_read_action(choice, text),
        # If the server does not send all sampled text, the text of a reply with only a call is empty.
        text=text if choice.raw_text is None else choice.raw_text,
        tokens=read_tokens(reply),
        finish_reason=choice.ending,
        model=reply.model,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=(usage.completion_tokens_details or _NO_DETAILS).reasoning_tokens or 0,
        logprobs=None
        if plain is None or plain.content is None
        else [(one.token, one.logprob) for one in plain.content],
    )


def read_count(body: bytes, *, is_billed: bool) -> int:
    """Return the number of prompt tokens in a completion (`is_billed`), or in a reply of /tokenize."""
    return _read(_Billed, body).usage.prompt_tokens if is_billed else _read(_Counted, body).count


def _read(kind: type[Model], body: bytes, hint: str = "") -> Model:
    try:
        return replies.read_reply(kind, body, "")
    except replies.ReplyInvalid as exc:
        fault = exc
    if not fault.field and b"\\ud" in body.lower():  # a lone surrogate is the model's doing
        with suppress(ValueError):
            plain = to_json(read_typed(read_quotation, body))
            return _read(kind, plain, hint)
    raise protocol_error(fault.finding + hint) from fault


def refusal(status: int, body: bytes, *, key: str = "") -> tuple[str, str]:
    """Return code and sentence of an error reply in OpenAI's form, as problem+json, or in an unknown form.

    Servers often repeat the key that they refuse. Therefore `key` is removed, and for 401 and 403 the
    sentence contains only status and code.
    """
    try:
        value = read_json(body)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        return "", f"status {status}"
    source = _read_table(value, "error") or value
    code = _remove_key(key, _read_string(source.get("code")) or "")[:100]
    if status in KEY_STATUSES:
        return code, f"status {status} {code}".strip()
    sentence = _read_string(source.get("detail")) or _read_string(source.get("message")) or ""
    sentence = _remove_key(key, sentence)
    return code, f"status {status} {code} {sentence[:300]}".strip()


def retry_after_s(retry_after: str | None) -> float | None:
    """Return the Retry-After header in seconds; None if it is missing or a date, since clocks may differ."""
    text = (retry_after or "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _remove_key(key: str, text: str) -> str:
    return text.replace(key, "[key]") if key else text


def protocol_error(what: str) -> PolicyUnavailable:
    return PolicyUnavailable(f"the inference server answered nonsense: {what}", code=PROTOCOL)


def _read_action(choice: _Choice, text: str) -> dict[str, Any]:
    """Return the action of a message: all its calls, or its text with the reason why it contains no call.

    If there is exactly one call, the action also contains its `name` and its `arguments`, parsed as an object
    if possible. `tool_calls` keeps the arguments as text, because the next prompt must repeat it exactly.
    """
    calls = choice.message.tool_calls
    if isinstance(calls, list) and calls:
        own = [_read_call(call, index) for index, call in enumerate(calls)]
        single: dict[str, Any] = {}
        if len(own) == 1:
            arguments = json_object(raw := own[0]["arguments"])
            single = {"name": own[0]["name"], "arguments": raw if arguments is None else arguments}
        return {"type": "tool_call", **single, "tool_calls": own, "content": text}
    missing = WITHHELD if choice.ending == "content_filter" else NO_TOOL_CALL
    return {"type": "text", "content": text, "invalid_reason": choice.message.tool_call_error or missing}


def _read_call(call: Any, index: int) -> dict[str, str]:
    """Return a call made of any JSON value; the environment, not this function, refuses an invalid call."""
    source = call if isinstance(call, dict) else {}
    function = _read_table(source, "function")
    arguments = function.get("arguments", "")
    return {
        "id": _read_string(source.get("id")) or f"call_{index}",
        "name": _read_string(function.get("name")) or "",
        "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
    }


def _join_text(message: _Message) -> str:
    """Return the content of a message, with its parts joined, or else its refusal."""
    if isinstance(message.content, tuple):
        return "".join(part.text for part in message.content if isinstance(part.text, str))
    return message.content or message.refusal or ""


class OwnReplies:
    """Reads the exact tokens from replies of our own gateway; returns None if a reply does not contain them.

    If exact tokens were not requested (`asked` is False), our gateway sends tokens of the answer but not of
    the prompt; the result is then None.
    """

    hint = ""

    def __init__(self, *, asked: bool = True) -> None:
        self._asked = asked

    def kind(self, *, logprobs: bool) -> type[Completion[Any]]:
        return _PLAIN if logprobs else _OWN

    def __call__(self, reply: Completion[_OwnChoice]) -> PolicyLogprobs | None:
        choice = reply.choices[0]
        if choice.token_logprobs is None and choice.versions is None:  # a vLLM server sends ids alone
            return None
        fields = {
            "prompt_token_ids": reply.prompt_token_ids,
            "choices.0.token_ids": choice.token_ids,
            "choices.0.token_logprobs": choice.token_logprobs,
            "choices.0.versions": choice.versions,
            "choices.0.finish_reason": choice.ending,
        }
        for name, value in fields.items():
            if value is None and not self._asked:
                return None
            if value is None:
                raise protocol_error(f"{name} is missing; exact tokens consist of {', '.join(fields)}")
        ids, starts = choice.token_ids or (), [start for start, _ in choice.versions or ()]
        if (ids or starts) and not cover(starts, len(ids)):
            raise protocol_error(
                f"choices.0.versions start at the tokens {replies.show_found(starts)}; expected are 0 first, "
                f"then rising, below {len(ids)} token_ids"
            )
        return _make_tokens(
            prompt_ids_reused=reply.prompt_ids_reused or 0,
            prompt_token_ids=reply.prompt_token_ids or (),
            token_ids=ids,
            logprobs=choice.token_logprobs or (),
            finish_reason=choice.ending or "",
            versions=choice.versions or (),
            **({} if choice.experts is None else {"experts": choice.experts}),
        )


def _make_tokens(**fields: Any) -> PolicyLogprobs:
    """Return exact tokens of type-checked fields; raise an error if ids and log-probs differ in number."""
    ids, logprobs = len(fields["token_ids"]), len(fields["logprobs"])
    if ids != logprobs:
        raise protocol_error(f"choices.0.token_ids has {ids} ids, and logprobs has {logprobs}")
    return PolicyLogprobs.model_construct(**fields)


def _read_string(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _read_table(source: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the object at key `name`; an empty object if the value is missing or no object."""
    value = source.get(name)
    return value if isinstance(value, dict) else {}


# The weights on a server like vLLM are not trained by us, so all tokens have version 0.
_ONE_VERSION = ((0, 0),)


class WholeReplies:
    """Reads the exact tokens of a server like vLLM, which sends all of them in each reply.

        prompt_token_ids            at the top of the reply      (request: return_token_ids)
        token_ids                   in choices[0]                (the same)
        logprobs.content[].logprob  in choices[0]                (request: logprobs)

    Each conversation needs an object of its own, because a prompt usually begins with the ids of the last
    prompt and answer. These ids are only counted (`prompt_ids_reused`) and not recorded again.
    """

    hint = " (return_token_ids and logprobs asked for what a sample cannot be weighted without)"

    def __init__(self) -> None:
        self._ids: tuple[int, ...] = ()

    def kind(self, *, logprobs: bool) -> type[Completion[Any]]:
        return _WHOLE

    def __call__(self, reply: Completion[_WholeChoice]) -> PolicyLogprobs:
        choice, prompt = reply.choices[0], reply.prompt_token_ids
        if prompt is None:
            raise protocol_error(f"prompt_token_ids is missing{self.hint}")
        reused = count_shared(prompt, self._ids)
        tokens = _make_tokens(
            prompt_ids_reused=reused,
            prompt_token_ids=prompt[reused:],
            token_ids=choice.token_ids,
            logprobs=tuple([one.logprob for one in choice.logprobs.content]),
            finish_reason=choice.ending or "stop",
            versions=_ONE_VERSION,
        )
        self._ids = prompt + choice.token_ids
        return tokens


def count_shared(ids: Sequence[int], before: Sequence[int]) -> int:
    """Return the number of leading ids that are equal in both sequences."""
    # Usually `ids` begins with all of `before`, because a conversation only grows.
    if tuple(ids[: len(before)]) == tuple(before):
        return len(before)
    pairs = enumerate(zip(ids, before, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(ids), len(before)))
