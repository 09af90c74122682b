"""Our gateway's additions to OpenAI's chat completions: exact token ids and their log-probs.

If a request names its conversation in the header ROLLOUT_HEADER, the reply also has the fields of
`shared_schemas.trajectory.PolicyLogprobs`, so that training uses exactly the sampled tokens:

    prompt_token_ids, prompt_ids_reused      at the top of the reply
    token_ids, token_logprobs, versions      in choices[0]
    experts                                  in choices[0], if the engine records which experts were used
    raw_text                                 in choices[0]: all sampled text without the stop token,
                                             including parsed tool calls (message.content excludes them)

With `return_token_ids: true` in the request, the reply has all prompt ids (prompt_ids_reused = 0).

With `processed_logprobs: true`, the log-probs are those of the distribution from which the token was sampled,
renormalised after temperature and truncation; importance weights need these. By default, the log-probs are
those of softmax(logits / temperature), before truncation.

With `common_draws: true`, the sampler's random numbers depend only on the seed, and not on seed and prompt.
Two conversations with the same seeds then draw the same random numbers even if their prompts differ.

The following holds with or without ROLLOUT_HEADER:

`max_model_length` in the request lowers the context length of the model. If prompt and max_tokens together
exceed the lowered limit, the reply has status 400 and the code CONTEXT_LENGTH_EXCEEDED. The reply then also
has the counts `prompt_tokens` and `max_tokens`, and the limit as `max_model_len`.

`sampling_finish_reason` in choices[0] tells how sampling ended: "stop", "length" or "abort". OpenAI's
`finish_reason` does not, because its value is "tool_calls" whenever a call was parsed. If a tool call cannot
be parsed, the message has the reason as `tool_call_error` and the raw text as content. Reasoning that the
model's format separates from the content is in `reasoning_content`.

A key whose value is null counts as absent (`without_nulls`). The reply's header IGNORED_HEADER lists the
request's settings that had no effect. Both rules also hold for calls of captured agents.
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
    """Return an `error` object of OpenAI's APIs, whose type and code decide which exception a client raises.

    If the context is full, the sentence also ends with the code, because LangChain looks for it there.
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

# Keys whose objects belong to the caller and may contain null. An `input` that is a list contains messages.
_OWN_VALUES = frozenset({"arguments", "input", "chat_template_kwargs"})
_SCHEMAS = frozenset({"parameters", "input_schema", "schema"})


def without_nulls(body: Any) -> Any:
    """Return the body of a model call without keys whose value is null; clients send null for an absent key.

    Null is kept in lists and in objects that belong to the caller: arguments of tool calls, settings of a
    chat template, and a tool's JSON Schema below its first level.
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
