"""Build the parts of a chat completion's body: OpenAI's fields, and exact tokens (`shared_schemas.chat`)."""

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer_backend.core.experts import write_experts
from trainer_backend.inference.actor import Generation, SampledToken
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.tool_formats.calls import ParsedReply

# The key of reasoning in a message, if the tool-call format separates reasoning from the content.
REASONING = "reasoning_content"
# Our own key in a message: the reason why a call in its text could not be parsed.
TOOL_CALL_ERROR = "tool_call_error"


@dataclass(frozen=True, slots=True)
class Choice:
    """One generation, and the message into which it was parsed."""

    index: int
    generation: Generation
    message: Mapping[str, Any]
    raw_text: str
    """All sampled text, including a stop string, without the stop token."""
    stop_token: str
    """The text of the stop token, or ""."""


def split_stop(generation: Generation, renderer: ChatRenderer) -> tuple[str, str]:
    """Return the sampled text without its stop token, and the text of the stop token ("" without one)."""
    ids = generation.token_ids
    if generation.finish_reason != "stop" or generation.stop_string is not None:
        return renderer.decode(ids), ""
    return renderer.decode(ids[:-1]), renderer.decode(ids[-1:])


def assistant_message(
    reply: ParsedReply, *, prompt_ids: Sequence[int], token_ids: Sequence[int]
) -> dict[str, Any]:
    """Build the message of an assistant from a parsed reply.

    A call that could not be parsed stays in the content, and `tool_call_error` contains the reason.
    """
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.tool_calls:
        # Call ids are derived from the token ids, so that equal rollouts have equal messages.
        ids = array("q", [*prompt_ids, -1, *token_ids]).tobytes()
        tag = hashlib.blake2b(ids, digest_size=6).hexdigest()
        message["content"] = reply.content or None
        message["tool_calls"] = [
            {
                "id": f"call_{tag}_{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(reply.tool_calls)
        ]
    if reply.reasoning:
        message[REASONING] = reply.reasoning
    if reply.error is not None:
        message[TOOL_CALL_ERROR] = reply.error
    return message


def choice_body(choice: Choice) -> dict[str, Any]:
    """Return the fields that describe how a choice ended, and its exact tokens."""
    generation = choice.generation
    return {
        "finish_reason": "tool_calls" if "tool_calls" in choice.message else generation.finish_reason,
        "sampling_finish_reason": generation.finish_reason,
        "token_ids": generation.token_ids,
        "token_logprobs": generation.logprobs,
        "versions": generation.versions,
    }


def rollout_body(choice: Choice, *, reused: int) -> dict[str, Any]:
    """Return the additional fields for a rollout: the raw text, and the experts if they are recorded.

    The rollout already has the first `reused` ids of the prompt, so the experts of these ids are left out.
    """
    body: dict[str, Any] = {"raw_text": choice.raw_text}
    if choice.generation.experts is not None:
        # The rollout lacks the experts of its last token: that token was sampled, but not yet computed.
        first = max(0, reused - 1)
        body["experts"] = write_experts(choice.generation.experts[first:], first)
    return body


def usage_body(prompt_ids: Sequence[int], generations: Sequence[Generation]) -> dict[str, Any]:
    """Return OpenAI's `usage`. The prompt is counted once, the sampled tokens over all choices."""
    completion_tokens = sum(len(generation.token_ids) for generation in generations)
    return {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": completion_tokens,
        "total_tokens": len(prompt_ids) + completion_tokens,
        # Later choices reuse the prompt of the first choice, so the minimum was cached before this request.
        "prompt_tokens_details": {"cached_tokens": min(g.prompt_tokens_reused for g in generations)},
    }


def logprob_entries(tokens: Iterable[SampledToken], renderer: ChatRenderer) -> list[dict[str, Any]]:
    """Return OpenAI's `logprobs.content`. The bytes of the tokens, joined, are the bytes of the text."""
    return [
        {
            **_entry(token.token_id, token.logprob, renderer),
            "top_logprobs": [_entry(token_id, logprob, renderer) for token_id, logprob in token.likeliest],
        }
        for token in tokens
    ]


def _entry(token_id: int, logprob: float, renderer: ChatRenderer) -> dict[str, Any]:
    return {"token": renderer.decode([token_id]), "bytes": renderer.token_bytes(token_id), "logprob": logprob}
