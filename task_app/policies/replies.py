"""Pure: reads a chat completion: the action, the text and the exact tokens, also from a server like vLLM.

What a model may write is data: no tool call, several, unknown names, broken arguments. What a server may
not answer is a PolicyUnavailable with code `inference_protocol`: no choices, lists that do not fit, a NaN.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from shared_schemas.chat import CONTEXT_LENGTH_EXCEEDED
from shared_schemas.json_text import encodable
from shared_schemas.trajectory import PolicyLogprobs
from task_app.episode.actions import NO_TOOL_CALL, json_object
from task_app.errors import PolicyUnavailable

PROTOCOL = "inference_protocol"
FILTERED = "the server's content filter withheld the reply or a part of it; call one of the tools"
UNAUTHORISED = frozenset({401, 403})


@dataclass(frozen=True, slots=True)
class Reply:
    """A chat completion, read. `tokens` is None where the server sends no token ids or log-probs.

    `logprobs` are OpenAI's, [(token as text, log-prob)], where they were asked for and the server sends them.
    `reasoning_tokens` are those of `completion_tokens` that are no part of the message.
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

    @property
    def kept_tokens(self) -> int | None:
        """What of prompt and answer stands in the next prompt, where that only grows; None if untold."""
        if self.prompt_tokens is None or self.completion_tokens is None:
            return None
        return self.prompt_tokens + max(0, self.completion_tokens - self.reasoning_tokens)


# Returns the exact tokens of a reply and its first choice; None if the server does not send them.
ReadTokens = Callable[[Mapping[str, Any], Mapping[str, Any]], PolicyLogprobs | None]


def read_reply(body: bytes, read_tokens: ReadTokens, *, logprobs: bool = False) -> Reply:
    """Read the body of a 200.

    Args:
        read_tokens: finds the exact tokens.
        logprobs: whether OpenAI's log-probs were asked for.
    """
    reply = parse_object(body)
    choice = _first_choice(reply)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise protocol_error("choices[0].message is no object")
    raw_usage = reply.get("usage")
    usage = raw_usage if isinstance(raw_usage, dict) else {}
    return Reply(
        action=_action(message, finish_reason(choice)),
        text=_raw_text(choice, message),
        tokens=read_tokens(reply, choice),
        finish_reason=finish_reason(choice),
        model=_string(reply.get("model")),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        reasoning_tokens=_reasoning_tokens(usage),
        logprobs=_plain_logprobs(choice) if logprobs else None,
    )


def parse_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise protocol_error(f"the body is no JSON ({len(body)} bytes)") from exc
    if not isinstance(value, dict):
        raise protocol_error(f"the body is a JSON {type(value).__name__}, not an object")
    return value


def refusal(status: int, body: bytes, *, key: str = "") -> tuple[str, str]:
    """Code and sentence of an error reply, in OpenAI's form, as problem+json, or as nothing known.

    Servers like to repeat the key that they refuse, also in part: of a 401 or 403 the code alone is kept,
    and `key` stands nowhere.
    """
    try:
        value = parse_object(body)
    except PolicyUnavailable:
        return "", f"status {status}"
    inner = value.get("error")
    source = inner if isinstance(inner, dict) else value
    code = _without(key, _string(source.get("code")) or "")[:100]
    if status in UNAUTHORISED:
        return code, f"status {status} {code}".strip()
    sentence = _without(key, _string(source.get("detail")) or _string(source.get("message")) or "")
    return code, f"status {status} {code} {sentence[:300]}".strip()


def wait_told(retry_after: str | None) -> float | None:
    """The Retry-After header in seconds; None without one, or for a date: whose clock it is, nobody knows."""
    told = (retry_after or "").strip()
    return float(told) if told.isascii() and told.isdigit() and len(told) < 10 else None


def is_context_length(code: str, sentence: str) -> bool:
    """Our gateway and OpenAI send the code; others only say it."""
    return code == CONTEXT_LENGTH_EXCEEDED or "maximum context length" in sentence.lower()


def _without(key: str, text: str) -> str:
    return text.replace(key, "[key]") if key else text


