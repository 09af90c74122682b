"""The engine by pages, a step late: the contract of the other tests, and what is scarce here.

On a CPU steps run without graphs, in the same buffers and the same order.
"""

import asyncio
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from transformers import PreTrainedModel

from shared_schemas.trajectory import Sampling
from tests.trainer_backend.inference.naive import assert_equal_to_naive, generate_all
from tests.trainer_backend.inference.test_choices import (  # noqa: F401
    test_the_engine_counts_the_mass_that_truncation_lost_and_of_no_other_token,
)
from tests.trainer_backend.inference.test_engine_exactness import (  # noqa: F401
    mixed_requests,
    test_a_stop_token_ends_the_generation_and_is_its_last_token,
    test_the_same_holds_for_grouped_query_attention_few_slots_and_prefills_that_are_cut,
    test_tokens_and_logprobs_equal_an_unbatched_loop_when_requests_join_at_different_times,
)
from tests.trainer_backend.inference.test_engine_memory import with_tight_head
from tests.trainer_backend.inference.test_engine_scheduling import (  # noqa: F401
    test_an_aborted_request_returns_what_it_has,
    test_stopping_ends_waiting_and_running_requests_with_the_reason,
)
from tests.trainer_backend.inference.test_engine_weights import (  # noqa: F401
    new_weights,
    test_between_pause_and_resume_a_swap_is_immediate_and_the_versions_tell_where,
    test_swaps_amid_traffic_lose_nothing_and_every_token_is_of_the_version_it_names,
    test_weights_that_are_not_finite_give_errors_and_leave_nothing_in_the_cache,
)
from tests.trainer_backend.inference.test_prefix_reuse import (  # noqa: F401
    test_a_conversation_goes_on_from_its_last_turn,
    test_a_late_sibling_copies_from_the_one_that_still_runs,
    test_a_pause_keeps_what_is_known_and_new_weights_make_it_worthless,
    test_a_request_that_runs_through_a_swap_is_not_copied,
    test_any_mix_of_known_and_unknown_prompts_samples_what_a_fresh_run_would,
    test_siblings_that_come_together_share_one_prefill,
)
from trainer_backend.errors import EngineOutOfMemory
from trainer_backend.inference import paged_runner, static_step
from trainer_backend.inference.actor import NO_EXTRAS, Extras
from trainer_backend.inference.batch import RunningBatch
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.inbox import Inbox
from trainer_backend.inference.page_memory import page_bytes
from trainer_backend.inference.page_tiles import Group
from trainer_backend.inference.paged_runner import PageLimits
from trainer_backend.inference.pages import PAGE, pages_for
from trainer_backend.inference.request import Request
from trainer_backend.inference.static_step import StaticStep, buckets
from trainer_backend.inference.worker import EngineWorker

StartEngine = Callable[..., LocalEngine]
TOKENS = 40  # of an answer that takes a second page


@pytest.fixture
def start_engine(start_engine: StartEngine) -> StartEngine:
    """As the other tests have it, by pages."""
    return partial(start_engine, paged=True)


def page_size(model: PreTrainedModel) -> int:
    config = model.config
    return page_bytes(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, torch.float32)


def long_requests(count: int, vocabulary: int) -> list[tuple[list[int], Sampling]]:
    draw = random.Random(3)
    prompts = [[draw.randrange(vocabulary) for _ in range(draw.randint(1, 40))] for _ in range(count)]
    return [(prompt, Sampling(max_tokens=TOKENS, seed=i)) for i, prompt in enumerate(prompts)]


async def test_without_room_the_youngest_wait_and_none_is_lost_or_samples_otherwise(
    start_engine: StartEngine, model: PreTrainedModel
):
    # rows of up to 4 pages each, and 6 pages for all
    engine = start_engine(max_model_len=4 * PAGE, cache_gib=6 * page_size(model) / 2**30)
    requests = long_requests(6, model.config.vocab_size)
    results = await generate_all(engine, requests)
    assert_equal_to_naive(model, requests, results)
    assert engine.counters.preempted > 0
    assert engine.counters.requests == 6
    assert engine.counters.sampled_tokens == 6 * TOKENS, "a token that is sampled again counts once"
    assert engine.counters.prompt_tokens == sum(len(ids) for ids, _ in requests)


