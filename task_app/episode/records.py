"""Pure: what happened in one decision -> its StepData, as DESIGN.md 4.2 wants every step to be."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared_schemas.base import finite as finite
from shared_schemas.json_text import encodable, encodable_json
from shared_schemas.rewards import RewardPart, StepRewards
from shared_schemas.trajectory import ObservationData, PolicyLogprobs, StepData, StepInfo, StopReason
from task_app.episode.actions import Choice, ReadAction
from task_app.episode.decisions import achievements_status, step_metadata
from task_app.episode.prompts import Carried, Prompt
from task_app.episode.termination import ends_by_a_limit
from task_app.protocols import Observation

LOGPROB_FIELDS = (
    "prompt_ids_reused",
    "prompt_token_ids",
    "token_ids",
    "logprobs",
    "finish_reason",
    "versions",
)
# In the step itself, in its step_info, or in the trajectory.
RECORDED_ELSEWHERE = ("sampling", "model", "prompt_tokens", "completion_tokens", "finish_reason")


@dataclass(frozen=True, slots=True)
class Decided:
    """One completed decision: what was seen, chosen and done, and how long the two halves took."""

    turn: int
    before: Observation
    prompt: Prompt
    choice: Choice
    read: ReadAction
    carried: Carried
    state_keys: Mapping[str, str] = field(default_factory=dict)
    snapshot: str | None = None
    policy_s: float = 0.0
    environment_s: float = 0.0


def observation_data(observation: Observation, decided: Decided | None = None) -> ObservationData:
    """Counters and the last reward; with the decision that was made from it, its prompt and its state too."""
    counts = dict(observation.achievements_counts)
    data = ObservationData(
        messages=decided.prompt.new if decided else (),
        messages_reused=decided.prompt.reused if decided else 0,
        changed=dict(decided.prompt.changed) if decided else {},
        state_keys=dict(decided.state_keys) if decided else {},
        achievements_status=achievements_status(counts),
        achievements_counts=counts,
        reward_last_step=observation.reward_last_step,
    )
    if decided and decided.prompt.again:
        data.recall(decided.prompt.again)
    return data


def step_data(decided: Decided, *, policy_name: str, step_rewards: StepRewards) -> StepData:
    """The record of a decision that did not end the episode; `ended` marks the last one."""
    choice, outcome = decided.choice, decided.carried.outcome
    return StepData(
        turn=decided.turn,
        observation_data=observation_data(decided.before, decided),
        next_observation=observation_data(outcome.observation),
        action_taken=encodable_json(_action_taken(decided)),
        tool_calls=decided.read.tool_calls,
        snapshot=decided.snapshot,
        raw_policy_output=None if choice.raw_output is None else encodable(choice.raw_output),
        policy_name=policy_name,
        sampling=choice.log_probs.get("sampling"),
        policy_logprobs=policy_logprobs(choice.log_probs) or _own_logprobs(choice.log_probs),
        policy_value_estimate=choice.value,
        env_rewards=tuple(map(finite, outcome.env_rewards)),
        reward_parts=decided.carried.reward_parts,
        metadata=step_metadata(
            decided.before.achievements_counts,
            outcome.observation.achievements_counts,
            turn=decided.turn,
            step_rewards=step_rewards,
        ),
        step_info=_step_info(decided),
    )


def _action_taken(decided: Decided) -> dict[str, Any]:
    """The action without what the record has elsewhere, or what the environment did not hold against it."""
    action, outcome = dict(decided.choice.action), decided.carried.outcome
    if "name" in action:
        action.pop("tool_calls", None)
    if outcome.invalid_reason is None:
        action.pop("invalid_reason", None)
    return action


def ended(
    step: StepData, reason: StopReason, *, environment_truncated: bool, penalty: float = 0.0
) -> StepData:
    """The last step, marked: `terminated` is an end of the task, `truncated` a cut by a limit.

    `penalty` is for a context that does not fit: the decision that caused it pays.
    """
    if penalty and reason is StopReason.CONTEXT_LENGTH:
        parts = (*step.reward_parts, RewardPart(source="penalty", value=penalty))
        step = step.model_copy(update={"reward_parts": parts})
    truncated = ends_by_a_limit(reason) or (reason is StopReason.ENVIRONMENT_DONE and environment_truncated)
    return step.model_copy(
        update={"is_done": True, "terminated": not truncated, "truncated": truncated, "stop_reason": reason}
    )


def _step_info(decided: Decided) -> StepInfo:
    outcome, log_probs = decided.carried.outcome, decided.choice.log_probs
    return StepInfo(
        tool_result=encodable(outcome.result),
        invalid_reason=None if outcome.invalid_reason is None else encodable(outcome.invalid_reason),
        executed_actions=tuple(map(encodable, outcome.executed_actions)),
        policy_s=decided.policy_s,
        environment_s=decided.environment_s,
        interaction_s=decided.carried.interaction_s,
        prompt_tokens=log_probs.get("prompt_tokens"),
        completion_tokens=log_probs.get("completion_tokens"),
        finish_reason=log_probs.get("finish_reason"),
        user_answer=decided.carried.answer,
    )


def policy_logprobs(log_probs: Mapping[str, Any]) -> PolicyLogprobs | None:
    """Return the exact tokens, with all fields or none, so that a missing log-prob never looks like a 0."""
    found = {name: log_probs.get(name) for name in LOGPROB_FIELDS}
    return None if any(value is None for value in found.values()) else PolicyLogprobs.model_validate(found)


def _own_logprobs(log_probs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the policy's other log-prob data, which has no field in the record."""
    own = {name: value for name, value in log_probs.items() if name not in RECORDED_ELSEWHERE}
    told: dict[str, Any] = encodable_json({name: value for name, value in own.items() if value is not None})
    return told or None
