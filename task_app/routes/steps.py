"""POST /env/step and /env/step_many: decisions of environments that callers step, with a short way."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from service_kit.gate import JSON_BODY
from service_kit.problems import problem_response
from shared_schemas.base import Body
from task_app.episode.actions import requests_from_wire
from task_app.errors import InvalidRequest, TaskAppError, boundary
from task_app.protocols import DecisionOutcome, Observation, ToolRequest
from task_app.routes.wire import LONGEST_ID, EnvId, ForeignBody, ReplyJSON, reply_body, step_json
from task_app.services import Services, services_of
from task_app.sessions import idempotency
from task_app.sessions.sessions import EnvironmentSession

router = APIRouter(prefix="/env", tags=["env"])

# Env steps between two looks at the other requests: about three milliseconds of Crafter.
SLICE_ENV_STEPS = 50


class EnvDecision(ForeignBody):
    tool_calls: tuple[dict[str, Any], ...] = Field(
        description="OpenAI's form, or {tool | tool_name, args | arguments}; one decision"
    )


class EnvStep(EnvDecision):
    env_id: EnvId


class EnvStepMany(Body):
    """Decisions of one or many environments, carried out in this order."""

    steps: tuple[EnvStep, ...] = Field(min_length=1)


@router.post("/step")
async def step(request: Request, body: EnvStep) -> Response:
    """Carry out the calls of one decision. A refused call runs one noop and says why in `info`."""
    services = services_of(request)
    session = services.environments.get(body.env_id, where="env_id")
    return ReplyJSON(await decide(services, session, body.tool_calls))


@router.post("/step_many")
async def step_many(request: Request, body: EnvStepMany) -> Response:
    """Carry out many decisions. Each answers for itself: `{"status": 200, ...}` as /env/step does, or
    `{"status": 4xx, "problem": ...}`; a refused one takes no step and stops none of the others."""
    services = services_of(request)
    found, most = len(body.steps), services.settings.max_steps_per_request
    if found > most:
        raise InvalidRequest(f"{found} steps in one request; at most {most}", where="steps")
    results: list[bytes] = []
    since_yield = 0
    for index, one in enumerate(body.steps):
        result, env_steps = await _item(services, one, index)
        results.append(result)
        since_yield += env_steps
        if since_yield >= SLICE_ENV_STEPS:
            since_yield = 0
            await asyncio.sleep(0)
    return Response(b'{"results":[' + b",".join(results) + b"]}", media_type="application/json")


async def decide(
    services: Services,
    session: EnvironmentSession,
    tool_calls: Sequence[Mapping[str, Any]],
    *,
    where: str = "",
) -> dict[str, Any]:
    """One decision of a session; the answer of /env/step.

    Raises:
        InvalidRequest: too many calls, or one that names no tool; `where` is put before the body path.
        EpisodeOver: the episode has ended.
    """
    requests = _requests(tool_calls, at_most=services.settings.max_calls_per_step, where=where)
    return _told(session, *await session.step(requests))


def decide_at_once(
    services: Services, session: EnvironmentSession, tool_calls: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The same of a session that `steps_at_once`; raises the same."""
    requests = _requests(tool_calls, at_most=services.settings.max_calls_per_step, where="")
    return _told(session, *session.take(requests))


def _told(session: EnvironmentSession, before: Observation, outcome: DecisionOutcome) -> dict[str, Any]:
    return step_json(before, outcome, turn=session.turn, step_idx=session.step_idx, metadata=session.metadata)


async def _item(services: Services, one: EnvStep, index: int) -> tuple[bytes, int]:
    """The answer of one decision, whatever becomes of it, as JSON; and its env steps."""
    where = f"steps.{index}."
    try:
        # Around all of it: what one decision breaks must not take the answers of the others along.
        with boundary(f"step {index} of a batch"):
            session = services.environments.get(one.env_id, where=where + "env_id")
            answer = await decide(services, session, one.tool_calls, where=where)
            told = {"env_id": one.env_id, "status": 200, **answer}
            return reply_body(told), len(answer["env_rewards"])
    except TaskAppError as exc:
        exc.where = exc.where or where.rstrip(".")
        problem = exc.problem().model_dump(mode="json", exclude_none=True)
        return reply_body({"env_id": one.env_id, "status": exc.status, "problem": problem}), 0


def _requests(
    tool_calls: Sequence[Mapping[str, Any]], *, at_most: int, where: str
) -> tuple[ToolRequest, ...]:
    if len(tool_calls) > at_most:
        raise InvalidRequest(
            f"{len(tool_calls)} tool calls in one decision; at most {at_most}", where=where + "tool_calls"
        )
    try:
        return requests_from_wire(tool_calls)
    except ValueError as exc:
        raise InvalidRequest(str(exc), where=where + "tool_calls") from exc


# Where the long way ends; metrics count both ways under its path.
ROUTE = next(route for route in router.routes if isinstance(route, APIRoute) and route.name == "step")
KEYS = EnvStep.model_fields.keys()
JSON = b"application/json"


class ShortWay:
    """ASGI middleware that answers a plain POST /env/step at once, without FastAPI.

    FastAPI costs as much as a step. A request is plain if its body is whole, without Idempotency-Key, nobody
    holds its session, and the environment promises quick steps: then it needs no deadline, lock, thread or
    memory of answers. All other requests, and faulty bodies, go the long way by the route. This stands behind
    service_kit.gate, which has read the body.

    Args:
        app: the long way.
        services: with the sessions.
    """

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = self._answer(scope.pop(JSON_BODY, None)) if _may_be_plain(scope) else None
        except TaskAppError as error:
            scope["route"] = ROUTE
            await problem_response(error)(scope, receive, send)
            return
        if body is None:
            # The route reads the body for itself: a large one need not be there twice.
            scope.pop(JSON_BODY, None)
            await self._app(scope, receive, send)
            return
        scope["route"] = ROUTE
        headers = [(b"content-length", b"%d" % len(body)), (b"content-type", JSON)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _answer(self, body: Any) -> bytes | None:
        """The answer, or None when the long way has to find it: then nothing has been done yet.

        Raises:
            TaskAppError: there is no such session, or the decision was refused, or failed.
        """
        asked = _plain_body(body)
        if asked is None:
            return None
        env_id, tool_calls = asked
        session = self._services.environments.get(env_id, where="env_id")
        if not session.steps_at_once:
            return None
        return reply_body(decide_at_once(self._services, session, tool_calls))


def _plain_body(body: Any) -> tuple[str, list[dict[str, Any]]] | None:
    """What a `steps.EnvStep` of two keys says; None for whatever its validation may have to look at."""
    if type(body) is not dict or body.keys() != KEYS:
        return None
    env_id, calls = body["env_id"], body["tool_calls"]
    plain = type(env_id) is str and type(calls) is list and all([type(call) is dict for call in calls])
    return (env_id, calls) if plain and 0 < len(env_id) <= LONGEST_ID else None


def _may_be_plain(scope: Scope) -> bool:
    """As far as its head tells."""
    if scope["type"] != "http" or scope["path"] != ROUTE.path or scope["method"] != "POST":
        return False
    headers = dict(scope["headers"])
    return headers.get(b"content-type") == JSON and idempotency.HEADER not in headers
