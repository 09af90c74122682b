"""The body of POST /rollout, as users of Crafter task apps write it. Open: others made its shape."""

from typing import Any, Literal

from pydantic import Field

from shared_schemas.rewards import TrainingSwitches
from shared_schemas.rollouts import Id, InferenceKey, Name, Seed
from task_app.routes.bodies import EnvId, ForeignBody

MAX_TIME_S = 86_400.0


class LegacyEnv(ForeignBody):
    env_id: EnvId | None = Field(default=None, description="an environment that lives; it goes on")
    env_name: Name | None = Field(default=None, description="or one that is made for this rollout")
    config: dict[str, Any] = Field(
        default_factory=dict, description="also env_params.max_steps_per_episode and step_rewards"
    )
    seed: Seed | None = Field(default=None, description="derived from run_id when absent; a warning says it")


class LegacyPolicy(ForeignBody):
    policy_id: EnvId | None = Field(default=None, description="a policy that lives")
    policy_name: Name | None = Field(
        default=None, description="or one that is made for this rollout; `crafter` means `openai`"
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="also step_rewards, max_llm_calls, trace_correlation_id"
    )
    inference_key: InferenceKey | None = Field(default=None, description="for config.inference_url alone")
    output_mode: Literal["tool_calls"] = "tool_calls"


class LegacyRecord(ForeignBody):
    trajectories: bool = True
    logprobs: bool = Field(default=False, description="exact tokens and their log-probs in every step")
    value: bool = False
    return_trace: bool = False
    trace_format: Literal["compact", "full", "structured"] = "compact"


class LegacySafety(ForeignBody):
    max_ops: int = Field(default=100_000, ge=1, le=10_000_000)
    max_time_s: float = Field(default=3_600.0, gt=0.0, le=MAX_TIME_S, description="also while queued")


class LegacyRollout(ForeignBody):
    """One rollout, answered with its whole trajectory."""

    run_id: Id
    env: LegacyEnv
    policy: LegacyPolicy
    ops: tuple[str | dict[str, Any], ...] = Field(
        description='["agent", "env"] * N is a rollout of N decisions; also {"type": "agent"}'
    )
    record: LegacyRecord = LegacyRecord()
    on_done: Literal["reset", "terminate"] = Field(
        default="reset", description="reset: play on in a new episode of the same world while ops are left"
    )
    safety: LegacySafety = LegacySafety()
    branch: dict[str, Any] | None = Field(default=None, description="never executed, and a warning says so")
    training: TrainingSwitches | None = Field(
        default=None,
        description="step_rewards by their names in a job's [training], where no config has them",
    )
    rollout: Any = Field(default=None, description="a table that may hold them under these names too")
    mode: Literal["rl", "eval"] | None = None
    training_session_id: str | None = Field(default=None, max_length=500)
    synth_base_url: str | None = Field(default=None, max_length=2_000)
