"""Task apps that stop answering, lose what they have, and come back: none counts twice, none is lost."""

import asyncio

import pytest
from aiohttp import web

from shared_schemas.rollouts import Rollout, RolloutRequest
from tests.trainer_backend.collect.scripted_task_app import (
    Gated,
    ScriptedTaskApp,
    collected,
    ids,
    out_of_order,
    plan,
    served,
    siblings,
    wrap,
)
from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.dispatcher import Dispatcher
from trainer_backend.collect.wire import TaskAppLost
from trainer_backend.errors import TaskAppError


async def test_what_a_lost_task_app_had_goes_to_the_others_under_the_same_ids():
    class Broken(ScriptedTaskApp):
        async def page(self, request: web.Request) -> web.Response:
            self.down = True
            return out_of_order()

    broken, other = Broken(instance="broken"), ScriptedTaskApp(instance="other")
    found = await collected(plan(0, 4), broken, other)
    assert siblings(found) == [0, 1, 2, 3]
    assert [item.rollout_id for item in broken.ended] == ids(0, 2)
    assert sorted(item.rollout_id for item in other.ended) == ids(0, 1, 2, 3)
    assert {item.instance_id for item in found.rollouts} == {"other"}
    assert found.failures == {"task_app_lost": 2}
    lost, kept = found.apps.values()
    assert (lost.finished, lost.losses, lost.outages, lost.answers) == (0, 2, 1, False)
    assert (kept.finished, kept.losses, kept.outages, kept.answers) == (4, 0, 0, True)


