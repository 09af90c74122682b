"""Nobody starves, nobody is lost: waiting lines, aborts, pauses, bounds, and the end of an engine."""

import asyncio
import copy
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs
from transformers import PreTrainedModel

from shared_schemas.trajectory import Sampling
from tests.trainer_backend.inference.naive import ask, together
from trainer_backend.errors import (
    BadChatRequest,
    ContextLengthExceeded,
    EngineBusy,
    EngineStopped,
    EngineTimeout,
)
from trainer_backend.inference.actor import Generation
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.inbox import Inbox
from trainer_backend.inference.request import Request

StartEngine = Callable[..., LocalEngine]
PROMPT = [10, 11, 12, 13]


def generation(engine: LocalEngine, name: str, *, tokens: int = 3) -> "asyncio.Task[Generation]":
    sampling = Sampling(max_tokens=tokens, seed=1)
    return asyncio.ensure_future(engine.generate(PROMPT, sampling, request_id=name))


async def test_a_late_request_is_served_while_long_ones_keep_running(start_engine: StartEngine):
    engine = start_engine(max_running=4)
    long_ones = [generation(engine, f"long {i}", tokens=1000) for i in range(3)]
    await generation(engine, "late")
    assert not any(task.done() for task in long_ones)
    await asyncio.gather(*(engine.abort(f"long {i}") for i in range(3)))
    assert {(await task).finish_reason for task in long_ones} == {"abort"}


def waiting_request(name: str, length: int) -> Request:
    loop = asyncio.get_running_loop()
    return Request(name, [1] * length, Sampling(), loop, loop.create_future())


def admitted(inbox: Inbox) -> list[str]:
    newcomers = inbox.admit(free_slots=2, prefill_tokens=50, to_prefill=lambda request: request.cached)
    return [request.request_id for request in newcomers]


async def test_requests_are_admitted_in_order_and_a_big_one_is_not_overtaken():
    inbox = Inbox(max_waiting=10)
    inbox.open()
    for name, length in (("a", 11), ("big", 101), ("c", 11), ("d", 11)):
        inbox.submit(waiting_request(name, length))
    # 2 x 100 padded tokens exceed 50, but the first in line always goes; then 2 x 10 fit
    assert [admitted(inbox) for _ in range(4)] == [["a"], ["big"], ["c", "d"], []]


async def test_while_a_swap_waits_only_requests_that_have_begun_are_admitted():
    inbox = Inbox(max_waiting=10)
    inbox.open()
    first, begun = waiting_request("first", 5), waiting_request("begun", 5)
    begun.token_ids.append(7)
    inbox.submit(first)
    inbox.submit(begun)
    inbox.swap(lambda: None)
    assert inbox.holds_begun()
    assert [admitted(inbox), admitted(inbox)] == [["begun"], []]
    assert not inbox.holds_begun()
    assert len(inbox.take_swaps()) == 1
    assert admitted(inbox) == ["first"]


async def test_an_aborted_request_returns_what_it_has(start_engine: StartEngine):
    engine = start_engine(max_running=1)
    running, waiting = generation(engine, "running", tokens=2000), generation(engine, "waiting")
    await engine.pause()  # both are in the engine now, the first on its way
    assert await engine.abort("running") and await engine.abort("waiting")
    assert not await engine.abort("never seen")
    ended = await running
    assert ended.finish_reason == "abort" and len(ended.token_ids) == len(ended.logprobs) < 2000
    assert (await waiting).token_ids == ()
    await engine.resume()
    assert (await generation(engine, "running")).finish_reason == "length", "an ended id is free again"


async def test_a_cancelled_call_leaves_the_engine(start_engine: StartEngine):
    engine = start_engine(max_running=1)
    task = generation(engine, "a", tokens=2000)
    await engine.pause()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.resume()
    assert len((await generation(engine, "b")).token_ids) == 3


