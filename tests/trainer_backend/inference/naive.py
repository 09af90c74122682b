"""The reference: one request at a time, no cache, no batch, no padding."""

import asyncio
from collections.abc import Coroutine, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from shared_schemas.trajectory import Sampling
from trainer_backend.inference.actor import NO_EXTRAS, Extras, Generation
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.sampler import RowSettings, read_options, sample, stream_key, uniforms


def make_settings(samplings: Sequence[Sampling], *, processed: bool = False) -> RowSettings:
    """As the engine's columns have them."""
    truncated = np.array([one.is_truncated and one.temperature > 0 for one in samplings])
    options = np.array([read_options(one) for one in samplings], dtype=np.float64)
    is_processed = truncated & processed if truncated.any() else None
    return RowSettings.lean(options, is_processed, device=torch.device("cpu"))


@torch.inference_mode()
def logprobs_under(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Of tokens behind a prompt, by one plain pass."""
    logits_LV = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits_LV.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def naive_generation(
    model: PreTrainedModel, prompt: Sequence[int], sampling: Sampling, *, common_draws: bool = False
) -> tuple[list[int], list[float]]:
    """The whole sequence through the model for every token."""
    ids, tokens, logprobs = list(prompt), [], []
    settings = make_settings([sampling])
    key = np.array([stream_key(sampling.seed or 0, () if common_draws else prompt)], dtype=np.uint64)
    for i in range(sampling.max_tokens):
        with torch.inference_mode():
            logits = model(torch.tensor([ids]), use_cache=False).logits[:, -1]
        numbers = torch.from_numpy(uniforms(key, np.array([i], dtype=np.uint64)))
        token, logprob, _ = sample(logits, settings, numbers)
        ids.append(int(token))
        tokens.append(int(token))
        logprobs.append(float(logprob))
    return tokens, logprobs


_NUMBERS = count()


async def ask(
    engine: LocalEngine, prompt: Sequence[int], *, seed: int | None = 1, tokens: int = 5, name: str = ""
) -> Generation:
    sampling = Sampling(seed=seed, max_tokens=tokens)
    return await engine.generate(prompt, sampling, request_id=name or f"r{next(_NUMBERS)}")


async def running(
    engine: LocalEngine, prompt: Sequence[int], *, seed: int | None = 1, tokens: int = 800
) -> "asyncio.Task[Generation]":
    """A long request, "running", that has sampled some tokens."""
    task = asyncio.create_task(ask(engine, prompt, seed=seed, tokens=tokens, name="running"))
    await asyncio.sleep(0)  # it stands in the line before the next one
    await ask(engine, prompt[:2], tokens=3)  # when this one is done, the other has run for some steps
    return task


async def together(
    engine: LocalEngine, *calls: Coroutine[Any, Any, Generation]
) -> "list[asyncio.Task[Generation]]":
    """All of them join at the same turn, and have ended."""
    await engine.pause()
    tasks = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0)  # all stand in the line
    await engine.resume()
    await asyncio.wait(tasks)
    return tasks


async def staggered(engine: LocalEngine, requests: list[tuple[list[int], Sampling]]) -> list[Generation]:
    """Three callers, each sending its next request when the last was answered: joins at different times."""
    results: list[Generation | None] = [None] * len(requests)

    async def caller(first: int) -> None:
        for i in range(first, len(requests), 3):
            results[i] = await engine.generate(requests[i][0], requests[i][1], request_id=str(i))

    await asyncio.gather(*(caller(k) for k in range(3)))
    return [result for result in results if result is not None]


async def generate_all(
    engine: LocalEngine, requests: list[tuple[list[int], Sampling]], *, extras: Extras = NO_EXTRAS
) -> list[Generation]:
    calls = (
        engine.generate(ids, sampling, request_id=str(i), extras=extras)
        for i, (ids, sampling) in enumerate(requests)
    )
    return await asyncio.gather(*calls)


def assert_equal_to_naive(
    model: PreTrainedModel, requests: list[tuple[list[int], Sampling]], results: list[Generation]
) -> None:
    """Each token is the one that `naive_generation` draws after those before it, in one plain pass."""
    for (prompt, sampling), result in zip(requests, results, strict=True):
        tokens, count = list(result.token_ids), sampling.max_tokens
        assert (len(tokens), result.finish_reason) == (count, "length")
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[
                0, len(prompt) - 1 : -1
            ]
        keys = np.array([stream_key(sampling.seed or 0, prompt)] * count, dtype=np.uint64)
        numbers = torch.from_numpy(uniforms(keys, np.arange(count, dtype=np.uint64)))
        drawn, logprobs, _ = sample(logits, make_settings([sampling] * count), numbers)
        assert tokens == drawn.tolist()
        assert result.logprobs == pytest.approx(logprobs.tolist(), abs=1e-5)
