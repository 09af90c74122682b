"""/env: an environment that the caller steps itself. The bodies are open: others made their shape."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from shared_schemas.rollouts import Name, Seed
from task_app.actions import requests_from_wire
from task_app.errors import InvalidRequest
from task_app.routes.bodies import ForeignBody
from task_app.routes.wire import ReplyJSON, observation_json, step_json
from task_app.services import services_of
from task_app.sessions import EnvironmentSession
from task_app.switches import take_step_rewards

router = APIRouter(prefix="/env", tags=["env"])

EnvId = Annotated[str, Field(min_length=1, max_length=200)]


class EnvCreate(ForeignBody):
    env_name: Name
    config: dict[str, Any] = Field(default_factory=dict, description="may hold step_rewards")
    seed: Seed = 0
    rl_run_id: str | None = Field(default=None, max_length=200)


class EnvReset(ForeignBody):
    env_id: EnvId
    seed: Seed | None = Field(default=None, description="the seed of before when absent")


class EnvStep(ForeignBody):
    env_id: EnvId
    tool_calls: tuple[dict[str, Any], ...] = Field(
        description="OpenAI's form, or {tool | tool_name, args | arguments}; one decision"
    )


class EnvTerminate(ForeignBody):
    env_id: EnvId


@router.post("/create")
async def create(request: Request, body: EnvCreate) -> Response:
    """Make an environment and start the world of the seed."""
    services = services_of(request)
    services.environments.check_capacity()
    config, switches = take_step_rewards(body.config, where="config")
    session = EnvironmentSession(
        environment=services.boards.environment(body.env_name, config),
        switches={f"the environment's {place}": found for place, found in switches.items()},
    )
    observation = await session.reset(body.seed)
    env_id = services.environments.add(session)
    tools = [tool.model_dump(mode="json") for tool in session.environment.tools()]
    return ReplyJSON(
        {
            "env_id": env_id,
            "observation": observation_json(observation),
            "info": {"seed": session.seed, "tools": tools},
            "step_idx": 0,
        }
    )


@router.post("/reset")
async def reset(request: Request, body: EnvReset) -> Response:
    """Start anew, in the same world or in another."""
    session = services_of(request).environments.get(body.env_id, where="env_id")
    observation = await session.reset(session.seed if body.seed is None else body.seed)
    return ReplyJSON(
        {"observation": observation_json(observation), "info": {"seed": session.seed}, "step_idx": 0}
    )


@router.post("/step")
async def step(request: Request, body: EnvStep) -> Response:
    """Carry out the calls of one decision. A refused call runs one noop and says why in `info`."""
    services = services_of(request)
    session = services.environments.get(body.env_id, where="env_id")
    found, most = len(body.tool_calls), services.settings.max_calls_per_step
    if found > most:
        raise InvalidRequest(f"{found} tool calls in one decision; at most {most}", where="tool_calls")
    try:
        requests = requests_from_wire(body.tool_calls)
    except ValueError as exc:
        raise InvalidRequest(str(exc), where="tool_calls") from exc
    before, outcome = await session.step(requests)
    answer = step_json(
        before, outcome, turn=session.turn, step_idx=session.step_idx, metadata=session.metadata
    )
    return ReplyJSON(answer)


@router.post("/terminate")
async def terminate(request: Request, body: EnvTerminate) -> dict[str, bool]:
    """Forget the environment."""
    services_of(request).environments.remove(body.env_id, where="env_id")
    return {"ok": True}