def protocol_error(what: str) -> PolicyUnavailable:
    return PolicyUnavailable(f"the inference server answered nonsense: {what}", code=PROTOCOL)


def _first_choice(reply: Mapping[str, Any]) -> dict[str, Any]:
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise protocol_error("'choices' holds no object")
    return choices[0]


def _action(message: Mapping[str, Any], finish_reason: str | None) -> dict[str, Any]:
    """All calls of a message are one action; a message without one is text with a reason.

    A single call also has source 2's form: `name` and `arguments`, an object where its text spells one.
    The text itself stays in `tool_calls`, since the next prompt has to repeat it letter for letter.
    """
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        named = [_call(call, index) for index, call in enumerate(calls)]
        return {"type": "tool_call", **_published(named), "tool_calls": named, "content": _text(message)}
    withheld = FILTERED if finish_reason == "content_filter" else NO_TOOL_CALL
    reason = _string(message.get("tool_call_error")) or withheld
    return {"type": "text", "content": _text(message), "invalid_reason": reason}


def without_missing_call(action: Mapping[str, Any]) -> dict[str, Any]:
    """The action where no tool was offered: that none was called is nothing wrong."""
    kept = action.get("invalid_reason") != NO_TOOL_CALL
    return {name: value for name, value in action.items() if kept or name != "invalid_reason"}


def _call(call: Any, index: int) -> dict[str, str]:
    """Whatever stands there becomes a call that an environment can carry out or refuse with a reason."""
    source = call if isinstance(call, dict) else {}
    raw_function = source.get("function")
    function = raw_function if isinstance(raw_function, dict) else {}
    arguments = function.get("arguments", "")
    return {
        "id": _string(source.get("id")) or f"call_{index}",
        "name": _string(function.get("name")) or "",
        "arguments": encodable(arguments) if isinstance(arguments, str) else json.dumps(arguments),
    }


