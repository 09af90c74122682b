"""What is reused of earlier prompts saves time and changes nothing: a fresh run samples the same."""

import random
from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from shared_schemas.trajectory import Sampling
from tests.trainer_backend.inference.naive import (
    ask,
    assert_equal_to_naive,
    generate_all,
    running,
    staggered,
    together,
)
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.models import build_preset

StartEngine = Callable[..., LocalEngine]


def make_prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(300) for _ in range(length)]


async def test_a_conversation_goes_on_from_its_last_turn(start_engine: StartEngine, model: PreTrainedModel):
    engine, prompt, expected = start_engine(max_model_len=512), make_prompt(100), 0
    requests, results = [], []
    for turn in range(6):
        sampling = Sampling(seed=turn, max_tokens=4 + turn)
        results.append(await engine.generate(prompt, sampling, request_id=str(turn)))
        requests.append((prompt, sampling))
        assert results[-1].prompt_tokens_reused == expected
        # all but the last sampled token, which was never fed
        expected = len(prompt) + len(results[-1].token_ids) - 1
        prompt = [*prompt, *results[-1].token_ids, *make_prompt(20, seed=turn + 1)]
    assert_equal_to_naive(model, requests, results)


async def test_siblings_that_come_together_share_one_prefill(start_engine, model):
    engine, prompt = start_engine(max_model_len=256), make_prompt(100)
    requests = [(prompt, Sampling(seed=i, max_tokens=6)) for i in range(8)]
    results = await generate_all(engine, requests)
    assert sorted(result.prompt_tokens_reused for result in results) == [0] + [99] * 7
    assert engine.counters.prompt_tokens == 800 and engine.counters.prompt_tokens_reused == 7 * 99
    assert_equal_to_naive(model, requests, results)


async def test_a_late_sibling_copies_from_the_one_that_still_runs(start_engine, model):
    engine, prompt = start_engine(), make_prompt(100)
    first = await running(engine, prompt)
    late = await ask(engine, prompt, seed=2)
    assert late.prompt_tokens_reused == 99 and not first.done()
    assert_equal_to_naive(model, [(prompt, Sampling(seed=2, max_tokens=5))], [late])
    await engine.abort("running")
    sampled = (await first).token_ids
    again = await ask(engine, [*prompt, *sampled, 5], seed=3)
    assert again.prompt_tokens_reused == 99 + len(sampled), "an aborted request leaves its prefix too"


@pytest.mark.parametrize("seed", range(4))
async def test_any_mix_of_known_and_unknown_prompts_samples_what_a_fresh_run_would(
    start_engine: StartEngine, model: PreTrainedModel, seed: int
):
    # Few slots, few kept prefixes and prompts from a small tree: rows move, prefixes are evicted and branch.
    draw = random.Random(seed)
    slots, kept = draw.choice([2, 5]), draw.choice([1, 3, 8])
    engine = start_engine(max_model_len=512, max_running=slots, kept_prefixes=kept, prefill_tokens=300)
    trunks = [make_prompt(draw.randint(100, 200), seed=i) for i in range(3)]
    lengths, tails = [1, 50, 96, 97, 129, 200], [0, 1, 9, 60]
    prompts = [
        [*draw.choice(trunks)[: draw.choice(lengths)], *make_prompt(draw.choice(tails), i)] for i in range(30)
    ]
    requests = [
        (prompt, Sampling(seed=draw.choice([1, 2]), max_tokens=draw.randint(1, 6))) for prompt in prompts
    ]
    results = await staggered(engine, requests)
    assert engine.counters.prompt_tokens_reused > 0
    assert_equal_to_naive(model, requests, results)


async def test_a_pause_keeps_what_is_known_and_new_weights_make_it_worthless(start_engine, tokenizer):
    engine, prompt = start_engine(), make_prompt(100)
    new = build_preset("tiny-0.3m", tokenizer, seed=2)
    await ask(engine, prompt)
    await engine.pause()
    await engine.resume()
    assert (await ask(engine, prompt)).prompt_tokens_reused == 99
    await engine.load_weights(1, new.state_dict())
    after = await ask(engine, prompt, seed=2)
    assert after.prompt_tokens_reused == 0
    assert_equal_to_naive(new, [(prompt, Sampling(seed=2, max_tokens=5))], [after])
    assert (await ask(engine, prompt, seed=3)).prompt_tokens_reused == 99


async def test_a_request_that_runs_through_a_swap_is_not_copied(start_engine, tokenizer):
    engine, prompt = start_engine(), make_prompt(100)
    new = build_preset("tiny-0.3m", tokenizer, seed=2)
    through = await running(engine, prompt)
    await engine.pause()
    await engine.load_weights(1, new.state_dict())
    await engine.resume()
    sibling = await ask(engine, prompt, seed=2)
    assert sibling.prompt_tokens_reused == 0, "the running row is of both weights"
    assert_equal_to_naive(new, [(prompt, Sampling(seed=2, max_tokens=5))], [sibling])
    await engine.abort("running")
    mixed = await through
    assert [version for _, version in mixed.versions] == [0, 1]
    continued = await ask(engine, [*prompt, *mixed.token_ids, 7], seed=3)
    assert continued.prompt_tokens_reused < 110, "only what the sibling left is known"


async def test_long_siblings_do_not_wait_for_one_anothers_prefill_budget(start_engine: StartEngine):
    # 500 tokens each, 600 a turn: computed one by one they would need a turn each.
    engine, prompt = start_engine(prefill_tokens=600), make_prompt(500)
    await together(engine, *(ask(engine, prompt, seed=i, tokens=10) for i in range(8)))
    assert engine.counters.steps == 11, "the first joins at turn 1, the seven others together at turn 2"
