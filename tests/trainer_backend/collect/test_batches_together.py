"""Several batches of one run at the same time: each gets its own, and none ends with another."""

import asyncio

import pytest
from aiohttp import web

from shared_schemas.rollouts import Rollout
from tests.trainer_backend.collect.scripted_task_app import (
    Gated,
    ScriptedTaskApp,
    answer_to,
    ids,
    out_of_order,
    plan,
    served,
    siblings,
    wrap,
)
from trainer_backend.collect.batch import Batch
from trainer_backend.collect.dispatcher import Dispatcher
from trainer_backend.collect.wire import TaskAppLost
from trainer_backend.errors import RunNotWritten, TaskAppError


async def test_a_batch_that_begins_later_is_sent_at_once_and_one_that_is_cancelled_takes_none_along():
    task_app = Gated()
    async with served(task_app) as client:
        dispatcher = Dispatcher(wrap([client]), timeout_s=30)
        first = asyncio.ensure_future(dispatcher.collect(plan(0, 4)))
        await task_app.until_accepted(4)
        second = asyncio.ensure_future(dispatcher.collect(plan(4, 9, iteration=1)))
        await task_app.until_accepted(9)  # although the poll of before has not been answered
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await task_app.until_cancelled(ids(*range(4)))
        assert sorted(task_app.cancelled) == ids(*range(4)), "each once"
        task_app.gate.set()
        assert siblings(await second) == [4, 5, 6, 7, 8]
    assert sorted(task_app.acked) == ids(*range(4))


async def test_a_batch_goes_on_although_what_its_app_is_to_play_next_is_cancelled_before_it_is_sent():
    class Slow(Gated):
        """Answers a cancellation `later`. Its first page, rollout 0 alone, comes while one waits."""

        is_polled, is_asked, later = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def cancel(self, request: web.Request) -> web.Response:
            self.is_asked.set()
            await self.later.wait()
            return await super().cancel(request)

        async def page(self, request: web.Request) -> web.Response:
            if request.query.get("cursor"):
                return await super().page(request)
            self.is_polled.set()
            await self.is_asked.wait()
            return self.page_of(self.ended[:1], 1, unfinished=2)

    task_app, has_ended = Slow(), asyncio.Event()
    async with served(task_app) as client:
        dispatcher = Dispatcher(wrap([client]), timeout_s=30, max_running=3)
        first = asyncio.ensure_future(dispatcher.collect(plan(0, 2), lambda *_: has_ended.set()))
        second = asyncio.ensure_future(dispatcher.collect(plan(2, 3, iteration=1)))
        third = asyncio.ensure_future(dispatcher.collect(plan(3, 4, iteration=2)))
        await task_app.is_polled.wait()
        second.cancel()  # its place is for the third one, whose request waits for this cancellation
        await has_ended.wait()
        third.cancel()
        await asyncio.gather(second, third, return_exceptions=True)
        task_app.later.set()
        task_app.gate.set()
        assert siblings(await first) == [0, 1]
    assert [item.sibling for item in task_app.ended] == [0, 1, 2]


async def test_what_one_batch_cannot_keep_does_not_end_the_other():
    def full(rollout: Rollout) -> None:
        raise RunNotWritten("no space left")

    task_app = Gated()
    async with served(task_app) as client:
        dispatcher = Dispatcher(wrap([client]), timeout_s=30, max_running=6)
        kept: list[str] = []
        both = asyncio.gather(
            dispatcher.collect(plan(0, 9), keep=full),
            dispatcher.collect(
                plan(9, 20, iteration=1), keep=lambda rollout: kept.append(rollout.rollout_id)
            ),
            return_exceptions=True,
        )
        await task_app.until_accepted(6)
        task_app.gate.set()
        error, batch = await both
    assert isinstance(error, RunNotWritten)
    assert isinstance(batch, Batch)
    assert siblings(batch) == list(range(9, 20))
    assert sorted(kept) == sorted(ids(*range(9, 20)))
    # No place was given to the broken one again.
    assert {item.rollout_id for item in task_app.ended} == {*ids(*range(6)), *ids(*range(9, 20))}


