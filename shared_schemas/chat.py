"""Our gateway's additions to OpenAI's chat completions: exact token ids and their log-probs.

The request header ROLLOUT_HEADER names the conversation. The reply then has the fields of
`shared_schemas.trajectory.PolicyLogprobs`, so that training uses exactly the sampled tokens:

    prompt_token_ids, prompt_ids_reused      at the top of the reply
    token_ids, token_logprobs, versions      in choices[0]
    experts                                  in choices[0], of a model whose experts are recorded
    raw_text                                 in choices[0]: all sampled text without the stop token;
                                             the message's content lacks the parsed calls

`return_token_ids: true` in the request asks for the full prompt ids (prompt_ids_reused = 0).

`processed_logprobs: true` in the request: log-probs come from the renormalised distribution after temperature
and truncation, from which the token was sampled; importance weights need these. Otherwise they come from
softmax(logits / temperature), before truncation.

`common_draws: true` in the request: the random numbers depend on the seed only, not on seed and prompt. Two
conversations with the same seeds then draw the same random numbers even if their prompts differ.

The following hold with or without ROLLOUT_HEADER:

`max_model_length` in the request is the job's own limit, below the model's. If prompt and max_tokens together
exceed the lower limit, the reply has status 400 and the code CONTEXT_LENGTH_EXCEEDED. It also has the counts
`prompt_tokens` and `max_tokens`, and the limit as `max_model_len`.

`sampling_finish_reason` in choices[0] is "stop", "length" or "abort", because OpenAI's `finish_reason` is
"tool_calls" whenever a call was parsed. If a tool call cannot be parsed, the message has the reason as
`tool_call_error` and the raw text as content. Reasoning that the model's format separates from the content is
`reasoning_content`.

A key whose value is null counts as absent (`without_nulls`). The reply's header IGNORED_HEADER lists the
request's settings that had no effect. Both rules also hold for the endpoints of captures.
"""

from enum import StrEnum
from typing import Any

ROLLOUT_HEADER = "X-Turnwise-Rollout"
IGNORED_HEADER = "X-Turnwise-Ignored"
RESPONSE_FORMAT = "response_format"
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class StructuredOutput(StrEnum):
    """What a server does if it cannot enforce a `response_format`: ignore it, or reply with status 400."""

    DROP = "drop"
    REJECT = "reject"


def openai_error(sentence: str, *, status: int, code: str, where: str | None) -> dict[str, Any]:
    """Make the `error` object of OpenAI's APIs; OpenAI's libraries choose an exception by its type and code.

    The sentence about a full context contains the code too, because LangChain looks for it there.
    """
    if code == CONTEXT_LENGTH_EXCEEDED and code not in sentence:
        sentence = f"{sentence} ({code})"
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"message": sentence, "type": kind, "param": where, "code": code}


# 424: a server that our server called did not answer.
_ERROR_TYPES = {
    401: "authentication_error",
    403: "authentication_error",
    424: "server_error",
    429: "rate_limit_error",
}

# Keys of the caller's own objects, where null is a value. An `input` that is a list holds messages instead.
_OWN_VALUES = frozenset({"arguments", "input", "chat_template_kwargs"})
_SCHEMAS = frozenset({"parameters", "input_schema", "schema"})


def without_nulls(body: Any) -> Any:
    """Remove null keys from the body of a model call; clients send null for an absent key.

    Null stays in lists and in the caller's own objects: arguments of calls, settings of a chat template, and
    a tool's schema below its first level.
    """
    if isinstance(body, list):
        return [without_nulls(item) for item in body]
    if not isinstance(body, dict):
        return body
    members = {name: value for name, value in body.items() if value is not None}
    for name, value in members.items():
        if not isinstance(value, dict) or name not in _OWN_VALUES | _SCHEMAS:
            members[name] = without_nulls(value)
        elif name in _SCHEMAS:
            members[name] = {keyword: part for keyword, part in value.items() if part is not None}
    return members
