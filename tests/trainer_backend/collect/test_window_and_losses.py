"""How much a dispatcher asks for at a time, and what it does when a task app loses or leaves something."""

import asyncio
import json

import pytest
from aiohttp import web

from tests.trainer_backend.collect.scripted_task_app import ScriptedTaskApp, plan, served, wrap
from trainer_backend.collect.dispatcher import Dispatcher
from trainer_backend.errors import TaskAppError


class OneByOne(ScriptedTaskApp):
    """Ends one rollout for every poll, and notes how many were unfinished, and how many it held."""

    def __init__(self) -> None:
        super().__init__()
        self.delivered = 0
        self.running: list[int] = []
        self.most_held = 0

    async def page(self, request: web.Request) -> web.Response:
        self.running.append(len(self.ended) - self.delivered)
        self.most_held = max(self.most_held, len(self.ended) - len(self.acked))
        found = [json.loads(item.model_dump_json()) for item in self.ended[self.delivered :][:1]]
        self.delivered += len(found)
        left = len(self.ended) - self.delivered
        return web.json_response(
            {"rollouts": found, "cursor": str(self.delivered), "unfinished": left, "instance_id": "i"}
        )


async def test_the_window_is_full_until_nothing_is_left_to_submit():
    task_app = OneByOne()
    async with served(task_app) as client:
        found = await Dispatcher(wrap([client]), timeout_s=30, max_running=3).collect(plan(0, 7))
    assert task_app.running == [3, 3, 3, 3, 3, 2, 1]
    assert len(found.rollouts) == 7


async def test_a_stage_may_be_larger_than_what_a_task_app_holds():
    task_app = OneByOne()
    async with served(task_app) as client:
        found = await Dispatcher(wrap([client]), timeout_s=60, max_running=8).collect(plan(0, 300))
    assert len(found.rollouts) == 300
    assert task_app.most_held <= 256 + 8


async def test_the_first_attempt_of_what_was_planned_again_is_let_go():
    task_app = ScriptedTaskApp(fails={"run/train/1/0/1": 1})
    async with served(task_app) as client:
        await Dispatcher(wrap([client]), timeout_s=30).collect(plan(0, 3))
    assert task_app.acked == ["run/train/1/0/1"]


class Stuck(ScriptedTaskApp):
    """Accepts, and ends nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    async def page(self, request: web.Request) -> web.Response:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_cancelled_collection_leaves_nothing_running_and_nothing_held():
    task_app = Stuck()
    async with served(task_app) as client:
        collecting = asyncio.ensure_future(
            Dispatcher(wrap([client]), timeout_s=30, max_running=2).collect(plan(0, 5))
        )
        await task_app.asked.wait()
        collecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collecting
    submitted = [item.rollout_id for item in task_app.ended]
    assert len(submitted) == 2
    assert sorted(task_app.cancelled) == task_app.acked == submitted


async def test_an_error_of_one_task_app_ends_the_work_of_the_others():
    refusing, other = ScriptedTaskApp(), Stuck()
    refusing.answer_first_with = [401]
    async with served(refusing) as a, served(other) as b:
        with pytest.raises(TaskAppError, match="status 401"):
            await Dispatcher(wrap([a, b]), timeout_s=30).collect(plan(0, 4))
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
    async with served(Forgetful(1, restarts=restarts)) as client:
        found = await Dispatcher(wrap([client]), timeout_s=30).collect(plan(0, count))
    assert [rollout.sibling for rollout in found.rollouts] == list(range(count))


async def test_a_task_app_that_loses_everything_every_time_is_an_error_and_no_busy_loop():
    task_app = Forgetful(10**9, restarts=False)
    async with served(task_app) as client:
        with pytest.raises(TaskAppError, match="has lost 3 rollouts, twice"):
            await Dispatcher(wrap([client]), timeout_s=30).collect(plan(0, 3))
    assert task_app.polls == 2
