"""Pure: read the action, the text and the exact tokens of a chat completion, also from servers like vLLM.

A model's mistakes are data: no tool call, several, unknown names, bad arguments. A server's mistakes are a
PolicyUnavailable with code `inference_protocol`: no choices, lists of different lengths, a NaN.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from shared_schemas.json_text import encodable
from shared_schemas.trajectory import PolicyLogprobs
from task_app.episode.actions import NO_TOOL_CALL, json_object
from task_app.errors import PolicyUnavailable

PROTOCOL = "inference_protocol"
WITHHELD = "the server's content filter withheld the reply or a part of it; call one of the tools"
KEY_STATUSES = frozenset({401, 403})


@dataclass(frozen=True, slots=True)
class Reply:
    """A chat completion. `tokens` is None if the server sends no token ids or log-probs.

    `logprobs` are OpenAI's, [(token as text, log-prob)], if they were asked for and sent. `reasoning_tokens`
    is the part of `completion_tokens` that is not in the message. `ignored` are settings of the request that
    our gateway left out.
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
        """How many tokens of this prompt and answer the next prompt repeats; None if unknown."""
        if self.prompt_tokens is None or self.completion_tokens is None:
            return None
        return self.prompt_tokens + max(0, self.completion_tokens - self.reasoning_tokens)


# Reads the exact tokens of a reply and its first choice; None if the server does not send them.
ReadTokens = Callable[[Mapping[str, Any], Mapping[str, Any]], PolicyLogprobs | None]


def read_reply(body: bytes, read_tokens: ReadTokens, *, logprobs: bool = False) -> Reply:
    """Read the body of a 200; `logprobs`: whether OpenAI's were asked for."""
    reply = parse_object(body)
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise protocol_error("'choices' holds no object")
    choice = choices[0]
    message = choice.get("message")
    if not isinstance(message, dict):
        raise protocol_error("choices[0].message is no object")
    usage = _table(reply, "usage")
    details, raw_text = _table(usage, "completion_tokens_details"), _string(choice.get("raw_text"))
    return Reply(
        action=_action(message, finish_reason(choice)),
        # All sampled text, if the server sends it; otherwise a reply with only a call has no text.
        text=_text(message) if raw_text is None else raw_text,
        tokens=read_tokens(reply, choice),
        finish_reason=finish_reason(choice),
        model=_string(reply.get("model")),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        reasoning_tokens=_count(details.get("reasoning_tokens")) or 0,
        logprobs=_plain_logprobs(choice) if logprobs else None,
    )


def read_count(body: bytes, path: Sequence[str]) -> int:
    """Read the number of tokens below a path of keys of the body of a 200."""
    value: Any = parse_object(body)
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    count = _count(value)
    if count is None:
        raise protocol_error(f"{'.'.join(path)} is {value!r:.80}; a number of tokens is needed")
    return count


def parse_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise protocol_error(f"the body is no JSON ({len(body)} bytes)") from exc
    if not isinstance(value, dict):
        raise protocol_error(f"the body is a JSON {type(value).__name__}, not an object")
    return value


def refusal(status: int, body: bytes, *, key: str = "") -> tuple[str, str]:
    """Code and sentence of an error reply in OpenAI's form, as problem+json, or in an unknown form.

    Servers often repeat the key that they refuse: for 401 and 403 only the code is used, and `key` is removed
    everywhere.
    """
    try:
        value = parse_object(body)
    except PolicyUnavailable:
        return "", f"status {status}"
    source = _table(value, "error") or value
    code = _without(key, _string(source.get("code")) or "")[:100]
    if status in KEY_STATUSES:
        return code, f"status {status} {code}".strip()
    sentence = _without(key, _string(source.get("detail")) or _string(source.get("message")) or "")
    return code, f"status {status} {code} {sentence[:300]}".strip()


