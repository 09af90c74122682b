"""The exact tokens of a server that is no gateway of ours: vLLM's words for them, all of them in each reply.

prompt_token_ids            at the top of the reply      (request: return_token_ids)
token_ids                   in choices[0]                (the same)
logprobs.content[].logprob  in choices[0]                (request: logprobs)
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shared_schemas.trajectory import PolicyLogprobs
from task_app.policies.replies import checked_tokens, finish_reason, protocol_error

# Nobody trains what such a server serves; whoever does, publishes it elsewhere.
_ONE_VERSION = ((0, 0),)
# What rounding may make of a certain token; anything above is a probability, or nothing at all.
_ROUNDED = 1e-3
# vLLM says -9999 where it means -inf, which JSON has no word for. No softmax makes as little as this.
_IMPOSSIBLE = -1_000.0


class WholeReplies:
    """Reads the replies of one conversation. What a prompt shares with the last prompt and answer counts as
    reused, as a gateway of ours would say it: so wire and segments grow with the conversation alone.

    Call it with a reply and its first choice.

    Raises:
        PolicyUnavailable: token ids or log-probs are missing, or do not fit. A sample without them can be
            weighted by nothing, so it is a failure and never data.
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
