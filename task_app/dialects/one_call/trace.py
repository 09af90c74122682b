"""Pure: `record.return_trace`: the decisions of a rollout as a session of events, in the ancestor's words."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from shared_schemas.trajectory import StepData, transcript


def trace(
    episodes: Sequence[Sequence[StepData]],
    run_id: str,
    *,
    whole: bool,
    metadata: Mapping[str, Any],
    created_at: datetime,
) -> dict[str, Any]:
    """`compact`, and with `whole` the events and the conversation too.

    `turn` in `decision_rewards` counts from 0 here, as readers of such traces expect; in steps, from 1.
    """
    steps = [step for episode in episodes for step in episode]
    messages = [message for episode in episodes for message in transcript(episode)]
    shown: dict[str, Any] = {
        "session_id": run_id,
        "created_at": created_at.astimezone(UTC).isoformat(),
        "metadata": dict(metadata),
        "events_count": len(steps),
        "messages_count": len(messages),
        "lm_calls": [_lm_call(step) for step in steps],
        "decision_rewards": [_decision_rewards(step) for step in steps if step.metadata.decision_rewards],
    }
    if whole:
        shown["event_history"] = [_event(step) for step in steps]
        shown["messages"] = [message.model_dump(mode="json", exclude_none=True) for message in messages]
    return shown


def _lm_call(step: StepData) -> dict[str, Any]:
    took = step.step_info
    return {
        "step_id": f"decision_{step.turn - 1}",
        "tool_calls": [call.model_dump(mode="json", exclude_none=True) for call in step.tool_calls],
        "raw_response": step.raw_policy_output,
        "prompt_tokens": took.prompt_tokens,
        "completion_tokens": took.completion_tokens,
        "latency_ms": 1_000 * took.policy_s,
    }


def _decision_rewards(step: StepData) -> dict[str, Any]:
    earned = step.metadata.decision_rewards
    assert earned is not None
    return {
        "turn": earned.turn - 1,
        "ach_delta": earned.ach_delta,
        "unique_delta": earned.unique_delta,
        "achievements": list(earned.all),
        "unique_achievements": list(earned.unique),
    }


def _event(step: StepData) -> dict[str, Any]:
    return {
        "event_type": "environment",
        "step_id": f"decision_{step.turn - 1}",
        "reward": float(sum(step.env_rewards or ())),
        "executed_actions": list(step.step_info.executed_actions),
        "terminated": step.terminated,
        "truncated": step.truncated,
    }