async def test_one_request_of_the_greatest_length_always_fits(start_engine, model):
    engine = start_engine(max_model_len=3 * PAGE, cache_gib=1 / 2**30)
    requests = [([7] * PAGE, Sampling(max_tokens=2 * PAGE, seed=i)) for i in range(2)]
    assert_equal_to_naive(model, requests, await generate_all(engine, requests))


async def test_pages_of_ended_requests_are_free_again_but_for_kept_prefixes(start_engine, model):
    engine = start_engine(max_model_len=256, kept_prefixes=0)
    await generate_all(engine, long_requests(5, model.config.vocab_size))
    assert engine._worker.batch.cache.pool.used == 0
    keeping = start_engine(max_model_len=256, kept_prefixes=1)
    await keeping.generate(list(range(4 * PAGE)), Sampling(max_tokens=2, seed=0), request_id="a")
    # all but the last sampled token: 4 pages and one token
    assert keeping._worker.batch.cache.pool.used == 5


async def test_kept_prefixes_make_room_before_anybody_waits(start_engine, model):
    engine = start_engine(max_model_len=8 * PAGE, cache_gib=8 * page_size(model) / 2**30)
    for first in (0, 100, 200):
        prompt = list(range(first, first + 5 * PAGE))
        await engine.generate(prompt, Sampling(max_tokens=2, seed=0), request_id=str(first))
    assert engine.counters.preempted == 0
    assert len(engine._worker.batch.prefixes.copies) == 1


async def test_the_likeliest_tokens_are_those_of_the_same_step(start_engine, model):
    engine = start_engine()
    result = await engine.generate(
        [1, 2, 3], Sampling(max_tokens=6, temperature=0.0), request_id="a", extras=Extras(likeliest=2)
    )
    assert [tops[0][0] for tops in result.likeliest] == list(result.token_ids)
    assert [tops[0][1] for tops in result.likeliest] == pytest.approx(result.logprobs)


async def test_memory_is_released_and_allocated_again(start_engine: StartEngine, model: PreTrainedModel):
    engine = start_engine(max_model_len=256)
    requests = mixed_requests(6, model.config.vocab_size)
    await generate_all(engine, requests)
    await engine.release()
    memory = engine._worker.batch.cache.memory
    assert memory.slabs == []
    assert_equal_to_naive(model, requests, await generate_all(engine, requests))
    assert memory.slabs != []
    full = torch.OutOfMemoryError("out of memory")
    await engine.load_weights(1, new_weights(model, full))  # the second copy has the room of all pages
    assert memory.slabs == []
    assert_equal_to_naive(model, requests, await generate_all(engine, requests))


async def test_memory_that_is_released_under_running_requests_is_computed_again(start_engine, model):
    engine = start_engine(max_model_len=256)
    requests = long_requests(4, model.config.vocab_size)
    seen = asyncio.Event()
    extras = Extras(on_token=lambda token: seen.set())
    results = asyncio.ensure_future(generate_all(engine, requests, extras=extras))
    await seen.wait()
    await engine.release()
    assert_equal_to_naive(model, requests, await results)


async def test_where_no_graph_can_be_captured_the_log_says_it_once_and_steps_go_on(start_engine, model):
    engine = start_engine(max_model_len=256)
    engine._worker.batch._runner._static._graphs |= {False, True}  # there is no CUDA to capture one with
    requests = mixed_requests(12, model.config.vocab_size)
    with capture_logs() as lines:
        await generate_all(engine, requests[:1])  # alone, it is not truncated
        results = await generate_all(engine, requests)
    assert_equal_to_naive(model, requests, results)
    assert {line["event"] for line in lines} == {"engine_runs_without_graph"}
    assert sorted(line["truncates"] for line in lines) == [False, True], "each kind of sampling once"
    assert all("CUDA" in line["reason"] for line in lines)


