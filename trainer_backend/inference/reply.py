"""The body of a chat completion: OpenAI's fields, plus the exact tokens (see `shared_schemas.chat`)."""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer_backend.inference.protocol import Generation
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.inference.tool_parsing import ParsedReply


@dataclass(frozen=True, slots=True)
class Answer:
    """What one generation has to say, before it is put into JSON.

    `raw_text` is the sampled text as it was, for requests of a rollout; None leaves it out.
    """

    completion_id: str
    model: str
    created: int
    prompt_ids: Sequence[int]
    generation: Generation
    message: Mapping[str, Any]
    raw_text: str | None = None


def split_stop(generation: Generation, renderer: ChatRenderer) -> tuple[str, str]:
    """The sampled text, and the text of the stop token behind it ("" when none was sampled)."""
    ids = generation.token_ids
    if generation.finish_reason != "stop":
        return renderer.decode(ids), ""
    return renderer.decode(ids[:-1]), renderer.decode(ids[-1:])


def assistant_message(
    parsed: ParsedReply, *, prompt_ids: Sequence[int], token_ids: Sequence[int]
) -> dict[str, Any]:
    """The parsed text as a message; `tool_call_error` says why a call in it is only text."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.tool_calls:
        tag = _tag(prompt_ids, token_ids)
        message["content"] = parsed.content or None
        message["tool_calls"] = [
            {
                "id": f"call_{tag}_{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(parsed.tool_calls)
        ]
    if parsed.error is not None:
        message["tool_call_error"] = parsed.error
    return message


def _tag(prompt_ids: Sequence[int], token_ids: Sequence[int]) -> str:
    """Call ids come from what was sampled, not from a clock: equal rollouts have equal messages."""
    digest = hashlib.blake2b(array("q", [*prompt_ids, -1, *token_ids]).tobytes(), digest_size=6)
    return digest.hexdigest()


def completion_body(
    answer: Answer, *, prompt_ids_reused: int | None, logprobs_content: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """The reply. `prompt_ids_reused` None leaves the prompt's ids out: nobody asked for them."""
    generation, message = answer.generation, answer.message
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls" if "tool_calls" in message else generation.finish_reason,
        "sampling_finish_reason": generation.finish_reason,
        "logprobs": None if logprobs_content is None else {"content": logprobs_content, "refusal": None},
        "token_ids": generation.token_ids,
        "token_logprobs": generation.logprobs,
        "versions": generation.versions,
    }
    if answer.raw_text is not None:
        choice["raw_text"] = answer.raw_text
    body: dict[str, Any] = {
        "id": answer.completion_id,
        "object": "chat.completion",
        "created": answer.created,
        "model": answer.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(answer.prompt_ids),
            "completion_tokens": len(generation.token_ids),
            "total_tokens": len(answer.prompt_ids) + len(generation.token_ids),
        },
    }
    if prompt_ids_reused is not None:
        body["prompt_ids_reused"] = prompt_ids_reused
        body["prompt_token_ids"] = answer.prompt_ids[prompt_ids_reused:]
    return body


def openai_logprobs(generation: Generation, renderer: ChatRenderer) -> list[dict[str, Any]]:
    """OpenAI's `logprobs.content`. A token that is a part of a character has no text of its own: no bytes."""
    entries = []
    for token_id, logprob in zip(generation.token_ids, generation.logprobs, strict=True):
        token = renderer.decode([token_id])
        whole = None if "\N{REPLACEMENT CHARACTER}" in token else list(token.encode())
        entries.append({"token": token, "bytes": whole, "logprob": logprob, "top_logprobs": []})
    return entries
