"""Routes of older Crafter task apps: /env/{env_name}/... and POST /rollout.

The routes below /env/{env_name} create, step and remove environments. Their sessions are the sessions of
/env/create and the other /env routes. POST /rollout plays episodes.
"""

from typing import Annotated, Any

from fastapi import Path, Request
from pydantic import Field
from starlette.responses import Response

from shared_schemas.base import Reply
from shared_schemas.messages import Message, ToolCall
from shared_schemas.rollouts import Seed
from shared_schemas.trajectory import DecisionRewards, LogProbs, Sampling
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
    ObservationReply,
    Ok,
    ReplyJSON,
    Router,
    legacy_observation,
    while_connected,
)
from task_app.services import Services, get_services
from task_app.sessions.sessions import EnvironmentSession

router = Router(prefix="/env/{env_name}", tags=["env"])

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
    """A new environment and its first observation, in the form for older clients."""

    observation: LegacyObservation
    warnings: tuple[str, ...]


class LegacyStepReply(EnvStepReply):
    """The effects and rewards of a decision, in the form for older clients."""

    observation: LegacyObservation


@router.post("/initialize", response_model=LegacyCreateReply)
async def initialize_env_by_name(request: Request, env_name: EnvName, body: InitializeBody) -> Response:
    """Create an environment, as POST /env/create does."""
    name = get_services(request).boards.environment_name(env_name)
    config, warnings = dict(body.config), []
    if config.pop("difficulty", None) is not None or body.world_config is not None:
        warnings.append("the difficulty is ignored; worlds differ by their seed alone")
    tables = {"training": body.training, "rollout": body.rollout}
    env_create = EnvCreate(env_name=name, config=config, seed=body.seed, **tables)
    reply = await create_session(get_services(request), env_create)
    return ReplyJSON(_use_legacy_observation(reply) | {"warnings": warnings})


@router.post("/step", response_model=LegacyStepReply)
async def step_env_by_name(request: Request, env_name: EnvName, body: StepBody) -> Response:
    """Execute a decision, as POST /env/step does. Tool calls in older forms are translated."""
    services = get_services(request)
    session = _find_session(services, env_name, body.env_id)
    try:
        calls = legacy_calls(body.action, list_tools(session.environment))
    except ValueError as exc:
        raise InvalidRequest(str(exc), where="action") from exc
    return ReplyJSON(_use_legacy_observation(await decide(services, session, calls, where="action.")))


@router.post("/terminate")
async def terminate_env_by_name(request: Request, env_name: EnvName, body: TerminateBody) -> Ok:
    """Remove the environment's session."""
    services = get_services(request)
    _find_session(services, env_name, body.env_id)
    services.environments.remove(body.env_id, where="env_id")
    return OK


def _use_legacy_observation(answer: dict[str, Any]) -> dict[str, Any]:
    return answer | {"observation": legacy_observation(answer["observation"])}


def _find_session(services: Services, env_name: str, env_id: str) -> EnvironmentSession:
    """Return the session `env_id`; raise UnknownId if its environment is not `env_name`."""
    name = services.boards.environment_name(env_name)
    session = services.environments.get(env_id, where="env_id")
    if session.spec.env_name != name:
        raise UnknownId(
            f"{name} environment", env_id, where="env_id", hint=f"it is {session.spec.env_name!r}"
        )
    return session


rollout_router = Router(tags=["rollouts"])

# The types of POST /rollout's reply; `reply.py` makes the reply.


class LegacyCall(Reply):
    """A tool call. If the model's arguments are not a JSON object, `arguments` is the model's text."""

    tool_name: str
    arguments: dict[str, Any] | str


class CreditedAchievement(Reply):
    achievement: str
    reward: float


class StepwiseBlock(Reply):
    """The reward of a decision. The last two fields are set only with the strategy `per_achievement`."""

    decision_index: int = Field(description="from 1")
    indicator: int
    new_achievements: tuple[str, ...]
    reward: float
    strategy: str
    base_reward: float
    components: tuple[CreditedAchievement, ...] = ()
    credited_achievements: tuple[str, ...] = ()


class InferenceRequest(Reply):
    messages: tuple[Message, ...]


class TokenUsage(Reply):
    prompt_tokens: int | None
    completion_tokens: int | None


class Timing(Reply):
    inference_s: float
    env_step_ms: float


class LegacyMeta(Reply):
    """Facts about a decision's model call.

    `policy_logprobs` and `sampling` are set only if the request sets record.logprobs.
    """

    inference_url: str | None
    inference_request: InferenceRequest
    turn_index: int
    raw_response: str | None
    usage: TokenUsage
    inference_ms: float
    timing: Timing
    decision_rewards: DecisionRewards | None = None
    policy_logprobs: LogProbs | None = None
    sampling: Sampling | None = None


