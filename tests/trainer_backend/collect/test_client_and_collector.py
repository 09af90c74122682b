"""The client and the collector against a real server on a real port that can be told to misbehave."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from pydantic import SecretStr

from shared_schemas.rollouts import Rollout, RolloutFailure, RolloutRequest
from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.collector import Collector
from trainer_backend.errors import TaskAppError


def request_of(number: int) -> RolloutRequest:
    return RolloutRequest.model_validate(
        {
            "rollout_id": f"run/train/1/0/{number}",
            "run_id": "run",
            "group_id": "train/1/0",
            "sibling": number,
            "start": {"seed": number},
            "env": {"env_name": "crafter"},
            "policy": {"policy_name": "openai", "inference_key": "the-gateway-key"},
        }
    )


class ScriptedTaskApp:
    """Speaks the rollout routes. `fails` maps rollout ids to how often they fail before they finish."""

    def __init__(self, fails: dict[str, int] | None = None) -> None:
        self.fails = dict(fails or {})
        self.ended: list[Rollout] = []
        self.acked: list[str] = []
        self.keys: list[str | None] = []
        self.answer_first_with: list[int] = []
        self.nonsense = False

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/rollouts", self.accept)
        app.router.add_get("/rollouts", self.page)
        app.router.add_post("/rollouts/ack", self.ack)
        return app

    async def accept(self, request: web.Request) -> web.Response:
        if self.answer_first_with:
            return web.json_response({"detail": "not now"}, status=self.answer_first_with.pop(0))
        body = await request.json()
        for item in body["rollouts"]:
            self.keys.append(item["policy"]["inference_key"])
            self.ended.append(self._ended(RolloutRequest.model_validate(item)))
        ids = [item["rollout_id"] for item in body["rollouts"]]
        return web.json_response({"accepted": ids, "known": [], "instance_id": "i"}, status=202)

    def _ended(self, item: RolloutRequest) -> Rollout:
        base = item.rollout_id.partition(":")[0]
        failed = self.fails.get(base, 0) > 0
        if failed:
            self.fails[base] -= 1
        return Rollout(
            **item.model_dump(
                include={"rollout_id", "run_id", "iteration", "group_id", "sibling", "attempt"}
            ),
            instance_id="i",
            status="failed" if failed else "finished",
            failure=RolloutFailure(code="inference_unavailable", detail="gone") if failed else None,
        )

    async def page(self, request: web.Request) -> web.Response:
        if self.nonsense:
            return web.Response(text="<html>what?</html>")
        first = int(request.query.get("cursor") or 0)
        found = [json.loads(item.model_dump_json()) for item in self.ended[first : first + 3]]
        page = {"rollouts": found, "cursor": str(first + len(found)), "unfinished": 0, "instance_id": "i"}
        return web.json_response(page)

    async def ack(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.acked += body["rollout_ids"]
        return web.json_response({"acked": body["rollout_ids"], "unknown": []})


@asynccontextmanager
async def served(task_app: ScriptedTaskApp, *, timeout_s: float = 10.0) -> AsyncIterator[TaskAppClient]:
    runner = web.AppRunner(task_app.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with TaskAppClient(f"http://127.0.0.1:{port}", SecretStr("k"), timeout_s=timeout_s) as client:
            yield client
    finally:
        await runner.cleanup()


async def test_everything_comes_back_sorted_whatever_the_order_of_arrival():
    async with served(ScriptedTaskApp()) as client:
        seen: list[tuple[int, int]] = []
        found = await Collector([client], timeout_s=30).collect(
            [request_of(number) for number in (4, 0, 3, 1, 2)], lambda done, total: seen.append((done, total))
        )
    assert [rollout.sibling for rollout in found.rollouts] == [0, 1, 2, 3, 4]
    assert seen == [(number, 5) for number in range(1, 6)]


async def test_an_infrastructure_failure_is_planned_once_more_and_counted():
    task_app = ScriptedTaskApp(fails={"run/train/1/0/1": 1, "run/train/1/0/2": 9})
    async with served(task_app) as client:
        found = await Collector([client], timeout_s=30).collect([request_of(number) for number in range(3)])
    assert [rollout.rollout_id for rollout in found.rollouts] == ["run/train/1/0/0", "run/train/1/0/1:1"]
    assert [rollout.rollout_id for rollout in found.failed] == ["run/train/1/0/2:1"]
    assert found.failures == {"inference_unavailable": 3}


async def test_two_task_apps_share_the_work():
    first, second = ScriptedTaskApp(), ScriptedTaskApp()
    async with served(first) as a, served(second) as b:
        collector = Collector([a, b], timeout_s=30)
        found = await collector.collect([request_of(number) for number in range(5)])
        await collector.ack("run", found.rollouts)
    assert (len(first.ended), len(second.ended), len(found.rollouts)) == (3, 2, 5)
    assert len(first.acked) == len(second.acked) == 5


async def test_the_gateway_key_reaches_the_task_app_although_the_request_hides_it():
    task_app = ScriptedTaskApp()
    async with served(task_app) as client:
        await client.submit([request_of(0)])
    assert task_app.keys == ["the-gateway-key"]
    assert "the-gateway-key" not in repr(request_of(0)) + request_of(0).model_dump_json()


async def test_a_busy_task_app_is_asked_again():
    task_app = ScriptedTaskApp()
    task_app.answer_first_with = [503, 429]
    async with served(task_app) as client:
        await client.submit([request_of(0)])
    assert len(task_app.ended) == 1


async def test_a_refusal_is_not_asked_again_and_its_words_are_passed_on():
    task_app = ScriptedTaskApp()
    task_app.answer_first_with = [401]
    async with served(task_app) as client:
        with pytest.raises(TaskAppError, match="status 401: not now"):
            await client.submit([request_of(0)])
    assert task_app.ended == []


async def test_nonsense_is_an_error_that_names_the_address():
    task_app = ScriptedTaskApp()
    task_app.nonsense = True
    async with served(task_app) as client:
        with pytest.raises(
            TaskAppError, match=r"http://127\.0\.0\.1:\d+: GET /rollouts did not answer with JSON"
        ):
            await client.poll("run", None, wait_s=0)


async def test_a_task_app_that_is_not_there_is_an_error_and_no_hang():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: every connection is refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with TaskAppClient(url, SecretStr("k"), timeout_s=1.0) as client:
            with pytest.raises(TaskAppError, match=url):
                await client.task_info()


async def test_what_never_ends_runs_into_the_deadline_and_says_how_much_was_missing():
    class Silent(ScriptedTaskApp):
        async def page(self, request: web.Request) -> web.Response:
            await asyncio.Event().wait()
            raise AssertionError

    async with served(Silent()) as client:
        with pytest.raises(TaskAppError, match="2 of 2 rollouts were not finished within"):
            await Collector([client], timeout_s=0.3).collect([request_of(0), request_of(1)])


async def test_an_empty_plan_asks_nobody():
    client: Any = object()
    assert (await Collector([client], timeout_s=1).collect([])).rollouts == ()
    with pytest.raises(ValueError, match="at least one task app"):
        Collector([], timeout_s=1)