async def test_a_step_is_told_which_rows_share_pages_and_groups_are_found_when_rows_change(
    model: PreTrainedModel, monkeypatch
):
    turns, launched, searches = Turns(model, kept=8), [], []
    runner = turns.batch._runner
    runner.tile_rows = 16  # as where there are kernels
    launch, search = runner._static.launch, paged_runner.group_rows
    runner._static.launch = lambda *given, groups, **more: launched.append(groups) or launch(*given, **more)
    monkeypatch.setattr(
        paged_runner, "group_rows", lambda *given, **more: searches.append(1) or search(*given, **more)
    )
    shared = list(range(100))  # 3 full pages
    requests = [turns.submit([*shared, 100], tokens=20)]
    await turns.turn(2)
    requests += [turns.submit([*shared, n], tokens=12) for n in range(101, 104)]
    await turns.turn(3)
    assert launched[0] == [] and launched[-1] == [Group([0, 1, 2, 3], 3)]
    before = len(searches)
    await turns.turn(5)
    assert launched[-1] == launched[-6] and len(searches) == before
    await turns.turn(12)
    assert launched[-1] == [], "one row is left"
    asked = [(one.prompt_ids, one.sampling) for one in requests]
    assert_equal_to_naive(model, asked, [one.future.result() for one in requests])


class FullDevice(StaticStep):
    """A step for whose first captures there is no memory; then graphs are steps without one."""

    full = 2

    def _capture(self, kind: Any, tokens_S: Tensor) -> Any:
        self._compute(kind)  # the tokens that it leaves are the wrong ones
        if self.full:
            self.full -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        self._tokens_S.copy_(tokens_S)
        return SimpleNamespace(replay=lambda: self._compute(kind))


async def test_a_graph_for_which_there_was_no_memory_is_captured_later(start_engine, model, monkeypatch):
    monkeypatch.setattr(static_step, "PATIENCE", 24)
    engine = start_engine(max_model_len=64)
    runner = engine._worker.batch._runner
    runner._static = static = FullDevice(
        runner._decoder,
        runner._memory,
        slots=engine.keys.slots,
        pages=pages_for(64),
        graphs=True,
        by_kernel=False,
    )
    request = ([1, 2, 3], Sampling(max_tokens=24, seed=0))
    with capture_logs() as lines:
        for captured in (0, 0, 1):
            sampled = await generate_all(engine, [request])
            assert len(static._captured) == captured
    assert_equal_to_naive(model, [request], sampled)
    assert [line["event"] for line in lines] == ["engine_runs_without_graph"] * 2


async def test_the_logits_of_all_steps_are_left_in_one_place(start_engine, model):
    engine = start_engine(max_model_len=256, max_running=12)
    requests = mixed_requests(12, model.config.vocab_size)
    static, places = engine._worker.batch._runner._static, set()
    for count in (1, 12):  # of one row, then of all and of ever fewer, with and without truncation
        await generate_all(engine, requests[:count])
        places.add(static.logits(1).untyped_storage().data_ptr())
    assert len(places) == 1
    assert static.logits(12).shape == (12, model.config.vocab_size)


def test_steps_are_made_for_few_numbers_of_rows():
    assert (buckets(1), buckets(3), buckets(8)) == ([1], [1, 2, 3], [1, 2, 4, 8])
    assert buckets(28) == [1, 2, 4, 8, 16, 24, 28]


class Turns:
    """An engine without a thread, turn by turn."""

    def __init__(
        self, model: PreTrainedModel, *, max_len: int = 128, pages: int | None = None, kept: int = 0
    ) -> None:
        most_bytes = None if pages is None else pages * page_size(model)
        self.inbox = Inbox(max_waiting=100)
        self.inbox.open()
        self.batch = RunningBatch(
            model, slots=8, max_len=max_len, kept_prefixes=kept, pages=PageLimits(True, most_bytes)
        )
        self.worker = EngineWorker(
            self.batch, self.inbox, stop_ids=frozenset(), prefill_tokens=2048, version=0
        )

    def submit(self, ids: list[int], *, tokens: int, extras: Extras = NO_EXTRAS) -> Request:
        loop = asyncio.get_running_loop()
        sampling = Sampling(max_tokens=tokens, seed=1)
        request = Request(str([*ids[:2], ids[-1]]), ids, sampling, loop, loop.create_future(), extras)
        self.inbox.submit(request)
        return request

    async def turn(self, times: int = 1) -> None:
        with torch.inference_mode():
            for _ in range(times):
                self.worker.turn()
        await asyncio.sleep(0)  # the outcomes


