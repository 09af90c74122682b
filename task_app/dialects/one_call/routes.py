"""Routes of the one-call dialect: /env/{env_name}/... steps an environment by name; POST /rollout plays one.

Their sessions are those of /env/create, and both kinds of routes work with them.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from pydantic import Field
from starlette.responses import Response

from shared_schemas.rollouts import Seed
from task_app.dialects.one_call.reply_models import LegacyRolloutReply
from task_app.dialects.one_call.request import LegacyRollout, legacy_calls
from task_app.dialects.one_call.rollout import legacy_rollout
from task_app.environment_calls import list_tools
from task_app.errors import InvalidRequest, UnknownId
from task_app.routes.env import EnvCreate, EnvCreateReply, create_session
from task_app.routes.steps import decide
from task_app.routes.wire import (
    OK,
    CreateBody,
    EnvId,
    EnvStepReply,
    ForeignBody,
    LegacyObservation,
    Ok,
    ReplyJSON,
    legacy_observation,
    while_connected,
)
from task_app.services import Services, services_of
from task_app.sessions.sessions import EnvironmentSession

router = APIRouter(prefix="/env/{env_name}", tags=["env"])

EnvName = Annotated[str, Path(min_length=1, max_length=200, description="`crafter`, or `CrafterClassic`")]


class InitializeBody(CreateBody):
    seed: Seed = 0
    world_config: dict[str, Any] | str | None = Field(
        default=None, description="a difficulty; ignored, with a warning"
    )


class StepBody(ForeignBody):
    env_id: EnvId
    action: dict[str, Any] = Field(
        description="{tool_calls: [...]} or {actions: [...]}; also the tool `interact`, and actions by number"
    )


class TerminateBody(ForeignBody):
    env_id: EnvId


class LegacyCreateReply(EnvCreateReply):
    """A new environment and its first observation, for older clients."""

    observation: LegacyObservation
    warnings: tuple[str, ...]


class LegacyStepReply(EnvStepReply):
    """What a decision did and earned, for older clients."""

    observation: LegacyObservation


@router.post("/initialize", response_model=LegacyCreateReply)
async def initialize_env_by_name(request: Request, env_name: EnvName, body: InitializeBody) -> Response:
    """POST /env/create by another name."""
    name = services_of(request).boards.environment_name(env_name)
    config, warnings = dict(body.config), []
    if config.pop("difficulty", None) is not None or body.world_config is not None:
        warnings.append("the difficulty is ignored; worlds differ by their seed alone")
    tables = {"training": body.training, "rollout": body.rollout}
    env_create = EnvCreate(env_name=name, config=config, seed=body.seed, **tables)
    reply = await create_session(services_of(request), env_create)
    return ReplyJSON(_legacy(reply) | {"warnings": warnings})


@router.post("/step", response_model=LegacyStepReply)
async def step_env_by_name(request: Request, env_name: EnvName, body: StepBody) -> Response:
    """POST /env/step; calls in older forms are read as calls of the tool on offer."""
    services = services_of(request)
    session = _session(services, env_name, body.env_id)
    try:
        calls = legacy_calls(body.action, list_tools(session.environment))
    except ValueError as exc:
        raise InvalidRequest(str(exc), where="action") from exc
    return ReplyJSON(_legacy(await decide(services, session, calls, where="action.")))


@router.post("/terminate")
async def terminate_env_by_name(request: Request, env_name: EnvName, body: TerminateBody) -> Ok:
    """Forget the environment."""
    services = services_of(request)
    _session(services, env_name, body.env_id)
    services.environments.remove(body.env_id, where="env_id")
    return OK


def _legacy(answer: dict[str, Any]) -> dict[str, Any]:
    return answer | {"observation": legacy_observation(answer["observation"])}


def _session(services: Services, env_name: str, env_id: str) -> EnvironmentSession:
    """The session, if its environment has this name."""
    name = services.boards.environment_name(env_name)
    session = services.environments.get(env_id, where="env_id")
    if session.spec.env_name != name:
        raise UnknownId(
            f"{name} environment", env_id, where="env_id", hint=f"it is {session.spec.env_name!r}"
        )
    return session


rollout_router = APIRouter(tags=["rollouts"])


@rollout_router.post("/rollout", response_model=LegacyRolloutReply)
async def play_rollout(request: Request, body: LegacyRollout) -> Response:
    """Play one rollout and reply with it.

    A client that disconnects cancels it, unless it sent an Idempotency-Key and may come back for the reply.
    """
    rollout = legacy_rollout(services_of(request), body)
    if "idempotency-key" in request.headers:
        return ReplyJSON(await rollout)
    reply = await while_connected(rollout, request.receive)
    return Response(status_code=499) if reply is None else ReplyJSON(reply)