async def test_a_later_batch_fills_the_places_that_the_first_one_leaves():
    task_app = Gated()
    task_app.gate.set()
    async with served(task_app) as client:
        dispatcher = Dispatcher(wrap([client]), timeout_s=30, max_running=2)
        parts = await asyncio.gather(
            dispatcher.collect(plan(0, 3, iteration=1)),
            dispatcher.collect(plan(3, 6, iteration=2)),
            dispatcher.collect(plan(6, 9, iteration=1)),
        )
    assert [siblings(part) for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    order = [item.sibling for item in task_app.ended]
    assert order == [0, 1, 2, 6, 7, 8, 3, 4, 5]


async def test_what_is_wrong_with_the_task_apps_ends_all_batches_and_not_the_next_one():
    task_app = ScriptedTaskApp()
    task_app.answer_first_with = [401]
    async with served(task_app) as client:
        dispatcher = Dispatcher(wrap([client]), timeout_s=30)

        async def both() -> list[BaseException]:
            parts = dispatcher.collect(plan(0, 3)), dispatcher.collect(plan(3, 8, iteration=1))
            return await asyncio.gather(*parts, return_exceptions=True)

        assert ["status 401: not now" in str(error) for error in await both()] == [True] * 2
        assert siblings(await dispatcher.collect(plan(8, 10))) == [8, 9]
        task_app.down = True
        errors = await both()
    assert [type(error) for error in errors] == [TaskAppLost] * 2
    assert str(errors[0]).endswith("status 500: out of order; 8 of 8 rollouts were not finished")


async def test_the_deadline_of_a_batch_begins_when_no_earlier_iteration_is_under_way():
    task_app = Gated()
    async with served(task_app) as client:
        dispatcher = Dispatcher(wrap([client]), timeout_s=1.0, max_running=1)
        later = asyncio.ensure_future(dispatcher.collect(plan(0, 2, iteration=2)))
        await task_app.until_accepted(1)
        # Begun after the other, it runs into its deadline first, since the clock of the other stands still.
        with pytest.raises(TaskAppError) as caught:
            await dispatcher.collect(plan(2, 5, iteration=1))
        assert (
            str(caught.value) == "3 of 3 rollouts were not finished within 1 s (services.iteration_timeout_s)"
        )
        task_app.gate.set()
        assert siblings(await later) == [0, 1]
    assert task_app.cancelled == []


async def test_an_acknowledgement_that_is_lost_takes_no_work_from_an_app_that_is_found_well():
    class LosesAcks(Gated):
        lost_acks = 0

        async def ack(self, request: web.Request) -> web.Response:
            if self.lost_acks:
                self.lost_acks -= 1
                return out_of_order()
            return await super().ack(request)

    task_app = LosesAcks()
    async with served(task_app) as client:
        dispatcher = Dispatcher(wrap([client]), timeout_s=30, max_running=1)
        batch = asyncio.ensure_future(dispatcher.collect(plan(0, 3)))
        await task_app.until_accepted(1)
        task_app.lost_acks = 1
        await dispatcher.ack("run", [answer_to(request) for request in plan(7, 8)])
        assert task_app.lost_acks == 0
        task_app.gate.set()
        assert siblings(await batch) == [0, 1, 2]


async def test_what_is_collected_again_right_after_its_batch_was_cancelled_is_cancelled_before_it_is_sent():
    class Slow(Gated):
        """Answers its first cancellation `later`; what is requested again counts as new."""

        is_asked, later = asyncio.Event(), asyncio.Event()

        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple[str, str]] = []

        async def accept(self, request: web.Request) -> web.Response:
            names = [item["rollout_id"] for item in (await request.json())["rollouts"]]
            self.calls += [("accept", name) for name in names]
            self.acked, self.cancelled = (
                [name for name in old if name not in names] for old in (self.acked, self.cancelled)
            )
            return await super().accept(request)

        async def cancel(self, request: web.Request) -> web.Response:
            self.is_asked.set()
            await self.later.wait()
            self.calls.append(("cancel", request.match_info["rollout_id"]))
            return await super().cancel(request)

    task_app = Slow()
    async with served(task_app) as client:
        dispatcher = Dispatcher(wrap([client]), timeout_s=30)
        other, first, last = (
            asyncio.ensure_future(dispatcher.collect(requests))
            for requests in (plan(0, 1), plan(1, 2), plan(2, 3))
        )
        await task_app.until_accepted(3)
        last.cancel()
        await task_app.is_asked.wait()
        first.cancel()  # while its task app is told of the last one
        await asyncio.gather(first, last, return_exceptions=True)
        again = asyncio.ensure_future(dispatcher.collect(plan(1, 2)))
        await asyncio.sleep(0)
        task_app.later.set()
        task_app.gate.set()
        assert [siblings(await other), siblings(await again)] == [[0], [1]]
    (name,) = ids(1)
    assert [call for call, of in task_app.calls if of == name] == ["accept", "cancel", "accept"]


async def test_a_batch_whose_last_rollout_ends_in_the_moment_of_its_deadline_is_collected():
    task_app = Gated()
    async with served(task_app) as client:
        dispatcher = Dispatcher(wrap([client]), timeout_s=30)
        collecting = asyncio.ensure_future(dispatcher.collect(plan(0, 1)))
        await task_app.until_accepted(1)
        (queue,) = dispatcher.queues
        assert queue.clock is not None
        queue.clock.reschedule(0.0)  # it has passed, and is told before the next line
        await asyncio.sleep(0)
        dispatcher.end(client, answer_to(plan(0, 1)[0]))
        assert siblings(await collecting) == [0]