def retry_after_s(retry_after: str | None) -> float | None:
    """The Retry-After header in seconds; None without one or for a date, since clocks may differ."""
    text = (retry_after or "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _without(key: str, text: str) -> str:
    return text.replace(key, "[key]") if key else text


def protocol_error(what: str) -> PolicyUnavailable:
    return PolicyUnavailable(f"the inference server answered nonsense: {what}", code=PROTOCOL)


def _action(message: Mapping[str, Any], finish_reason: str | None) -> dict[str, Any]:
    """The action of a message: all its calls together, or text with the reason why there is no call.

    A single call also has source 2's form: `name`, and `arguments` as an object where possible. `tool_calls`
    keeps the arguments' text, which the next prompt must repeat exactly.
    """
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        own = [_call(call, index) for index, call in enumerate(calls)]
        name, text = own[0]["name"], own[0]["arguments"]
        arguments = json_object(text)
        published = {"name": name, "arguments": text if arguments is None else arguments}
        single = published if len(own) == 1 else {}
        return {"type": "tool_call", **single, "tool_calls": own, "content": _text(message)}
    missing = WITHHELD if finish_reason == "content_filter" else NO_TOOL_CALL
    reason = _string(message.get("tool_call_error")) or missing
    return {"type": "text", "content": _text(message), "invalid_reason": reason}


def _call(call: Any, index: int) -> dict[str, str]:
    """Make a call of any value; the environment can carry it out, or refuse it with a reason."""
    source = call if isinstance(call, dict) else {}
    function = _table(source, "function")
    arguments = function.get("arguments", "")
    return {
        "id": _string(source.get("id")) or f"call_{index}",
        "name": _string(function.get("name")) or "",
        "arguments": encodable(arguments) if isinstance(arguments, str) else json.dumps(arguments),
    }


def _text(message: Mapping[str, Any]) -> str:
    """The content of a message, with its parts joined, or else its refusal."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return encodable("".join(part for part in parts if isinstance(part, str)))
    return _string(content) or _string(message.get("refusal")) or ""


def own_tokens(reply: Mapping[str, Any], choice: Mapping[str, Any]) -> PolicyLogprobs | None:
    """The exact tokens of our own gateway's reply; None if a field is missing."""
    fields = {
        "prompt_token_ids": reply.get("prompt_token_ids"),
        "token_ids": choice.get("token_ids"),
        "logprobs": choice.get("token_logprobs"),
        "versions": choice.get("versions"),
        "finish_reason": finish_reason(choice),
    }
    if any(value is None for value in fields.values()):
        return None
    return check_tokens({**fields, "prompt_ids_reused": reply.get("prompt_ids_reused") or 0})


def _plain_logprobs(choice: Mapping[str, Any]) -> list[tuple[str, float]] | None:
    """`logprobs.content` of a choice; None if absent, as in most replies with calls only."""
    content = _table(choice, "logprobs").get("content")
    if not isinstance(content, list):
        return None
    pairs = []
    for index, entry in enumerate(content):
        source = entry if isinstance(entry, dict) else {}
        token, logprob = _string(source.get("token")), source.get("logprob")
        if token is None or not isinstance(logprob, int | float) or not math.isfinite(logprob):
            raise protocol_error(f"logprobs.content.{index} is no token with a finite logprob")
        pairs.append((token, float(logprob)))
    return pairs


def check_tokens(fields: Mapping[str, Any]) -> PolicyLogprobs:
    try:
        tokens = PolicyLogprobs.model_validate(fields)
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
    """How sampling ended; our gateway reports it apart from "a call was parsed"."""
    return _string(choice.get("sampling_finish_reason")) or _string(choice.get("finish_reason"))


def _string(value: Any) -> str | None:
    return encodable(value) if isinstance(value, str) else None


def _table(source: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object below a key; empty if it is none."""
    value = source.get(name)
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


# The model of such a server is not trained, so it has one version.
_ONE_VERSION = ((0, 0),)
# Rounding may lift the log-prob of a certain token this far above 0; a higher value is a fault.
_ROUNDING = 1e-3
# vLLM sends -9999 for -inf, which JSON cannot hold. No softmax gives so little.
_IMPOSSIBLE = -1_000.0


class WholeReplies:
    """Reads the exact tokens of a server like vLLM, which sends all of them in each reply.

        prompt_token_ids            at the top of the reply      (request: return_token_ids)
        token_ids                   in choices[0]                (the same)
        logprobs.content[].logprob  in choices[0]                (request: logprobs)

    One object reads one conversation; call it with a reply and its first choice. The part of a prompt that
    repeats the last prompt and answer counts as reused, as with our gateway, so records grow only with the
    conversation.
    """

    def __init__(self) -> None:
        self._ids: tuple[int, ...] = ()

    def __call__(self, reply: Mapping[str, Any], choice: Mapping[str, Any]) -> PolicyLogprobs:
        content = _table(choice, "logprobs").get("content")
        entries = content if isinstance(content, list) else None
        fields = {
            "prompt_token_ids": reply.get("prompt_token_ids"),
            "choices[0].token_ids": choice.get("token_ids"),
            "choices[0].logprobs.content": entries,
        }
        missing = [name for name, value in fields.items() if value is None]
        if missing:
            raise protocol_error(
                f"no {missing[0]}, though return_token_ids and logprobs were asked for: samples without them "
                "cannot be weighted"
            )
        logprobs = [entry.get("logprob") if isinstance(entry, Mapping) else None for entry in entries or ()]
        whole = check_tokens(
            {
                "prompt_token_ids": fields["prompt_token_ids"],
                "token_ids": fields["choices[0].token_ids"],
                "logprobs": logprobs,
                "finish_reason": finish_reason(choice) or "stop",
                "versions": _ONE_VERSION,
            }
        )
        if max(whole.logprobs, default=0.0) > _ROUNDING:
            raise protocol_error(f"a log-prob is above 0: {max(whole.logprobs):.3g}")
        if min(whole.logprobs, default=0.0) < _IMPOSSIBLE:
            detail = "the token cannot come from the distribution of the log-probs"
            raise protocol_error(f"a log-prob of {min(whole.logprobs):g}: {detail}")
        prompt, reused = whole.prompt_token_ids, count_shared(whole.prompt_token_ids, self._ids)
        self._ids = prompt + whole.token_ids
        return whole.model_copy(update={"prompt_ids_reused": reused, "prompt_token_ids": prompt[reused:]})


def count_shared(ids: Sequence[int], before: Sequence[int]) -> int:
    """The number of equal leading ids; usually all, because a conversation only grows."""
    if tuple(ids[: len(before)]) == tuple(before):
        return len(before)
    pairs = enumerate(zip(ids, before, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(ids), len(before)))
