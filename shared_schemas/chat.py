"""Our gateway's additions to the OpenAI chat-completions wire: exact token ids and their log-probs.

The request header ROLLOUT_HEADER names the conversation. The reply then carries the fields of
`shared_schemas.trajectory.PolicyLogprobs`, so that training uses exactly the sampled tokens:

    prompt_token_ids, prompt_ids_reused      at the top of the reply
    token_ids, token_logprobs, versions      in choices[0]
    experts                                  in choices[0], of a model whose experts are recorded
    raw_text                                 in choices[0]: all sampled text without the stop token;
                                             the message's content lacks the parsed calls

`return_token_ids: true` in the request asks for the full prompt ids (prompt_ids_reused = 0).

`processed_logprobs: true` in the request: log-probs are those of the distribution that the token was sampled
from, after temperature and truncation, renormalised; otherwise those of softmax(logits / temperature),
before any truncation. Importance weights need the former.

`common_draws: true` in the request: the sampled tokens follow from its seed alone, not from seed and prompt.
Two conversations with the same seeds then draw the same random numbers, however much their prompts differ.

`max_model_length` in the request, with or without the header: the job's own limit, below the model's. If
prompt and max_tokens together exceed the lower limit, the reply is a 400 with CONTEXT_LENGTH_EXCEEDED, the
counts `prompt_tokens` and `max_tokens`, and the limit as `max_model_len`.

With or without the header: `sampling_finish_reason` in choices[0] tells how sampling ended ("stop", "length"
or "abort"), since OpenAI's `finish_reason` is "tool_calls" whenever a call was parsed. If a tool call in the
text cannot be parsed, the message has the reason as `tool_call_error` and the raw text as content. Reasoning
that a model's format sets apart from the content is `reasoning_content`.

A key whose value is null counts as absent (`without_nulls`), here and at the endpoints of captures. Both
name the settings of a request that they leave out in the header IGNORED_HEADER of the reply.
"""

from enum import StrEnum
from typing import Any

ROLLOUT_HEADER = "X-Turnwise-Rollout"
IGNORED_HEADER = "X-Turnwise-Ignored"
RESPONSE_FORMAT = "response_format"
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class StructuredOutput(StrEnum):
    """What becomes of a `response_format` where nothing enforces it: it has no effect, or is a 400."""

    DROP = "drop"
    REJECT = "reject"


def openai_error(sentence: str, *, status: int, code: str, where: str | None) -> dict[str, Any]:
    """Return the `error` object of OpenAI's APIs, by whose type and code its libraries tell errors apart.

    A full context has its code in the sentence too, where LangChain looks for it.
    """
    if code == CONTEXT_LENGTH_EXCEEDED and code not in sentence:
        sentence = f"{sentence} ({code})"
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"message": sentence, "type": kind, "param": where, "code": code}


# 424: a server behind ours gave no answer.
_ERROR_TYPES = {
    401: "authentication_error",
    403: "authentication_error",
    424: "server_error",
    429: "rate_limit_error",
}

# Objects of the caller's own, in which null is a value. An `input` that is a list holds messages instead.
_OWN_VALUES = frozenset({"arguments", "input", "chat_template_kwargs"})
_SCHEMAS = frozenset({"parameters", "input_schema", "schema"})


def without_nulls(body: Any) -> Any:
    """Return the body of a model call without the keys that are null, which clients send for absent ones.

    Elements of lists stay, and so does null in what is the caller's own: arguments of calls, settings of a
    chat template, and a tool's schema below its first level.
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
