"""Models with states, windows, sinks, experts or scales: what is sampled is what one plain pass gives."""

import asyncio
import os
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    DynamicCache,
    JambaConfig,
    JambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from shared_schemas.trajectory import Sampling
from tests.tiny_families import EACH_KIND, KEYS, VOCABULARY, tiny_model
from tests.trainer_backend.inference.naive import ask, logprobs_under, running, staggered, together
from trainer_backend.errors import InferenceError, ModelFolderError
from trainer_backend.inference.actor import Generation
from trainer_backend.inference.cache import CACHE_NAME
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.layer_cache import Bounds, held_layers
from trainer_backend.inference.layer_runner import LayerRunner

StartEngine = Callable[..., LocalEngine]
EVERY_FAMILY = pytest.mark.parametrize("family", KEYS if os.getenv("TURNWISE_TEST_FAMILIES") else EACH_KIND)
# A state, of which a row cannot be cut, and windows, of which it can.
STATES = "lfm2"


def ids(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCABULARY) for _ in range(length)]


def assert_plain(model: PreTrainedModel, prompt: Sequence[int], result: Generation) -> None:
    """Its log-probs are those of one pass over prompt and answer, without a cache."""
    assert result.token_ids
    assert result.logprobs == pytest.approx(logprobs_under(model, prompt, result.token_ids), abs=1e-4)


@EVERY_FAMILY
async def test_rows_of_all_lengths_that_come_and_go_do_not_touch_each_other(start_engine, family):
    draw = random.Random(0)
    prompts = [ids(draw.choice([1, 2, 7, 33, 60, 130]), seed=i) for i in range(8)]
    requests = [(prompt, Sampling(seed=i, max_tokens=1 + 5 * i % 14)) for i, prompt in enumerate(prompts)]
    model, engine = tiny_model(family), start_engine(tiny_model(family), max_running=3)
    results = await staggered(engine, requests)
    for prompt, result in zip(prompts, results, strict=True):
        assert_plain(model, prompt, result)


@EVERY_FAMILY
async def test_a_known_prefix_a_sibling_and_an_abort_change_no_number(start_engine: StartEngine, family: str):
    engine, model, prompt = start_engine(tiny_model(family)), tiny_model(family), ids(110)
    neighbour = await running(engine, ids(40, seed=9), seed=9, tokens=120)
    siblings = await asyncio.gather(*(ask(engine, prompt, seed=i, tokens=4 + i) for i in range(3)))
    await engine.abort("running")
    assert_plain(model, ids(40, seed=9), await neighbour)
    assert sorted(result.prompt_tokens_reused for result in siblings) == [0, 109, 109]
    turn = [*prompt, *siblings[2].token_ids, *ids(7, seed=3)]
    answer = await ask(engine, turn, seed=5, tokens=20)
    assert answer.prompt_tokens_reused == 110 + 6 - 1, "all but the last token, which was never fed"
    for asked, result in (*((prompt, one) for one in siblings), (turn, answer)):
        assert_plain(model, asked, result)


@EVERY_FAMILY
async def test_new_weights_amid_an_answer_go_on_from_the_cache_that_the_old_ones_left(start_engine, family):
    engine, prompt = start_engine(tiny_model(family)), ids(30)
    old, new = tiny_model(family), tiny_model(family, seed=1)
    task = await running(engine, prompt, tokens=120)
    await engine.pause()
    await engine.load_weights(1, new.state_dict())
    await engine.resume()
    after = await ask(engine, prompt, seed=2)
    assert_plain(new, prompt, after)
    await engine.abort("running")
    result = await task
    (_, _), (switch, _) = result.versions
    assert 0 < switch < len(result.token_ids)
    # The old weights have been fed all tokens before the last one of theirs.
    fed = [*prompt, *result.token_ids[: switch - 1]]
    with torch.inference_mode():
        cache = DynamicCache(config=old.config)
        old(torch.tensor([fed]), use_cache=True, **{CACHE_NAME: cache})
        logits_BV = [
            new(torch.tensor([[token]]), use_cache=True, **{CACHE_NAME: cache}).logits[0]
            for token in result.token_ids[switch - 1 : -1]
        ]
    tokens = torch.tensor(result.token_ids[switch:])
    expected = torch.cat(logits_BV).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert result.logprobs[switch:] == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("family", [STATES, "qwen3_5_text", "gpt_oss"])
async def test_numbers_that_are_not_finite_stay_in_no_row(start_engine: StartEngine, family: str):
    engine, model = start_engine(tiny_model(family)), tiny_model(family)
    await engine.load_weights(1, {name: t * torch.nan for name, t in model.state_dict().items()})
    ends = await together(engine, *(ask(engine, ids(100), seed=i) for i in range(3)))
    assert all(isinstance(end.exception(), InferenceError) for end in ends)
    await engine.load_weights(2, model.state_dict())
    for prompt, task in zip(
        (ids(100), ids(3)), await together(engine, ask(engine, ids(100)), ask(engine, ids(3))), strict=True
    ):
        assert_plain(model, prompt, task.result())


