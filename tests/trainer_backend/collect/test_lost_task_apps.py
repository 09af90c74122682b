"""Task apps that stop answering, and come back: no rollout is lost, none counts twice."""

import asyncio
from collections.abc import Sequence

import pytest
from aiohttp import web

from shared_schemas.rollouts import Rollout, RolloutRequest
from tests.trainer_backend.collect.scripted_task_app import (
    Gated,
    ScriptedTaskApp,
    ids,
    plan,
    served,
    siblings,
    wrap,
)
from trainer_backend.collect.batch import Batch
from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.dispatcher import Dispatcher
from trainer_backend.collect.wire import TaskAppLost


async def collected(clients: Sequence[TaskAppClient], requests: Sequence[RolloutRequest]) -> Batch:
    apps = wrap(clients, lost_wait_s=30)
    return await Dispatcher(apps, timeout_s=30).collect(requests)


async def test_what_a_lost_task_app_had_goes_to_the_others_under_the_same_ids():
    class Broken(ScriptedTaskApp):
        async def page(self, request: web.Request) -> web.Response:
            self.down = True
            return web.json_response({"detail": "out of order"}, status=500)

    broken, other = Broken(instance="broken"), ScriptedTaskApp(instance="other")
    async with served(broken) as a, served(other) as b:
        found = await collected([a, b], plan(0, 4))
    assert siblings(found) == [0, 1, 2, 3]
    assert [item.rollout_id for item in broken.ended] == ids(0, 2)
    assert sorted(item.rollout_id for item in other.ended) == ids(0, 1, 2, 3)
    assert {item.instance_id for item in found.rollouts} == {"other"}
    assert found.failures == {"task_app_lost": 2}
    lost, kept = (found.apps[client.url.removeprefix("http://")] for client in (a, b))
    assert (lost.finished, lost.losses, lost.outages, lost.answers) == (0, 2, 1, False)
    assert (kept.finished, kept.losses, kept.outages, kept.answers) == (4, 0, 0, True)


async def test_a_rollout_that_was_finished_on_the_lost_app_and_given_to_another_counts_once():
    class ShortlyGone(ScriptedTaskApp):
        """Its first page is lost on the way; when it answers again, it still has the results."""

        def __init__(self) -> None:
            super().__init__(instance="back")
            self.pages = 0

        async def page(self, request: web.Request) -> web.Response:
            self.pages += 1
            if self.pages == 1:
                return web.json_response({"detail": "out of order"}, status=500)
            await other.until_accepted(4)  # it is back after the other one has taken its rollouts
            return await super().page(request)

    first, other = ShortlyGone(), Gated(instance="other")
    async with served(first) as a, served(other) as b:
        collecting = asyncio.ensure_future(collected([a, b], plan(0, 4)))
        await other.until_cancelled(ids(0, 2))
        other.gate.set()
        found = await collecting
    assert siblings(found) == [0, 1, 2, 3]
    assert {item.rollout_id: item.instance_id for item in found.rollouts} == dict(
        zip(ids(0, 1, 2, 3), ["back", "other"] * 2, strict=True)
    )
    assert set(other.cancelled) == {*ids(0, 2)}  # once more changes nothing
    assert first.cancelled == []


async def test_what_another_app_has_of_a_finished_rollout_is_stopped_also_when_nothing_is_left_to_do():
    class ShortlyGone(ScriptedTaskApp):
        pages = 0

        async def page(self, request: web.Request) -> web.Response:
            self.pages += 1
            if self.pages == 1:
                return web.json_response({"detail": "out of order"}, status=500)
            await other.until_accepted(1)
            return await super().page(request)

    first, other = ShortlyGone(instance="back"), Gated(instance="other")
    async with served(first) as a, served(other) as b:
        found = await collected([a, b], plan(0, 1))
    assert [item.instance_id for item in found.rollouts] == ["back"]
    assert set(other.cancelled) == set(other.acked) == {*ids(0)}  # once more changes nothing


async def test_with_one_place_a_failed_rollout_still_goes_to_the_app_that_has_no_share():
    failing, other = ScriptedTaskApp(fails={ids(0)[0]: 1}), ScriptedTaskApp(instance="other")
    async with served(failing) as a, served(other) as b:
        found = await Dispatcher(wrap([a, b]), timeout_s=30, max_running=1).collect(plan(0, 1))
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
                return web.json_response({"detail": "out of order"}, status=500)
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
    async with served(task_app) as client:
        found = await collected([client], plan(0, 3))
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
    async with served(first) as a, served(second) as b:
        apps = wrap([a, b], lost_wait_s=30)
        found = await Dispatcher(apps, timeout_s=30, max_running=1).collect(plan(0, 3))
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

    async with served(Stopping()) as client:
        found = await collected([client], plan(0, 2))
    assert [item.rollout_id for item in found.rollouts] == [f"{name}:2" for name in ids(0, 1)]
    assert found.failures == {"cancelled": 4}


async def test_what_an_app_accepted_although_its_answer_was_lost_is_fetched_and_not_played_twice():
    class LosesItsAnswer(ScriptedTaskApp):
        async def accept(self, request: web.Request) -> web.Response:
            answer = await super().accept(request)
            is_first = len(self.ended) == 3
            return web.json_response({"detail": "out of order"}, status=500) if is_first else answer

    task_app = LosesItsAnswer()
    async with served(task_app) as client:
        await client.about()  # as at the start of a run: the process is known
        found = await collected([client], plan(0, 3))
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
    async with served(task_app) as client:
        found = await Dispatcher(wrap([client]), timeout_s=30, max_running=1).collect(plan(0, 3))
    assert siblings(found) == [0, 1, 2]
    assert [item.sibling for item in task_app.ended] == [2, 0, 1, 2]
    assert task_app.acked[0] == ids(2)[0]
