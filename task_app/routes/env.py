"""/env: environments that the caller steps.

Bodies may contain further keys, because other projects also define these routes.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from shared_schemas.base import Reply
from shared_schemas.messages import ToolSpec
from shared_schemas.rewards import StepRewardKeys
from shared_schemas.rollouts import EnvSpec, Name, Seed
from task_app.captures.agents import AgentEnvironment
from task_app.environment_calls import list_tools
from task_app.protocols import (
    ConversationalEnvironment,
    ReseedableEnvironment,
    RestorableEnvironment,
    takes_answers,
)
from task_app.routes.wire import (
    OK,
    CreateBody,
    EnvId,
    ForeignBody,
    ObservationReply,
    Ok,
    ReplyJSON,
    Router,
    observation_json,
)
from task_app.services import Services, get_services
from task_app.sessions.sessions import EnvironmentSession
from task_app.sessions.switches import agree_on_step_rewards, take_step_rewards

router = Router(prefix="/env", tags=["env"])


class EnvCreate(CreateBody):
    env_name: Name
    seed: Seed = 0
    rl_run_id: str | None = Field(default=None, max_length=200)


class EnvWorld(ForeignBody):
    seed: Seed | None = Field(default=None, description="by default the seed of the last reset")


class EnvReset(EnvWorld):
    env_id: EnvId


class EnvTerminate(ForeignBody):
    env_id: EnvId


class EnvReplyInfo(Reply):
    """The seed and the tools of an environment, its optional abilities, and the names of its state keys."""

    seed: int
    tools: tuple[ToolSpec, ...]
    conversation: bool
    takes_answers: bool
    restorable: bool
    reseedable: bool
    rewards_calls: bool
    state_keys: tuple[str, ...]


class EnvCreateReply(Reply):
    """A new environment and its first observation."""

    env_id: str
    observation: ObservationReply
    info: EnvReplyInfo
    step_idx: int


class ResetReplyInfo(Reply):
    seed: int


class EnvResetReply(Reply):
    """The first observation after a reset."""

    observation: ObservationReply
    info: ResetReplyInfo
    step_idx: int


@router.post("/create", response_model=EnvCreateReply)
async def create_env(request: Request, body: EnvCreate) -> Response:
    """Create an environment, and reset it with the seed."""
    return ReplyJSON(await create_session(get_services(request), body))


async def create_session(services: Services, body: EnvCreate) -> dict[str, Any]:
    """Create an environment session, and return the JSON of an `EnvCreateReply`."""
    env_id, session = await open_session(
        services,
        body.env_name,
        body.config,
        body.training,
        body.rollout,
        seed=body.seed,
        rl_run_id=body.rl_run_id,
    )
    tools = [tool.model_dump(mode="json") for tool in list_tools(session.environment)]
    conversation = isinstance(session.environment, ConversationalEnvironment)
    return {
        "env_id": env_id,
        "observation": observation_json(session.observation),
        "info": {
            "seed": session.seed,
            "tools": tools,
            "conversation": conversation,
            "takes_answers": conversation and takes_answers(session.environment),
            "restorable": isinstance(session.environment, RestorableEnvironment),
            "reseedable": isinstance(session.environment, ReseedableEnvironment),
            "rewards_calls": isinstance(session.environment, AgentEnvironment),
            "state_keys": sorted(services.boards.state_keys(session.spec.env_name, session.environment)),
        },
        "step_idx": 0,
    }


async def open_session(
    services: Services,
    env_name: str,
    config: Mapping[str, Any],
    training: StepRewardKeys | None = None,
    rollout: Any = None,
    *,
    seed: int,
    rl_run_id: str | None = None,
) -> tuple[str, EnvironmentSession]:
    """Create an environment session, and reset it with the seed; return its id and the session.

    Raises:
        CapacityReached, ShuttingDown, UnknownName, InvalidRequest, JournalFailed: nothing was created.
    """
    services.environments.check_capacity()
    config, switches = take_step_rewards(config, where="config", training=training, rollout=rollout)
    agree_on_step_rewards(switches)
    session = EnvironmentSession(
        environment=services.boards.environment(env_name, config),
        spec=EnvSpec(env_name=services.boards.environment_name(env_name), config=config),
        switches={f"the environment's {place}": one for place, one in switches.items()},
        rl_run_id=rl_run_id,
        threads=services.threads,
    )
    try:
        await session.reset(seed)
        return services.environments.add(session), session
    except BaseException:
        session.begin_close()
        raise


@router.post("/reset", response_model=EnvResetReply)
async def reset_env(request: Request, body: EnvReset) -> Response:
    """Reset the environment, with the seed of the last reset or with another one."""
    session = get_services(request).environments.get(body.env_id, where="env_id")
    observation = await session.reset(session.seed if body.seed is None else body.seed)
    return ReplyJSON(
        {"observation": observation_json(observation), "info": {"seed": session.seed}, "step_idx": 0}
    )


@router.post("/terminate")
async def terminate_env(request: Request, body: EnvTerminate) -> Ok:
    """Delete the environment session."""
    get_services(request).environments.remove(body.env_id, where="env_id")
    return OK