async def test_a_request_that_waited_while_nothing_fitted_takes_no_token_twice(model: PreTrainedModel):
    tight = with_tight_head(model)
    turns = Turns(tight)
    prompts = [list(range(1, 29)), list(range(40, 68))]
    older, younger = (turns.submit(prompt, tokens=12) for prompt in prompts)
    await turns.turn(2)
    tight.lm_head.most = 0
    await turns.turn()  # a step is under way, and the next one fits for nobody
    assert isinstance(older.future.exception(), EngineOutOfMemory)
    assert not turns.batch.rows and not younger.future.done()
    tight.lm_head.most = 2
    await turns.turn(13)
    expected = [(prompts[1], Sampling(max_tokens=12, seed=1))]
    assert_equal_to_naive(model, expected, [younger.future.result()])


class TightLogits:
    """A tensor's stand-in that raises as CUDA does where a copy of it does not fit."""

    def float(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


async def test_likeliest_tokens_that_do_not_fit_are_left_out_and_no_step_is_lost(model: PreTrainedModel):
    turns = Turns(model)
    prompt = list(range(1, 29))
    request = turns.submit(prompt, tokens=10, extras=Extras(likeliest=2))
    await turns.turn(3)
    static = turns.batch._runner._static
    static.logits = lambda rows: TightLogits()
    with capture_logs() as lines:
        await turns.turn()
    del static.logits
    await turns.turn(8)
    assert [line["event"] for line in lines] == ["engine_leaves_out_likeliest_tokens"]
    result = request.future.result()
    assert_equal_to_naive(model, [(prompt, Sampling(max_tokens=10, seed=1))], [result])
    assert [len(tops) for tops in result.likeliest] == [2, 2, 2, 0, 2, 2, 2, 2, 2, 2]


async def test_a_large_request_that_waits_for_room_is_not_overtaken_by_small_ones(model: PreTrainedModel):
    # rows of up to 6 pages, and 6 pages for all: the large one needs them all
    turns = Turns(model, max_len=6 * PAGE, pages=6)
    prompts = [[(7 * i + k) % 200 for i in range(20)] for k in range(20)]
    before = [turns.submit(prompt, tokens=20) for prompt in prompts[:2]]
    await turns.turn()
    large = turns.submit([3] * (5 * PAGE + 10), tokens=20)
    after = [turns.submit(prompt, tokens=20) for prompt in prompts[2:]]
    while not large.future.done():
        await turns.turn()
    assert all(request.future.done() for request in before)
    assert not any(request.future.done() or request.token_ids for request in after)
    assert turns.worker.counters.preempted == 0


async def test_a_swap_waits_for_requests_that_were_preempted(model: PreTrainedModel):
    # rows of up to 3 pages, and 3 pages for all
    turns = Turns(model, max_len=3 * PAGE, pages=3)
    older, younger = (turns.submit([k + 1] * 25, tokens=60) for k in range(2))
    await turns.turn(5)
    swap = turns.inbox.swap(lambda: turns.worker.new_version(1))
    late = turns.submit([9] * 25, tokens=2)
    await turns.turn(200)
    assert turns.worker.counters.preempted > 0 and swap.done()
    results = [request.future.result() for request in (older, younger, late)]
    assert [result.versions for result in results] == [((0, 0),), ((0, 0),), ((0, 1),)]


async def test_a_pause_lets_a_swap_through_while_a_request_is_preempted(model: PreTrainedModel):
    turns = Turns(model, max_len=3 * PAGE, pages=3)
    older, younger = (turns.submit([k + 1] * 25, tokens=60) for k in range(2))
    while not turns.worker.counters.preempted:
        await turns.turn()
    turns.worker.paused = True
    sampled = len(younger.token_ids)
    swap = turns.inbox.swap(lambda: turns.worker.new_version(1))
    await turns.turn()
    assert swap.done()
    turns.worker.paused = False
    await turns.turn(200)
    assert younger.future.result().versions == ((0, 0), (sampled, 1))
    assert [version for _, version in older.future.result().versions] == [0, 1]
