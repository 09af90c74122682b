"""The engine on a CUDA device: compiled kernels, CUDA graphs, reused prefixes, and memory that runs out."""

import asyncio
import random
from collections.abc import Iterator
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from shared_schemas.trajectory import Sampling
from tests.trainer_backend.inference.test_paged_attention import (
    PASSES,
    SHAPES,
    SHARING,
    Case,
    by,
    by_definition,
    make_tiles,
    sharing,
)
from trainer_backend.errors import EngineOutOfMemory
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.inference.page_memory import RESERVE_BYTES, free_memory
from trainer_backend.inference.paged_attention import kernels_are_here
from trainer_backend.inference.paged_pass import PrefillAttention
from trainer_backend.models import build_preset, train_tokenizer

CUDA = torch.device("cuda")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not kernels_are_here(CUDA), reason="no CUDA device with triton here"
)
ATOL = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.005}


@pytest.mark.parametrize("dtype", ATOL)
@pytest.mark.parametrize("name", SHAPES)
def test_compiled_decode_attention_is_that_of_the_definition(name: str, dtype: torch.dtype):
    case, (store, attend) = Case(**SHAPES[name], dtype=dtype, device=CUDA), by("triton")
    case.store(store, 1)
    found = case.attend(attend, 1)
    torch.testing.assert_close(found.double(), case.expected(), rtol=0, atol=ATOL[dtype])


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 32, "kv_heads": 8, "dim": 128},
        {"heads": 16, "kv_heads": 8, "dim": 128},
        {"heads": 28, "kv_heads": 4, "dim": 64},
    ],
)
def test_shapes_of_real_models_with_many_rows(sizes: dict[str, int]):
    draw = random.Random(0)
    case = Case([draw.randint(1, 3000) for _ in range(24)], dtype=torch.bfloat16, device=CUDA, **sizes)
    store, attend = by("triton")
    case.store(store, 0)
    torch.testing.assert_close(case.attend(attend, 0).double(), case.expected(), rtol=0, atol=0.02)


@pytest.mark.parametrize("dtype", ATOL)
@pytest.mark.parametrize("name", SHARING)
def test_compiled_attention_of_shared_pages_is_that_of_each_row(name: str, dtype: torch.dtype):
    case, groups = sharing(name, dtype=dtype, device=CUDA)
    store, attend = by("triton")
    case.store(store, 1)
    tiles = make_tiles(case, groups, tile_rows=4)
    shared, plain = case.attend(partial(attend, tiles=tiles), 1), case.attend(attend, 1)
    torch.testing.assert_close(shared.double(), case.expected(), rtol=0, atol=ATOL[dtype])
    torch.testing.assert_close(shared, plain, rtol=0, atol=ATOL[dtype])


async def test_rows_that_share_pages_run_as_graphs_with_exact_logprobs(
    engine: LocalEngine, model: PreTrainedModel
):
    shared = [i % 256 for i in range(100)]
    asked = [([*shared, i], Sampling(max_tokens=20, seed=i)) for i in range(8)]
    for _ in range(2):  # the second time, all find the prefix
        results = await sampled(engine, asked)
    for (ids, _), result in zip(asked, results, strict=True):
        assert_logprobs(model, ids, result)
    assert any(kind.shares for kind in engine._worker.batch._runner._static._captured)


