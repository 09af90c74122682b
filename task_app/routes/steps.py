"""POST /env/step and /env/step_many: decisions in environments that callers step.

`answer_at_once` answers simple requests to /env/step without FastAPI.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.responses import Response
from starlette.types import Scope

from service_kit.connections import PlainReply, plain_problem
from shared_schemas.base import Body, Reply
from shared_schemas.problem import Problem
from task_app.errors import InvalidRequest, TaskAppError, boundary
from task_app.routes.wire import (
    LONGEST_ID,
    EnvId,
    EnvStepReply,
    ForeignBody,
    ReplyJSON,
    Router,
    read_calls,
    reply_body,
    step_json,
)
from task_app.services import Services, get_services
from task_app.sessions import idempotency
from task_app.sessions.sessions import EnvironmentSession

router = Router(prefix="/env", tags=["env"])

# Number of env steps (three milliseconds of Crafter) after which other requests get their turn.
SLICE_ENV_STEPS = 50


class EnvDecision(ForeignBody):
    tool_calls: tuple[dict[str, Any], ...] = Field(
        description="OpenAI's form, or {tool | tool_name, args | arguments}; one decision"
    )


class EnvStep(EnvDecision):
    env_id: EnvId


class EnvStepMany(Body):
    """Decisions in one or several environments, which are carried out in this order."""

    steps: tuple[EnvStep, ...] = Field(min_length=1)


class StepResult(EnvStepReply):
    """The result of a decision that was carried out."""

    env_id: str
    status: int


class StepRefusal(Reply):
    """The reason why a decision was refused; the environment did not step."""

    env_id: str
    status: int
    problem: Problem


class EnvStepManyReply(Reply):
    """The results of the decisions, in the order of the request."""

    results: tuple[StepResult | StepRefusal, ...]


@router.post("/step", response_model=EnvStepReply)
async def step_env(request: Request, body: EnvStep) -> Response:
    """Carry out the tool calls of one decision.

    If the environment refuses a call, one env step without effect runs; `info.invalid_reason` says why.
    """
    services = get_services(request)
    session = services.environments.get(body.env_id, where="env_id")
    return ReplyJSON(await decide(services, session, body.tool_calls))


@router.post("/step_many", response_model=EnvStepManyReply)
async def step_many(request: Request, body: EnvStepMany) -> Response:
    """Carry out many decisions in order.

    The result of a decision is `{"status": 200, ...}` with the fields of /env/step. If the decision was
    refused, it is `{"status": 4xx, "problem": ...}`: the environment did not step, and the next decisions
    are still carried out.
    """
    services = get_services(request)
    count, most = len(body.steps), services.settings.max_steps_per_request
    if count > most:
        raise InvalidRequest(f"{count} steps in one request; at most {most}", where="steps")
    results, since_yield = list[bytes](), 0
    for index, one in enumerate(body.steps):
        result, env_steps = await _decide_item(services, one, index)
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
    """Carry out one decision of a session, and return the reply of /env/step.

    Raises:
        InvalidRequest: there are too many calls, or a call contains no tool name. The error names the path
            in the request body, which begins with `where`.
        EpisodeOver: the episode has ended.
    """
    requests = read_calls(
        tool_calls, at_most=services.settings.max_calls_per_step, where=where + "tool_calls"
    )
    return step_json(session, *await session.step(requests))


async def _decide_item(services: Services, one: EnvStep, index: int) -> tuple[bytes, int]:
    """Carry out one decision of a batch; return its result or problem as JSON, and its count of env steps."""
    where = f"steps.{index}."
    try:
        # The boundary keeps an error in this decision from losing the results of the others.
        with boundary(f"step {index} of a batch"):
            session = services.environments.get(one.env_id, where=where + "env_id")
            answer = await decide(services, session, one.tool_calls, where=where)
            reply = {"env_id": one.env_id, "status": 200, **answer}
            return reply_body(reply), len(answer["env_rewards"])
    except TaskAppError as exc:
        exc.release_frames()
        exc.where = exc.where or where.rstrip(".")
        problem = exc.problem().model_dump(mode="json", exclude_none=True)
        return reply_body({"env_id": one.env_id, "status": exc.status, "problem": problem}), 0


# FastAPI's route for a step; metrics count the requests of `answer_at_once` under it too.
ROUTE = next(route for route in router.routes if isinstance(route, APIRoute) and route.name == "step_env")
KEYS = EnvStep.model_fields.keys()
JSON = (b"content-type", b"application/json")


def answer_at_once(
    services: Services, read: Callable[[Scope, bytes], Any], scope: Scope, body: bytes
) -> PlainReply | None:
    """Answer a simple POST /env/step without FastAPI, which would take as long as the step itself.

    Return None if FastAPI's route must answer the request. That is so if the request has an Idempotency-Key,
    its body needs validation, its session is in use, or the environment does not promise quick steps. `read`
    is the gate's `plain_value`.
    """
    if any([name == idempotency.HEADER for name, _ in scope["headers"]]):
        return None
    decision = _plain_body(read(scope, body))
    if decision is None:
        return None
    env_id, tool_calls = decision
    scope["route"] = ROUTE
    try:
        session = services.environments.get(env_id, where="env_id")
        if not session.steps_at_once:
            return None
        most = services.settings.max_calls_per_step
        requests = read_calls(tool_calls, at_most=most, where="tool_calls")
        reply = PlainReply(200, [JSON], reply_body(step_json(session, *session.take(requests))))
    except TaskAppError as error:
        reply = plain_problem(error)
    return reply


def _plain_body(body: Any) -> tuple[str, list[dict[str, Any]]] | None:
    """Return `env_id` and `tool_calls` of a valid `EnvStep`; None if the body needs FastAPI's validation."""
    if type(body) is not dict or body.keys() != KEYS:
        return None
    env_id, calls = body["env_id"], body["tool_calls"]
    plain = type(env_id) is str and type(calls) is list and all([type(call) is dict for call in calls])
    return (env_id, calls) if plain and 0 < len(env_id) <= LONGEST_ID else None
