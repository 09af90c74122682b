"""Keys of ours in a request: `processed_logprobs` beside a softmax over what truncation kept, by hand, and
`common_draws` beside one request at a time."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from openai.types.chat.chat_completion import Choice
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from shared_schemas.trajectory import Sampling
from tests.trainer_backend.inference.naive import naive_generation
from tests.trainer_backend.inference.served import MESSAGES, MODEL, Served, serving
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.models import build_preset

TRUNCATED = {"top_k": 20, "top_p": 0.8, "temperature": 0.7}


@pytest.fixture(scope="module")
def served(tokenizer: PreTrainedTokenizerFast) -> Iterator[Served]:
    with serving(build_preset("tiny-0.3m", tokenizer, seed=1), tokenizer, stop_ids=()) as served:
        yield served


def asked(served: Served, **body: Any) -> tuple[Choice, list[int]]:
    """The choice and the prompt's ids."""
    more = {"return_token_ids": True, **body}
    reply = served.client.chat.completions.create(
        model=MODEL, messages=MESSAGES, seed=5, max_tokens=12, extra_body=more
    )
    return reply.choices[0], reply.prompt_token_ids


def kept_logprobs(logits: torch.Tensor, *, top_k: int, top_p: float, temperature: float) -> torch.Tensor:
    """[V] log-probs over the top_k likeliest, then over the fewest of them that hold top_p of that mass."""
    probs = (logits.double() / temperature).softmax(dim=-1)
    order = probs.argsort(descending=True)[:top_k]
    shares = probs[order] / probs[order].sum()
    count = int((shares.cumsum(0) - shares < top_p).sum())
    result = torch.full_like(probs, -torch.inf)
    result[order[:count]] = (shares[:count] / shares[:count].sum()).log()
    return result


@torch.inference_mode()
def test_they_are_those_of_the_softmax_over_what_truncation_kept(served: Served, model: PreTrainedModel):
    choice, prompt = asked(served, processed_logprobs=True, **TRUNCATED)
    ids = torch.tensor([[*prompt, *choice.token_ids]])
    rows = model(ids).logits[0, len(prompt) - 1 : -1]
    expected = [
        float(kept_logprobs(row, **TRUNCATED)[token])
        for row, token in zip(rows, choice.token_ids, strict=True)
    ]
    assert choice.token_logprobs == pytest.approx(expected, abs=1e-4)
    plain, _ = asked(served, **TRUNCATED)
    assert plain.token_ids == choice.token_ids, "only what is told differs, never what is drawn"
    lost = [a - b for a, b in zip(choice.token_logprobs, plain.token_logprobs, strict=True)]
    assert min(lost) > 0.01, "each token was likelier among those that were kept"


async def test_the_engine_counts_the_mass_that_truncation_lost_and_of_no_other_token(
    start_engine: Callable[..., LocalEngine], model: PreTrainedModel
):
    engine, prompt = start_engine(), [10, 11, 12, 13]
    samplings = [TRUNCATED, {}, {"temperature": 0.0, "top_k": 3}]
    truncated, *_ = await asyncio.gather(
        *(
            engine.generate(prompt, Sampling(seed=3, max_tokens=12, **options), request_id=str(options))
            for options in samplings
        )
    )
    with torch.inference_mode():
        rows = model(torch.tensor([[*prompt, *truncated.token_ids]])).logits[0, len(prompt) - 1 : -1]
    probs = (rows.double() / TRUNCATED["temperature"]).softmax(dim=-1)
    kept = torch.stack([kept_logprobs(row, **TRUNCATED).isfinite() for row in rows])
    assert engine.counters.truncated_tokens == 12
    assert engine.counters.lost_mass == pytest.approx(float((probs * ~kept).sum()), abs=1e-4)
    assert engine.counters.lost_mass > 1.0


def test_without_truncation_both_are_the_same_to_the_last_bit(served: Served):
    both = [asked(served, processed_logprobs=flag)[0].token_logprobs for flag in (False, True)]
    assert both[0] == both[1]


@pytest.mark.parametrize("common", [False, True])
def test_common_draws_follow_from_the_seed_and_not_from_the_prompt(
    served: Served, model: PreTrainedModel, common: bool
):
    choice, prompt = asked(served, common_draws=common)
    sampling = Sampling(seed=5, max_tokens=12)
    assert choice.token_ids == naive_generation(model, prompt, sampling, common_draws=common)[0]
    text = served.client.completions.create(
        model=MODEL, prompt=[7, 8, 9], seed=5, max_tokens=12,
        extra_body={"return_token_ids": True, "common_draws": common},
    )  # fmt: skip
    expected, _ = naive_generation(model, [7, 8, 9], sampling, common_draws=common)
    assert text.choices[0].token_ids == expected