class LegacyStepInfo(Reply):
    """Facts about a decision. The last three fields are set only if the decision was invalid."""

    achievements_added: tuple[str, ...]
    executed_actions: tuple[str, ...]
    meta: LegacyMeta
    stepwise: StepwiseBlock | None = None
    terminated: bool | None = None
    reason: str | None = None
    error: str | None = None


class LegacyStep(Reply):
    """A decision, with the observation before it."""

    obs: ObservationReply
    tool_calls: tuple[LegacyCall, ...]
    reward: float
    env_rewards: tuple[float, ...]
    done: bool
    terminated: bool
    truncated: bool
    logprob: float | None
    value: float | None
    info: LegacyStepInfo


class LegacyFinal(Reply):
    """The end of an episode. The last three fields are set only if the episode was cut short."""

    observation: ObservationReply | None
    stop_reason: str | None
    outcome_reward: float | None
    rollout_status: str | None = None
    error: str | None = None
    at_op: int | None = None


class SampledAction(Reply):
    tool: str
    args: dict[str, Any] | str


class DecisionSample(Reply):
    decision_index: int
    indicator: int
    r_i: float
    actions: tuple[SampledAction, ...]


class LegacyTrajectory(Reply):
    """One episode. `decision_samples` is set only if decision rewards are on."""

    env_id: str
    policy_id: str
    steps: tuple[LegacyStep, ...]
    final: LegacyFinal
    length: int
    inference_url: str
    trace_correlation_id: str | None
    decision_samples: tuple[DecisionSample, ...] = ()


class StepwiseDetails(Reply):
    """Sums over the `stepwise` blocks of all decisions of the rollout, and the settings of the rewards."""

    indicator_sum: int
    reward_sum: float
    resource_reward: float
    new_achievements_total: int
    mode: str
    strategy: str
    indicator_lambda: float
    step_beta: float
    weights: dict[str, float]
    k_limits: dict[str, int]
    unique_achievements_total: int
    unique_achievements: tuple[str, ...]
    final_achievements: tuple[str, ...]


class LegacyDetails(Reply):
    achievements: tuple[str, ...]
    stepwise: StepwiseDetails | None = None


class LegacyMetrics(Reply):
    episode_returns: tuple[float, ...]
    mean_return: float
    num_steps: int
    num_episodes: int
    outcome_score: float | None
    events_score: float | None
    details: LegacyDetails


class TracedCall(Reply):
    step_id: str
    tool_calls: tuple[ToolCall, ...]
    raw_response: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    latency_ms: float


class TracedRewards(Reply):
    """The achievements of a decision. `turn` counts from 0 here, but from 1 in the trajectory's steps."""

    turn: int
    ach_delta: int
    unique_delta: int
    achievements: tuple[str, ...]
    unique_achievements: tuple[str, ...]


class TracedEvent(Reply):
    event_type: str
    step_id: str
    reward: float
    executed_actions: tuple[str, ...]
    terminated: bool
    truncated: bool


class LegacyTrace(Reply):
    """The trace of a rollout. `event_history` and `messages` are not set in a compact trace."""

    session_id: str
    created_at: str
    metadata: dict[str, Any]
    events_count: int
    messages_count: int
    lm_calls: tuple[TracedCall, ...]
    decision_rewards: tuple[TracedRewards, ...]
    event_history: tuple[TracedEvent, ...] = ()
    messages: tuple[Message, ...] = ()


class PipelineMetadata(Reply):
    inference_url: str | None
    trace_correlation_id: str | None
    env_name: str
    seed: int
    policy_name: str
    policy_config: dict[str, Any]


class LegacyRolloutReply(Reply):
    """A whole rollout, with one trajectory for each of its episodes."""

    run_id: str
    trajectories: tuple[LegacyTrajectory, ...]
    branches: dict[str, Any] = Field(description="always empty; POST /branch copies sessions")
    metrics: LegacyMetrics
    aborted: bool
    ops_executed: int
    trace: LegacyTrace | None
    trace_correlation_id: str | None
    pipeline_metadata: PipelineMetadata
    warnings: tuple[str, ...]


@rollout_router.post("/rollout", response_model=LegacyRolloutReply)
async def play_rollout(request: Request, body: LegacyRollout) -> Response:
    """Play one rollout and reply with it.

    If the client disconnects, the rollout is cancelled. A request with an Idempotency-Key is not cancelled,
    because the client may fetch the reply later.
    """
    rollout = legacy_rollout(get_services(request), body)
    if "idempotency-key" in request.headers:
        return ReplyJSON(await rollout)
    reply = await while_connected(rollout, request.receive)
    return Response(status_code=499) if reply is None else ReplyJSON(reply)
