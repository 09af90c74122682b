"""What the engine samples equals what a loop over plain forward calls samples, one request at a time."""

import random
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from shared_schemas.trajectory import Sampling
from tests.trainer_backend.inference.naive import (
    ask,
    assert_equal_to_naive,
    generate_all,
    naive_generation,
    staggered,
    together,
)
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.runner import CHUNK_TOKENS

StartEngine = Callable[..., LocalEngine]


def mixed_requests(count: int, vocabulary: int, seed: int = 0) -> list[tuple[list[int], Sampling]]:
    draw = random.Random(seed)
    kinds = [{}, {"temperature": 0.0}, {"temperature": 0.5}, {"top_p": 0.8}, {"top_k": 5}]
    return [
        (
            [draw.randrange(vocabulary) for _ in range(draw.choice([1, 2, 7, 33, 60, 130]))],
            Sampling(max_tokens=draw.randint(1, 8), seed=i, **kinds[i % len(kinds)]),
        )
        for i in range(count)
    ]


async def test_tokens_and_logprobs_equal_an_unbatched_loop_when_requests_join_at_different_times(
    start_engine: StartEngine, model: PreTrainedModel
):
    requests = mixed_requests(25, model.config.vocab_size)
    results = await staggered(start_engine(max_model_len=256), requests)
    assert_equal_to_naive(model, requests, results)


async def test_the_same_holds_for_prompts_that_join_together_and_are_prefilled_in_several_chunks(
    start_engine: StartEngine, model: PreTrainedModel
):
    draw, lengths = random.Random(4), [150, 600, 2, 90, 130, 1, 400, 120]
    engine = start_engine(prefill_tokens=600 * len(lengths))  # all in one turn
    assert CHUNK_TOKENS < 600, "one prompt is a chunk, the others are cut into some"
    prompts = [[draw.randrange(300) for _ in range(length)] for length in lengths]
    tasks = await together(engine, *(ask(engine, ids, seed=i, tokens=3) for i, ids in enumerate(prompts)))
    requests = [(ids, Sampling(max_tokens=3, seed=i)) for i, ids in enumerate(prompts)]
    assert_equal_to_naive(model, requests, [task.result() for task in tasks])


async def test_the_same_holds_for_grouped_query_attention_few_slots_and_prefills_that_are_cut(start_engine):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1,
    )  # fmt: skip
    llama = LlamaForCausalLM(config).eval()
    requests = mixed_requests(12, 300, seed=2)
    engine = start_engine(llama, max_running=3, prefill_tokens=64)
    assert_equal_to_naive(llama, requests, await generate_all(engine, requests))


async def test_requests_without_a_seed_differ(start_engine: StartEngine):
    engine = start_engine()
    one, other = [await ask(engine, [5, 6, 7], seed=None, tokens=16) for _ in range(2)]
    assert one.token_ids != other.token_ids


async def test_a_stop_token_ends_the_generation_and_is_its_last_token(start_engine, model):
    prompt, sampling = list(range(40, 60)), Sampling(seed=5, max_tokens=12)
    tokens, _ = naive_generation(model, prompt, sampling)
    stop = tokens[4]
    result = await ask(start_engine(stop_ids=(stop,)), prompt, seed=5, tokens=12)
    assert list(result.token_ids) == tokens[: tokens.index(stop) + 1]
    assert result.finish_reason == "stop"