@pytest.mark.parametrize("family", [STATES, "qwen3_5_text", "nemotron_h", "gpt_oss"])
async def test_a_step_that_runs_out_of_memory_in_its_last_layer_is_repeated_from_where_it_began(
    start_engine: StartEngine, family: str
):
    model, errors = tiny_model(family), 3

    def fail(layer: object, inputs: tuple[Tensor, ...]) -> None:
        nonlocal errors
        if inputs[0].shape[1] == 1 and errors:
            errors -= 1
            if errors % 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    engine = start_engine(model)
    model.model.layers[-1].register_forward_pre_hook(fail)
    result = await ask(engine, ids(30), tokens=8)
    assert not errors
    assert_plain(tiny_model(family), ids(30), result)


async def test_a_window_that_no_list_of_layers_names_hides_what_lies_before_it(start_engine: StartEngine):
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    served = MistralForCausalLM(
        MistralConfig(vocab_size=VOCABULARY, num_key_value_heads=2, sliding_window=16, **size)
    ).eval()
    result = await ask(start_engine(served, max_model_len=100), ids(50), tokens=8)
    assert_plain(served, ids(50), result)


# States


async def test_prompts_that_come_together_go_on_from_a_state_where_their_blocks_part(start_engine):
    engine, model, system = start_engine(tiny_model(STATES)), tiny_model(STATES), ids(110)
    prompts = [[*system, *ids(30, seed=i)] for i in range(4)]
    results = await asyncio.gather(*(ask(engine, prompt, seed=i) for i, prompt in enumerate(prompts)))
    assert sorted(result.prompt_tokens_reused for result in results) == [0, 96, 96, 96]
    assert engine.counters.prompt_tokens_recomputed == 3 * (110 - 96)
    for prompt, result in zip(prompts, results, strict=True):
        assert_plain(model, prompt, result)


async def test_a_late_sibling_leaves_the_state_that_the_next_one_goes_on_from(start_engine: StartEngine):
    engine, model, prompt = start_engine(tiny_model(STATES)), tiny_model(STATES), ids(100)
    first = await running(engine, prompt, tokens=120)
    second, third = [await ask(engine, prompt, seed=seed) for seed in (2, 3)]
    await engine.abort("running")
    await first
    assert (second.prompt_tokens_reused, third.prompt_tokens_reused) == (0, 99)
    assert engine.counters.prompt_tokens_recomputed == 99
    for result in (second, third):
        assert_plain(model, prompt, result)


async def test_a_conversation_without_its_reasoning_computes_two_turns_at_most_again(start_engine):
    engine, model = start_engine(tiny_model(STATES)), tiny_model(STATES)
    prompt, computed = ids(96), []
    for turn in range(4):
        result = await ask(engine, prompt, seed=turn, tokens=10)
        assert_plain(model, prompt, result)
        computed.append(len(prompt) - 1 - result.prompt_tokens_reused)
        prompt = [*prompt, *ids(32, seed=turn + 1)]  # none of what was sampled
    assert computed == [95, 127, 63, 63]


def test_a_model_whose_layers_read_the_cache_in_a_way_of_their_own_is_refused():
    model = tiny_model("gpt_oss")
    # As if its states were those of the row that was computed last.
    model.model.layers[1].register_forward_hook(lambda layer, given, output: output.roll(1, 0))
    with pytest.raises(ModelFolderError, match="of their size from those of each text alone"):
        LayerRunner(model, slots=2, max_len=64)


async def test_prompts_are_computed_whole_where_layers_cannot_go_on_with_several_tokens(start_engine):
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}
    config = JambaConfig(
        vocab_size=VOCABULARY, num_key_value_heads=2, num_experts=1, initializer_range=0.1, **size, **layers
    )
    model, prompt = JambaForCausalLM(config).eval(), ids(110)
    engine = start_engine(model, max_model_len=256)
    first = await ask(engine, prompt)
    turn = [*prompt, *first.token_ids, *ids(20, seed=1)]
    second = await ask(engine, turn)
    assert engine.counters.prompt_tokens_reused == 0
    assert_plain(model, prompt, first)
    assert_plain(model, turn, second)


@pytest.mark.parametrize(("family", "kind"), [("deepseek_v32", "indexed_attention")])
def test_a_layer_whose_cache_cannot_be_copied_is_refused_by_name(family: str, kind: str):
    config = AutoConfig.for_model(family, num_hidden_layers=2)
    with pytest.raises(ModelFolderError, match=f"layer 0 is {kind}"):
        held_layers(config, Bounds(1, 10, torch.float32))
