"""Serve POST /v1/completions: continue a prompt, which is a list of token ids or a text.

The prompt is not changed: this route has no chat template, tools or conversations. A run uses it to sample
from fixed policies at other gateways (docs/mixture.md).
"""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from trainer_backend.inference.actor import Extras
from trainer_backend.inference.reply import usage_body
from trainer_backend.inference.request_body import SamplingRequest
from trainer_backend.inference.served_policy import ServedPolicy, find_policy

_MOST_CHARACTERS = 8 << 20
# OpenAI's default `max_tokens` for this route.
_MAX_TOKENS = 16


class TextRequest(SamplingRequest):
    """A request with OpenAI's fields and vLLM's `return_token_ids`.

    `logprobs` = 0 requests the log-probs of the sampled tokens; other numbers are refused.
    """

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **SamplingRequest.neutral,
        "add_special_tokens": (False,),
    }

    prompt: list[Annotated[int, Field(ge=0, lt=2**31)]] | Annotated[str, Field(max_length=_MOST_CHARACTERS)]
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None  # a Literal would accept false as 0


async def text_completion(
    request: TextRequest, policies: Mapping[str, ServedPolicy], *, number: int, created: int
) -> dict[str, Any]:
    policy = find_policy(request.model, policies)
    prompt = request.prompt
    max_tokens = request.max_tokens or _MAX_TOKENS
    ids = prompt if isinstance(prompt, list) else await asyncio.to_thread(_ids, prompt, max_tokens, policy)
    generation = await policy.engine.generate(
        ids,
        request.sampling(max_tokens=max_tokens),
        request_id=f"cmpl-{number}",
        extras=Extras(processed=request.processed_logprobs, common_draws=request.common_draws),
    )
    choice: dict[str, Any] = {
        "index": 0,
        "text": policy.renderer.decode(generation.token_ids),
        "finish_reason": generation.finish_reason,
        "logprobs": None,
    }
    if request.logprobs is not None:
        tokens = [policy.renderer.decode([token]) for token in generation.token_ids]
        choice["logprobs"] = {"tokens": tokens, "token_logprobs": generation.logprobs}
    if request.return_token_ids:
        choice |= {"prompt_token_ids": ids, "token_ids": generation.token_ids}
    return {
        "id": f"cmpl-{number}",
        "object": "text_completion",
        "created": created,
        "model": request.model,
        "choices": [choice],
        "usage": usage_body(ids, [generation]),
    }


def _ids(text: str, max_tokens: int, policy: ServedPolicy) -> list[int]:
    policy.renderer.refuse_too_long(text, most=policy.engine.max_model_len, max_tokens=max_tokens)
    return policy.renderer.encode(text)