@pytest.mark.parametrize("count", [4, 1])  # of one, nothing is left to do when it has counted
async def test_a_rollout_that_was_finished_on_the_lost_app_and_given_to_another_counts_once_and_stops_there(
    count: int,
):
    class ShortlyGone(ScriptedTaskApp):
        """Its first page is lost on the way; when it answers again, it still has the results."""

        is_back = False

        async def page(self, request: web.Request) -> web.Response:
            if not self.is_back:
                self.is_back = True
                return out_of_order()
            await other.until_accepted(count)  # it is back after the other one has taken its rollouts
            return await super().page(request)

    first, other = ShortlyGone(instance="back"), Gated(instance="other")
    given = ids(0, 2)[: (count + 1) // 2]
    collecting = asyncio.ensure_future(collected(plan(0, count), first, other, lost_wait_s=30))
    await other.until_cancelled(given)
    other.gate.set()
    found = await collecting
    homes = {item.rollout_id: item.instance_id for item in found.rollouts}
    assert homes == dict(zip(ids(*range(count)), ["back", "other", "back", "other"], strict=False))
    assert {*other.cancelled} == {*given} <= {*other.acked}  # once more changes nothing
    assert first.cancelled == []


async def test_with_one_place_a_failed_rollout_still_goes_to_the_app_that_has_no_share():
    failing, other = ScriptedTaskApp(fails={ids(0)[0]: 1}), ScriptedTaskApp(instance="other")
    found = await collected(plan(0, 1), failing, other, max_running=1)
    assert [(item.attempt, item.instance_id) for item in found.rollouts] == [(1, "other")]


async def test_an_app_that_is_back_stops_what_others_have_in_the_meantime_and_takes_new_work():
    class NeverSure(Gated):
        """Down from its first poll on, until its repair."""

        def __init__(self) -> None:
            super().__init__(instance="back")
            self.gate.set()
            self.repaired = asyncio.Event()

        async def page(self, request: web.Request) -> web.Response:
            if not self.repaired.is_set():
                return out_of_order()
            return await super().page(request)

        async def info(self, request: web.Request) -> web.Response:
            await self.repaired.wait()
            self.ended.clear()  # nothing of it was finished
            return await super().info(request)

    first, other = NeverSure(), Gated(instance="other")
    told: list[str] = []
    shown: list[tuple[TaskAppClient, str, str | None]] = []
    back = asyncio.Event()

    def tell(sentence: str) -> None:
        told.append(sentence)
        if sentence.startswith("task app answers"):
            back.set()

    async with served(first) as a, served(other) as b:
        apps = wrap([a, b], lost_wait_s=30, tell=tell)
        apps.watch(lambda app, state: shown.append((app, state, app.fault)))
        collecting = asyncio.ensure_future(Dispatcher(apps, timeout_s=30, max_running=4).collect(plan(0, 9)))
        await other.until_accepted(4)
        first.repaired.set()
        await back.wait()
        other.gate.set()
        found = await collecting
    assert siblings(found) == list(range(9))
    assert sorted(first.cancelled[:2]) == ids(0, 2)
    assert {item.instance_id for item in found.rollouts} == {"back", "other"}
    assert len(told) == 2
    assert "2 of its rollouts are for the others" in told[0]
    app, other_app = apps.members
    assert [(one, state) for one, state, _ in shown] == [
        (app, "serving"), (other_app, "serving"), (app, "lost"), (app, "serving"),
    ]  # fmt: skip
    assert "out of order" in str(shown[2][2])


async def test_an_app_that_was_restarted_gets_what_it_had_lost_under_the_same_ids_and_seeds():
    class Restarted(ScriptedTaskApp):
        """Another process from its first poll on: it knows nothing of what the one before accepted."""

        async def page(self, request: web.Request) -> web.Response:
            if self.instance == "first":
                self.instance = "second"
                self.before, self.ended = self.ended, []
            return await super().page(request)

    task_app = Restarted(instance="first")
    found = await collected(plan(0, 3), task_app)
    assert siblings(found) == [0, 1, 2]
    assert sorted(item.rollout_id for item in task_app.before) == ids(0, 1, 2)
    assert {item.instance_id for item in found.rollouts} == {"second"}
    assert found.failures == {"task_app_lost": 3}


async def test_when_all_are_lost_the_error_names_each_and_its_last_answer():
    first, second = ScriptedTaskApp(), ScriptedTaskApp()
    first.down = second.down = True
    async with served(first) as a, served(second) as b:
        with pytest.raises(TaskAppLost) as caught:
            await Dispatcher(wrap([a, b]), timeout_s=30).collect(plan(0, 4))
    told = str(caught.value)
    assert told.startswith("no task app answers, for 0 s (services.task_app_wait_s): ")
    for client in (a, b):
        assert f"{client.url}: POST /rollouts: status 500: out of order" in told
    assert told.endswith("4 of 4 rollouts were not finished")


async def test_when_all_are_lost_one_that_comes_back_in_time_is_enough():
    task_app = ScriptedTaskApp()
    task_app.down = True
    lost = asyncio.Event()
    async with served(task_app) as client:
        apps = wrap([client], lost_wait_s=30, tell=lambda _: lost.set())
        collecting = asyncio.ensure_future(Dispatcher(apps, timeout_s=30).collect(plan(0, 3)))
        await lost.wait()
        task_app.down = False
        assert siblings(await collecting) == [0, 1, 2]


async def test_a_rollout_that_takes_its_task_app_with_it_fails_at_the_third():
    class Poisoned(ScriptedTaskApp):
        """Loses whatever it has when rollout 1 is among it, and is another process then."""

        def __init__(self, name: str) -> None:
            super().__init__(instance=f"{name}-0")
            self.name, self.starts = name, 0

        async def page(self, request: web.Request) -> web.Response:
            if any(item.sibling == 1 for item in self.ended):
                self.starts += 1
                self.instance, self.ended = f"{self.name}-{self.starts}", []
            return await super().page(request)

    first, second = Poisoned("a"), Poisoned("b")
    found = await collected(plan(0, 3), first, second, max_running=1, lost_wait_s=30)
    assert siblings(found) == [0, 2]
    (failed,) = found.failed
    assert (failed.rollout_id, failed.failure.code) == ("run/train/1/0/1", "task_app_lost")
    assert failed.failure.detail.startswith("3 times a task app was lost with it; the last one: http://")
    assert first.starts + second.starts == 3


async def test_a_task_app_that_stops_in_order_is_no_fault_of_its_rollouts():
    class Stopping(ScriptedTaskApp):
        """Cancels each rollout twice, as one after the other of a rolling update would."""

        def _ended(self, item: RolloutRequest) -> Rollout:
            ended = super()._ended(item)
            if item.attempt > 1:
                return ended
            failure = {"code": "cancelled", "detail": "the task app stopped before it started"}
            return Rollout.model_validate({**ended.model_dump(), "status": "cancelled", "failure": failure})

    found = await collected(plan(0, 2), Stopping())
    assert [item.rollout_id for item in found.rollouts] == [f"{name}:2" for name in ids(0, 1)]
    assert found.failures == {"cancelled": 4}


async def test_what_an_app_accepted_although_its_answer_was_lost_is_fetched_and_not_played_twice():
    class LosesItsAnswer(ScriptedTaskApp):
        async def accept(self, request: web.Request) -> web.Response:
            answer = await super().accept(request)
            is_first = len(self.ended) == 3
            return out_of_order() if is_first else answer

    task_app = LosesItsAnswer()
    async with served(task_app) as client:
        await client.about()  # as at the start of a run: the process is known
        found = await Dispatcher(wrap([client], lost_wait_s=30), timeout_s=30).collect(plan(0, 3))
    assert siblings(found) == [0, 1, 2]
    assert [item.rollout_id for item in task_app.ended] == ids(0, 1, 2)


async def test_a_result_that_no_app_was_asked_for_yet_does_not_count():
    class Early(ScriptedTaskApp):
        """Still has the last rollout, of a batch that was given up."""

        async def accept(self, request: web.Request) -> web.Response:
            if not self.ended:
                self.ended.append(self._ended(plan(0, 3)[-1]))
            return await super().accept(request)

    task_app = Early()
    found = await collected(plan(0, 3), task_app, max_running=1)
    assert siblings(found) == [0, 1, 2]
    assert [item.sibling for item in task_app.ended] == [2, 0, 1, 2]
    assert task_app.acked[0] == ids(2)[0]


class OneByOne(ScriptedTaskApp):
    """Ends one rollout for every poll, and notes how many were unfinished, and how many it held."""

    def __init__(self, fails: dict[str, int] | None = None) -> None:
        super().__init__(fails)
        self.delivered = self.most_held = 0
        self.running: list[int] = []

    async def page(self, request: web.Request) -> web.Response:
        self.running.append(len(self.ended) - self.delivered)
        self.most_held = max(self.most_held, len(self.ended) - len(self.acked))
        found = self.ended[self.delivered :][:1]
        self.delivered += len(found)
        return self.page_of(found, self.delivered, len(self.ended) - self.delivered)


async def test_the_window_is_full_until_nothing_is_left_to_submit():
    task_app = OneByOne()
    found = await collected(plan(0, 7), task_app, max_running=3)
    assert task_app.running == [3, 3, 3, 3, 3, 2, 1]
    assert len(found.rollouts) == 7


async def test_of_a_stage_that_is_larger_than_what_a_task_app_holds_it_may_forget_what_is_kept():
    task_app = OneByOne({"run/train/1/0/1": 1, "run/train/1/0/2": 9})
    kept: list[str] = []

    def keep(rollout: Rollout) -> None:
        assert rollout.rollout_id not in task_app.acked
        kept.append(rollout.rollout_id)

    found = await collected(plan(0, 300), task_app, max_running=8, keep=keep)
    assert sorted(kept) == sorted(rollout.rollout_id for rollout in found.rollouts)
    assert (len(kept), len(found.failed)) == (299, 1), "what failed is not kept"
    assert task_app.most_held <= 256 + 8


async def test_a_cancelled_collection_leaves_nothing_running_and_nothing_held():
    task_app = Gated()
    async with served(task_app) as client:
        collecting = asyncio.ensure_future(
            Dispatcher(wrap([client]), timeout_s=30, max_running=2).collect(plan(0, 5))
        )
        await task_app.until_accepted(2)
        collecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collecting
    assert sorted(task_app.cancelled) == task_app.acked == ids(0, 1)


async def test_an_error_of_one_task_app_ends_the_work_of_the_others():
    refusing, other = ScriptedTaskApp(), Gated()
    refusing.answer_first_with = [401]
    with pytest.raises(TaskAppError, match="status 401"):
        await collected(plan(0, 4), refusing, other)
    assert sorted(other.cancelled) == [item.rollout_id for item in other.ended]


class Forgetful(ScriptedTaskApp):
    """Loses all that it accepts, so many times; `restarts`: it then refuses the cursors of before."""

    def __init__(self, losses: int, *, restarts: bool) -> None:
        super().__init__()
        self.losses, self.restarts, self.forgot = losses, restarts, False
        self.polls = 0

    async def page(self, request: web.Request) -> web.Response:
        self.polls += 1
        first = self.polls == 1
        if self.losses and not (first and self.restarts):
            self.losses -= 1
            self.ended.clear()
            if self.restarts and request.query.get("cursor"):
                return web.json_response({"code": "cursor_expired", "detail": "of before"}, status=409)
        return await super().page(request)


@pytest.mark.parametrize(("restarts", "count"), [(False, 3), (True, 5)])  # a first page of three came before
async def test_what_a_task_app_has_lost_is_asked_for_again(restarts: bool, count: int):
    found = await collected(plan(0, count), Forgetful(1, restarts=restarts))
    assert [rollout.sibling for rollout in found.rollouts] == list(range(count))


async def test_a_task_app_that_loses_everything_every_time_is_an_error_and_no_busy_loop():
    task_app = Forgetful(10**9, restarts=False)
    with pytest.raises(TaskAppError, match="has lost 3 rollouts, twice"):
        await collected(plan(0, 3), task_app)
    assert task_app.polls == 2
