"""Makes the StepData of a decision (DESIGN.md 4.2). Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shared_schemas.json_text import encodable_json
from shared_schemas.plain_text import encodable
from shared_schemas.rewards import StepRewards
from shared_schemas.rollouts import CostKeys
from shared_schemas.trajectory import (
    EXACT_FIELDS,
    ObservationData,
    PolicyLogprobs,
    RewardPart,
    StepData,
    StepInfo,
    StopReason,
)
from task_app.episode.actions import Action, Choice
from task_app.episode.decisions import achievements_status, step_metadata
from task_app.episode.prompts import DecisionEffect, Prompt
from task_app.episode.termination import ends_by_a_limit
from task_app.protocols import Observation

LOGPROB_FIELDS = tuple(PolicyLogprobs.model_fields)
# Keys of log_probs that are stored in the step itself, in its step_info, or in the trajectory.
RECORDED_ELSEWHERE = ("sampling", "model", "prompt_tokens", "completion_tokens", "finish_reason")


@dataclass(frozen=True, slots=True)
class Decision:
    turn: int
    before: Observation
    prompt: Prompt
    choice: Choice
    action: Action
    effect: DecisionEffect
    state_keys: Mapping[str, str] = field(default_factory=dict)
    snapshot: str | None = None
    policy_s: float = 0.0
    environment_s: float = 0.0


def observation_data(observation: Observation, decision: Decision | None = None) -> ObservationData:
    """Return the record of an observation: its achievement counters and its last reward.

    If the `decision` that was made from this observation is given, the record also contains the prompt and
    the state keys.
    """
    counts = dict(observation.achievements_counts)
    data = ObservationData(
        messages=decision.prompt.new if decision else (),
        messages_reused=decision.prompt.reused if decision else 0,
        changed=dict(decision.prompt.changed) if decision else {},
        state_keys=dict(decision.state_keys) if decision else {},
        achievements_status=achievements_status(counts),
        achievements_counts=counts,
        reward_last_step=observation.reward_last_step,
    )
    if decision and decision.prompt.again:
        data.recall(decision.prompt.again)
    return data


def step_data(
    decision: Decision, *, policy_name: str, step_rewards: StepRewards, costs: CostKeys | None = None
) -> StepData:
    """Return the record of a decision. `costs` contains the penalty for a refused decision, if any."""
    choice, outcome = decision.choice, decision.effect.outcome
    penalty = costs.invalid_action_penalty if costs and outcome.invalid_reason is not None else 0.0
    was, now = decision.before.achievements_counts, outcome.observation.achievements_counts
    action = dict(choice.action)
    if "name" in action:
        action.pop("tool_calls", None)  # the step stores the calls in `tool_calls`
    if outcome.invalid_reason is None:
        action.pop("invalid_reason", None)  # the environment accepted the text
    own = {name: value for name, value in choice.log_probs.items() if name not in RECORDED_ELSEWHERE}
    own = {name: value for name, value in own.items() if value is not None}
    return StepData(
        turn=decision.turn,
        observation_data=observation_data(decision.before, decision),
        next_observation=observation_data(outcome.observation),
        action_taken=encodable_json(action),
        tool_calls=decision.action.tool_calls,
        snapshot=decision.snapshot,
        raw_policy_output=None if choice.raw_output is None else encodable(choice.raw_output),
        policy_name=policy_name,
        sampling=choice.log_probs.get("sampling"),
        policy_logprobs=policy_logprobs(choice.log_probs) or encodable_json(own) or None,
        policy_value_estimate=choice.value,
        env_rewards=outcome.env_rewards,
        reward_parts=(*decision.effect.reward_parts, *_penalties(penalty)),
        metadata=step_metadata(was, now, turn=decision.turn, step_rewards=step_rewards),
        step_info=_step_info(decision),
    )


def mark_end(
    step: StepData, reason: StopReason, *, environment_truncated: bool, penalty: float = 0.0
) -> StepData:
    """Return the last step of an episode, marked as `terminated` by the task or as `truncated` by a limit.

    If the environment ended the episode, `environment_truncated` says whether a limit was the reason. If the
    next prompt was too long, `penalty` is added to the rewards of the step.
    """
    if reason is StopReason.CONTEXT_LENGTH:
        step = step.model_copy(update={"reward_parts": (*step.reward_parts, *_penalties(penalty))})
    truncated = ends_by_a_limit(reason) or (reason is StopReason.ENVIRONMENT_DONE and environment_truncated)
    return step.model_copy(
        update={"is_done": True, "terminated": not truncated, "truncated": truncated, "stop_reason": reason}
    )


def _penalties(value: float) -> tuple[RewardPart, ...]:
    return (RewardPart(source="penalty", value=value),) if value else ()


def _step_info(decision: Decision) -> StepInfo:
    outcome, log_probs = decision.effect.outcome, decision.choice.log_probs
    return StepInfo(
        tool_result=encodable(outcome.result),
        invalid_reason=None if outcome.invalid_reason is None else encodable(outcome.invalid_reason),
        executed_actions=tuple(map(encodable, outcome.executed_actions)),
        policy_s=decision.policy_s,
        environment_s=decision.environment_s,
        interaction_s=decision.effect.interaction_s,
        prompt_tokens=log_probs.get("prompt_tokens"),
        completion_tokens=log_probs.get("completion_tokens"),
        finish_reason=log_probs.get("finish_reason"),
        user_answer=decision.effect.answer,
    )


def policy_logprobs(log_probs: Mapping[str, Any]) -> PolicyLogprobs | None:
    """Return the exact tokens of a model call; None if `log_probs` lacks a required field."""
    fields = {name: log_probs[name] for name in LOGPROB_FIELDS if log_probs.get(name) is not None}
    return PolicyLogprobs.model_validate(fields) if fields.keys() >= EXACT_FIELDS else None
