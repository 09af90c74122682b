"""Pure: the reply of POST /rollout as /openapi.json declares it; `reply.py` makes it."""

from typing import Any

from pydantic import Field

from shared_schemas.base import Reply
from shared_schemas.messages import Message, ToolCall
from shared_schemas.trajectory import DecisionRewards, LogProbs, Sampling
from task_app.routes.wire import ObservationReply


class LegacyCall(Reply):
    """A tool call; `arguments` are text where the model wrote no JSON object."""

    tool_name: str
    arguments: dict[str, Any] | str


class CreditedAchievement(Reply):
    achievement: str
    reward: float


class StepwiseBlock(Reply):
    """What a decision is paid; the last two fields are those of the strategy `per_achievement`."""

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
    """How a decision was taken; tokens and sampling where the request asked for log-probs."""

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
    """Facts about a decision; the last three fields are those of a refused one."""

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
    """How an episode ended; the last three fields are those of one that was cut short."""

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
    """One episode; `decision_samples` where the switches are on."""

    env_id: str
    policy_id: str
    steps: tuple[LegacyStep, ...]
    final: LegacyFinal
    length: int
    inference_url: str
    trace_correlation_id: str | None
    decision_samples: tuple[DecisionSample, ...] = ()


class StepwiseDetails(Reply):
    """The sums of the `stepwise` blocks of all episodes, and the settings that they were paid by."""

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
    """The achievements of a decision; `turn` counts from 0 here."""

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
    """The trace; a compact one has neither events nor messages."""

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
    """A whole rollout, with a trajectory for each of its episodes."""

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
