"""A task app's rollout routes on a real port, that can be told to misbehave."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import MappingProxyType
from typing import Any

from aiohttp import web
from pydantic import SecretStr

from shared_schemas.rollouts import Rollout, RolloutFailure, RolloutRequest, RolloutStatus
from shared_schemas.trajectory import StopReason, Trajectory
from trainer_backend.collect.apps import TaskApps
from trainer_backend.collect.batch import Batch
from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.dispatcher import Dispatcher

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_request(number: int, *, group: int = 0) -> RolloutRequest:
    return RolloutRequest.model_validate(
        {
            "rollout_id": f"run/train/1/0/{number}",
            "run_id": "run",
            "group_id": f"train/1/{group}",
            "sibling": number,
            "start": {"seed": number},
            "env": {"env_name": "crafter"},
            "policy": {"policy_name": "openai", "inference_key": "the-gateway-key"},
        }
    )


def plan(first: int, end: int, *, iteration: int = 0) -> list[RolloutRequest]:
    """A group each, so that they are dealt out in turn."""
    requests = [make_request(number, group=number) for number in range(first, end)]
    return [request.model_copy(update={"iteration": iteration}) for request in requests]


def ids(*numbers: int) -> list[str]:
    return [f"run/train/1/0/{number}" for number in numbers]


def siblings(batch: Batch) -> list[int]:
    return sorted(rollout.sibling for rollout in batch.rollouts)


def answer_to(
    request: RolloutRequest, *, status: RolloutStatus = "finished", instance: str = "i", **changes: Any
) -> Rollout:
    """What a task app sends for this request: an episode without a decision, or a failure.

    `changes` are of the episode.
    """
    start = request.start
    episode = Trajectory(
        env_name=request.env.env_name, policy_name="openai", seed=start.seed or 0, steps=(),
        parent_rollout_id=start.parent_rollout_id, parent_turn=start.parent_turn, outcome_reward=0.0,
        outcome_definition="none", env_steps=0, terminated=True, truncated=False,
        stop_reason=StopReason.ENVIRONMENT_DONE, wall_s=0.0,
    )  # fmt: skip
    is_finished = status == "finished"
    return Rollout(
        **request.model_dump(include={"rollout_id", "run_id", "iteration", "group_id", "sibling", "attempt"}),
        instance_id=instance,
        status=status,
        trajectory=episode.model_copy(update=changes) if is_finished else None,
        failure=None if is_finished else RolloutFailure(code="inference_unavailable", detail="gone"),
    )


class ScriptedTaskApp:
    """Speaks the rollout routes. `fails` says how often rollout ids fail before they finish; while it is
    `down`, every answer is an error of its own."""

    max_body_bytes = 1 << 20
    forgets = False

    def __init__(self, fails: dict[str, int] | None = None, *, instance: str = "i") -> None:
        self.instance = instance
        self.down = False
        self.fails = dict(fails or {})
        self.ended: list[Rollout] = []
        self.acked: list[str] = []
        self.cancelled: list[str] = []
        self.answer_first_with: list[int] = []

    def app(self) -> web.Application:
        @web.middleware
        async def unless_down(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self.down:
                return out_of_order()
            return await handler(request)

        app = web.Application(middlewares=[unless_down], client_max_size=self.max_body_bytes)
        app.router.add_get("/info", self.info)
        app.router.add_post("/rollouts", self.accept)
        app.router.add_get("/rollouts", self.page)
        app.router.add_post("/rollouts/ack", self.ack)
        app.router.add_post("/env/create", self.create)
        app.router.add_delete("/rollouts/{rollout_id:.*}", self.cancel)
        return app

    async def info(self, request: web.Request) -> web.Response:
        limits = {"max_concurrent_rollouts": 64, "max_body_bytes": self.max_body_bytes}
        return web.json_response({"service": {"instance_id": self.instance}, "limits": limits})

    async def accept(self, request: web.Request) -> web.Response:
        status = self.answer_first_with.pop(0) if self.answer_first_with else None
        if status == 502:  # of a proxy
            return web.Response(text="<html>Bad Gateway</html>", status=status, content_type="text/html")
        if status is not None:
            return web.json_response({"detail": "not now"}, status=status)
        body = await request.json()
        for item in body["rollouts"]:
            self.ended.append(self._ended(RolloutRequest.model_validate(item)))
        ids = [item["rollout_id"] for item in body["rollouts"]]
        return web.json_response({"accepted": ids, "known": [], "instance_id": self.instance}, status=202)

    def _ended(self, item: RolloutRequest) -> Rollout:
        base = item.rollout_id.partition(":")[0]
        failed = self.fails.get(base, 0) > 0
        if failed:
            self.fails[base] -= 1
        return answer_to(item, status="failed" if failed else "finished", instance=self.instance)

    async def page(self, request: web.Request) -> web.Response:
        gone = {*self.acked, *self.cancelled} if self.forgets else ()
        first = int(request.query.get("cursor") or 0)
        page = self.ended[first : first + 3]
        return self.page_of([item for item in page if item.rollout_id not in gone], first + len(page))

    def page_of(self, rollouts: Iterable[Rollout], cursor: int, unfinished: int = 0) -> web.Response:
        found = [json.loads(item.model_dump_json()) for item in rollouts]
        body = {"rollouts": found, "cursor": str(cursor), "unfinished": unfinished}
        return web.json_response(body | {"instance_id": self.instance})

    async def ack(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.acked += body["rollout_ids"]
        return web.json_response({"acked": body["rollout_ids"], "unknown": []})

    async def create(self, request: web.Request) -> web.Response:
        raise web.HTTPNotFound

    async def cancel(self, request: web.Request) -> web.Response:
        self.cancelled.append(request.match_info["rollout_id"])
        return web.json_response({})


class Gated(ScriptedTaskApp):
    """Tells of nothing before its gate is opened, and forgets what is acknowledged, as a real one does."""

    forgets = True

    def __init__(self, *, instance: str = "i") -> None:
        super().__init__(instance=instance)
        self.gate, self.change = asyncio.Event(), asyncio.Condition()

    async def accept(self, request: web.Request) -> web.Response:
        return await self.note(await super().accept(request))

    async def cancel(self, request: web.Request) -> web.Response:
        return await self.note(await super().cancel(request))

    async def note(self, answer: web.Response) -> web.Response:
        async with self.change:
            self.change.notify_all()
        return answer

    async def until_accepted(self, count: int) -> None:
        async with self.change:
            await self.change.wait_for(lambda: len(self.ended) == count)

    async def until_cancelled(self, names: list[str]) -> None:
        async with self.change:
            await self.change.wait_for(lambda: {*self.cancelled} == {*names})

    async def page(self, request: web.Request) -> web.Response:
        await self.gate.wait()
        return await super().page(request)


def out_of_order() -> web.Response:
    return web.json_response({"detail": "out of order"}, status=500)


def wrap(clients: Iterable[TaskAppClient], **keys: Any) -> TaskApps:
    """The task apps of clients that the caller opened and will close."""
    apps = TaskApps((), SecretStr(""), timeout_s=0.0, **keys)
    apps.members = tuple(clients)
    return apps


@asynccontextmanager
async def served(
    task_app: ScriptedTaskApp,
    *,
    timeout_s: float = 10.0,
    host: str = "127.0.0.1",
    port: int = 0,
    routes: Mapping[str, Handler] = MappingProxyType({}),
) -> AsyncIterator[TaskAppClient]:
    """`routes` are further ones, that are posted to."""
    app = task_app.app()
    for path, handler in routes.items():
        app.router.add_post(path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    url = f"http://{host}:{runner.addresses[0][1]}"
    try:
        async with TaskAppClient(url, SecretStr("k"), timeout_s=timeout_s) as client:
            yield client
    finally:
        await runner.cleanup()


async def collected(
    requests: Sequence[RolloutRequest],
    *task_apps: ScriptedTaskApp,
    max_running: int | None = None,
    lost_wait_s: float = 0.0,
    **calls: Any,
) -> Batch:
    """What a dispatcher gets from task apps that are served in the meantime; `calls` are of its `collect`."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(served(task_app)) for task_app in task_apps]
        apps = wrap(clients, lost_wait_s=lost_wait_s)
        return await Dispatcher(apps, timeout_s=60, max_running=max_running).collect(requests, **calls)