@pytest.mark.parametrize("dtype", ATOL)
@pytest.mark.parametrize("name", PASSES)
def test_compiled_prefill_attention_is_that_of_the_definition(name: str, dtype: torch.dtype):
    starts, sizes = PASSES[name]
    case = Case([2, 70, 300], dtype=dtype, device=CUDA, **sizes)
    case.store(by("triton").store, 1)
    starts_B = np.array(starts)
    counts_B = np.array(case.lengths) - starts_B
    attention = PrefillAttention(
        case.memory, case.table_BP.numpy(), starts_B=starts_B, counts_B=counts_B, heads=case.heads,
        by_kernel=True,
    )  # fmt: skip
    q_THD = torch.randn(int(counts_B.sum()), case.heads, case.dim)
    found = attention.attend(1, q_THD.to(CUDA)).cpu().double()
    for row, (q_QHD, part_QHD) in enumerate(
        zip(q_THD.split(counts_B.tolist()), found.split(counts_B.tolist()), strict=True)
    ):
        for place in (0, len(q_QHD) // 2, len(q_QHD) - 1):
            visible = starts[row] + place + 1
            given = (q_QHD[place], case.keys[row][:visible], case.values[row][:visible])
            expected = by_definition(*(tensor.to(dtype) for tensor in given))
            torch.testing.assert_close(part_QHD[place], expected, rtol=0, atol=ATOL[dtype])


@pytest.fixture
def model() -> PreTrainedModel:
    return build_preset("tiny-0.3m", train_tokenizer(["wood stone tree"], 512), seed=1).to("cuda")


@pytest.fixture
def engine(model: PreTrainedModel) -> Iterator[LocalEngine]:
    started = LocalEngine(model, stop_ids=[], keys=EngineKeys(max_running=24))
    started.start()
    yield started
    started.stop()


def requests(count: int, tokens: int = 20) -> list[tuple[list[int], Sampling]]:
    draw = random.Random(1)
    kinds = [{}, {"temperature": 0.0}, {"temperature": 0.5}, {"top_p": 0.8}, {"top_k": 5}]
    return [
        (
            [draw.randrange(256) for _ in range(draw.choice([1, 31, 32, 33, 150]))],
            Sampling(max_tokens=tokens, seed=i, **kinds[i % len(kinds)]),
        )
        for i in range(count)
    ]


async def sampled(engine: LocalEngine, asked: list[tuple[list[int], Sampling]]):
    calls = (engine.generate(ids, sampling, request_id=str(i)) for i, (ids, sampling) in enumerate(asked))
    return list(await asyncio.gather(*calls))


def assert_logprobs(model: PreTrainedModel, ids: list[int], result) -> None:
    with torch.inference_mode():
        logits = model(torch.tensor([[*ids, *result.token_ids]], device="cuda")).logits[0, len(ids) - 1 : -1]
    chosen = torch.tensor(result.token_ids, device="cuda")[:, None]
    recomputed = logits.float().log_softmax(-1).gather(1, chosen)[:, 0].tolist()
    assert result.logprobs == pytest.approx(recomputed, abs=1e-4)


async def test_steps_run_as_graphs_with_exact_logprobs_at_every_number_of_rows(
    engine: LocalEngine, model: PreTrainedModel
):
    for rows in (1, 3, 24):
        asked = [(ids, Sampling(max_tokens=20, seed=i)) for i, (ids, _) in enumerate(requests(rows))]
        for (ids, _), result in zip(asked, await sampled(engine, asked), strict=True):
            assert_logprobs(model, ids, result)
    captured = engine._worker.batch._runner._static._captured
    assert {kind.rows for kind in captured} >= {1, 4, 24}


async def test_a_graph_samples_what_the_same_step_samples_without(
    model: PreTrainedModel, engine: LocalEngine
):
    plain = LocalEngine(deepcopy(model), stop_ids=[], keys=EngineKeys(max_running=24))
    plain._worker.batch._runner._static._graphs.clear()
    plain.start()
    asked = requests(20)
    by_graph, without = await sampled(engine, asked), await sampled(plain, asked)
    plain.stop()
    assert [one.token_ids for one in by_graph] == [one.token_ids for one in without]


async def test_new_weights_serve_in_the_graphs_that_were_captured_before(
    engine: LocalEngine, model: PreTrainedModel
):
    await sampled(engine, requests(3))
    other = build_preset("tiny-0.3m", train_tokenizer(["wood stone tree"], 512), seed=2)
    await engine.load_weights(1, other.state_dict())
    ids = list(range(40))
    (result,) = await sampled(engine, [(ids, Sampling(max_tokens=20, seed=0))])
    assert_logprobs(other.to("cuda"), ids, result)


async def test_weights_that_are_not_finite_are_an_error_in_a_graph_too(engine: LocalEngine, model):
    await sampled(engine, requests(3))
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in model.state_dict().items()}
    good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    await engine.load_weights(1, broken)
    with pytest.raises(Exception, match="not finite"):
        await sampled(engine, requests(1))
    await engine.load_weights(2, good)
    (result,) = await sampled(engine, [([1, 2, 3], Sampling(max_tokens=5, seed=0))])
    assert_logprobs(model, [1, 2, 3], result)


async def test_released_memory_is_the_devices_again_and_graphs_find_the_new_one(
    engine: LocalEngine, model: PreTrainedModel
):
    asked = [(ids, Sampling(max_tokens=20, seed=i)) for i, (ids, _) in enumerate(requests(3))]
    await sampled(engine, asked)
    used = torch.cuda.memory_reserved()
    await engine.release()
    assert torch.cuda.memory_reserved() < used
    for (ids, _), result in zip(asked, await sampled(engine, asked), strict=True):
        assert_logprobs(model, ids, result)


async def test_a_device_that_is_nearly_full_makes_requests_wait_and_loses_none(model: PreTrainedModel):
    engine = LocalEngine(model, stop_ids=[], keys=EngineKeys(max_running=24, max_model_len=256))
    # all but the reserve, so that no slab is allocated beyond what one longest request needs
    occupied = torch.empty(free_memory(CUDA) - RESERVE_BYTES, dtype=torch.uint8, device=CUDA)
    engine.start()
    results = await sampled(engine, [([i] * 10, Sampling(max_tokens=200, seed=i)) for i in range(24)])
    slabs = len(engine._worker.batch.cache.memory.slabs)
    engine.stop()
    del occupied
    torch.cuda.empty_cache()
    assert slabs == 1
    assert all(len(result.token_ids) == 200 for result in results)
    assert engine.counters.preempted > 0
    for i in (0, 23):
        assert_logprobs(model, [i] * 10, results[i])


async def test_siblings_and_turns_reuse_prefixes_and_keep_their_logprobs(
    engine: LocalEngine, model: PreTrainedModel
):
    prompt = [i % 200 for i in range(150)]
    siblings = await sampled(engine, [(prompt, Sampling(seed=i, max_tokens=20)) for i in range(8)])
    longer = [*prompt, *siblings[0].token_ids, *range(40)]
    turn = await engine.generate(longer, Sampling(seed=1, max_tokens=20), request_id="turn")
    assert sorted(result.prompt_tokens_reused for result in siblings) == [0] + [149] * 7
    assert turn.prompt_tokens_reused == 169
    for ids, result in [*((prompt, sibling) for sibling in siblings), (longer, turn)]:
        assert_logprobs(model, ids, result)


async def test_a_cache_that_the_device_cannot_hold_is_told_with_the_keys_to_lower(model: PreTrainedModel):
    # A row of the first capacity is 2 layers x 2 x 4 heads x 128 positions x 24 numbers: 200 kB.
    keys = EngineKeys().model_copy(update={"max_running": 10**8})
    engine = LocalEngine(model, stop_ids=[], keys=keys, paged=False)
    engine.start()
    with pytest.raises(EngineOutOfMemory, match="Lower max_running, max_model_len or kept_prefixes"):
        await engine.generate([1, 2, 3], Sampling(max_tokens=2), request_id="a")
    engine.stop()