def _published(calls: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    if len(calls) > 1:
        return {}
    text = calls[0]["arguments"]
    arguments = json_object(text)
    return {"name": calls[0]["name"], "arguments": text if arguments is None else arguments}


def _raw_text(choice: Mapping[str, Any], message: Mapping[str, Any]) -> str:
    """All that was sampled, where the server sends it; else a reply that is only a call has no text."""
    raw = _string(choice.get("raw_text"))
    return _text(message) if raw is None else raw


def _text(message: Mapping[str, Any]) -> str:
    """What the model wrote: its content, else its refusal. Content in parts is joined."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return encodable("".join(part for part in parts if isinstance(part, str)))
    return _string(content) or _string(message.get("refusal")) or ""


def own_tokens(reply: Mapping[str, Any], choice: Mapping[str, Any]) -> PolicyLogprobs | None:
    """Read the exact tokens that our own gateway sends; None if one of its fields is missing."""
    found = {
        "prompt_token_ids": reply.get("prompt_token_ids"),
        "token_ids": choice.get("token_ids"),
        "logprobs": choice.get("token_logprobs"),
        "versions": choice.get("versions"),
        "finish_reason": finish_reason(choice),
    }
    if any(value is None for value in found.values()):
        return None
    return checked_tokens({**found, "prompt_ids_reused": reply.get("prompt_ids_reused") or 0})


def _plain_logprobs(choice: Mapping[str, Any]) -> list[tuple[str, float]] | None:
    """Return `logprobs.content` of a choice; None if absent, as in most replies with calls only."""
    source = choice.get("logprobs")
    content = source.get("content") if isinstance(source, dict) else None
    if not isinstance(content, list):
        return None
    return [_plain_logprob(entry, index) for index, entry in enumerate(content)]


def _plain_logprob(entry: Any, index: int) -> tuple[str, float]:
    source = entry if isinstance(entry, dict) else {}
    token, logprob = _string(source.get("token")), source.get("logprob")
    if token is None or not isinstance(logprob, int | float) or not math.isfinite(logprob):
        raise protocol_error(f"logprobs.content.{index} is no token with a finite logprob")
    return token, float(logprob)


def checked_tokens(found: Mapping[str, Any]) -> PolicyLogprobs:
    try:
        tokens = PolicyLogprobs.model_validate(found)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise protocol_error(f"{place}: {first['msg']}") from exc
    if len(tokens.logprobs) != len(tokens.token_ids):
        raise protocol_error(f"{len(tokens.token_ids)} token_ids but {len(tokens.logprobs)} token_logprobs")
    if not all(map(math.isfinite, tokens.logprobs)):
        raise protocol_error("a log-prob is not finite")
    return tokens


def finish_reason(choice: Mapping[str, Any]) -> str | None:
    """How sampling ended, where the server tells that apart from "a call was parsed"."""
    return _string(choice.get("sampling_finish_reason")) or _string(choice.get("finish_reason"))


def _string(value: Any) -> str | None:
    return encodable(value) if isinstance(value, str) else None


def _reasoning_tokens(usage: Mapping[str, Any]) -> int:
    details = usage.get("completion_tokens_details")
    return (_count(details.get("reasoning_tokens")) or 0) if isinstance(details, dict) else 0


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


# Nobody trains the model of such a server, so it has one version.
_ONE_VERSION = ((0, 0),)
# What rounding may make of a certain token; anything above is a probability, or nothing at all.
_ROUNDED = 1e-3
# vLLM says -9999 where it means -inf, which JSON has no word for. No softmax makes as little as this.
_IMPOSSIBLE = -1_000.0


class WholeReplies:
    """Reads the exact tokens from a server like vLLM, which sends all of them in each reply.

        prompt_token_ids            at the top of the reply      (request: return_token_ids)
        token_ids                   in choices[0]                (the same)
        logprobs.content[].logprob  in choices[0]                (request: logprobs)

    One object reads one conversation; call it with a reply and its first choice. The part of a prompt that
    repeats the last prompt and answer counts as reused, as in replies of our own gateway. So wire and
    segments grow only with the conversation.
    """

    def __init__(self) -> None:
        self._ids: tuple[int, ...] = ()

    def __call__(self, reply: Mapping[str, Any], choice: Mapping[str, Any]) -> PolicyLogprobs:
        whole = _whole(reply, choice)
        prompt, reused = whole.prompt_token_ids, _shared(whole.prompt_token_ids, self._ids)
        self._ids = prompt + whole.token_ids
        return whole.model_copy(update={"prompt_ids_reused": reused, "prompt_token_ids": prompt[reused:]})


def _whole(reply: Mapping[str, Any], choice: Mapping[str, Any]) -> PolicyLogprobs:
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    entries = content if isinstance(content, list) else None
    found = {
        "prompt_token_ids": reply.get("prompt_token_ids"),
        "choices[0].token_ids": choice.get("token_ids"),
        "choices[0].logprobs.content": entries,
    }
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise protocol_error(
            f"no {missing[0]}, though return_token_ids and logprobs were asked for: what it samples cannot "
            "be weighted"
        )
    tokens = checked_tokens(
        {
            "prompt_token_ids": found["prompt_token_ids"],
            "token_ids": found["choices[0].token_ids"],
            "logprobs": [
                entry.get("logprob") if isinstance(entry, Mapping) else None for entry in entries or ()
            ],
            "finish_reason": finish_reason(choice) or "stop",
            "versions": _ONE_VERSION,
        }
    )
    if max(tokens.logprobs, default=0.0) > _ROUNDED:
        raise protocol_error(f"a log-prob is above 0: {max(tokens.logprobs):.3g}")
    if min(tokens.logprobs, default=0.0) < _IMPOSSIBLE:
        told = "it cannot have been drawn from what the log-probs are of"
        raise protocol_error(f"a log-prob of {min(tokens.logprobs):g}: {told}")
    return tokens


def _shared(ids: Sequence[int], before: Sequence[int]) -> int:
    """How many of the first ids are the same; a conversation only grows, as a rule."""
    if list(ids[: len(before)]) == list(before):
        return len(before)
    pairs = enumerate(zip(ids, before, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(ids), len(before)))