def test_a_caller_whose_event_loop_is_gone_does_not_harm_the_engine(start_engine: StartEngine):
    engine = start_engine(max_running=1)

    async def leave_without_waiting() -> None:
        generation(engine, "left behind", tokens=2000).add_done_callback(lambda task: task.cancelled())
        await asyncio.sleep(0)

    async def ask() -> Generation:
        return await generation(engine, "next")

    asyncio.run(leave_without_waiting())
    assert asyncio.run(ask()).finish_reason == "length"


async def test_an_id_in_use_is_refused_and_the_waiting_line_is_bounded(start_engine: StartEngine):
    engine = start_engine(max_waiting=2)
    await engine.pause()
    tasks = [generation(engine, name) for name in ("a", "b", "c")]
    with pytest.raises(EngineBusy):
        await tasks[2]
    with pytest.raises(BadChatRequest, match="'a' is in use"):
        await generation(engine, "a")
    await engine.resume()
    assert {result.finish_reason for result in await asyncio.gather(*tasks[:2])} == {"length"}


async def test_a_wait_that_runs_out_is_an_error_and_frees_the_request(start_engine: StartEngine):
    engine = start_engine()
    engine.request_timeout_s = 0.01
    await engine.pause()
    with pytest.raises(EngineTimeout, match=r"0\.01 s"):
        await generation(engine, "a")


@pytest.mark.parametrize(
    ("ids", "sampling", "says"),
    [
        ([], Sampling(), "no tokens"),
        ([1, -1], Sampling(), "must lie in"),
        ([1, 10**6], Sampling(), "must lie in"),
        ([1], Sampling(temperature=1e-9), "neither 0 nor at least"),
    ],
)
async def test_a_prompt_that_cannot_be_sampled_from_is_refused(start_engine, ids, sampling, says):
    with pytest.raises(BadChatRequest, match=says):
        await start_engine().generate(ids, sampling, request_id="a")


async def test_a_prompt_that_leaves_no_room_is_refused_with_the_counts(start_engine: StartEngine):
    engine = start_engine(max_model_len=10)
    assert len((await engine.generate([1] * 7, Sampling(max_tokens=3), request_id="fits")).token_ids) == 3
    with pytest.raises(ContextLengthExceeded, match=r"prompt of 8 tokens \+ max_tokens 3 = 11") as caught:
        await engine.generate([1] * 8, Sampling(max_tokens=3), request_id="too long")
    assert (caught.value.prompt_tokens, caught.value.max_tokens, caught.value.max_model_len) == (8, 3, 10)


async def test_an_engine_that_was_not_started_refuses(model: PreTrainedModel):
    with pytest.raises(EngineStopped, match="not started"):
        await generation(LocalEngine(model, stop_ids=[]), "a")


async def test_stopping_ends_waiting_and_running_requests_with_the_reason(start_engine: StartEngine):
    engine = start_engine(max_running=1)
    tasks = [generation(engine, str(i), tokens=2000) for i in range(2)]
    await engine.pause()
    engine.stop()
    for task in tasks:
        with pytest.raises(EngineStopped, match="it was stopped"):
            await task
    with pytest.raises(EngineStopped, match="it was stopped"):
        await engine.resume()


async def test_a_crash_of_the_thread_reaches_everyone_and_later_calls_get_its_reason(start_engine, model):
    def out_of_memory(*args: object) -> None:
        raise MemoryError("no memory left")

    broken = copy.deepcopy(model)
    broken.register_forward_pre_hook(out_of_memory)
    engine = start_engine(broken, max_running=1)
    with capture_logs():  # a traceback for people takes seconds
        tasks = await together(engine, *(ask(engine, PROMPT) for _ in range(3)))
    for task in tasks:
        with pytest.raises(EngineStopped, match="MemoryError: no memory left"):
            task.result()
    with pytest.raises(EngineStopped, match="MemoryError: no memory left"):
        await generation(engine, "later")
