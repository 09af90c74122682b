"""Pure: observations, outcomes and actions as the environment and policy routes show them."""

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from pydantic_core import PydanticSerializationError, to_json
from starlette.responses import JSONResponse

from shared_schemas.messages import Message
from shared_schemas.trajectory import StepMetadata
from task_app.actions import ReadAction
from task_app.decisions import NO_METADATA, achievements_added, achievements_status
from task_app.protocols import DecisionOutcome, Observation


class ReplyJSON(JSONResponse):
    """JSON that half a character in a plug-in's text cannot break, and that a NaN does break."""

    def render(self, content: Any) -> bytes:
        return reply_body(content)


def reply_body(content: Any) -> bytes:
    """What a ReplyJSON sends; raises ValueError for a NaN."""
    # A quarter of the cost of json.dumps. It writes a NaN as NaN, which is no JSON, and refuses half a
    # character: both are left to the slow way below, which refuses the one and replaces the other.
    with suppress(PydanticSerializationError):
        body = to_json(content, inf_nan_mode="constants")
        if b"NaN" not in body and b"Infinity" not in body:
            return body
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def observation_json(observation: Observation) -> dict[str, Any]:
    """What every observation carries in every mode (DESIGN.md 4.2), the text, and the data behind it."""
    counts = dict(observation.achievements_counts)
    return {
        "text": observation.text,
        "data": dict(observation.data),
        "achievements_status": achievements_status(counts),
        "achievements_counts": counts,
        "reward_last_step": observation.reward_last_step,
    }


def step_json(
    before: Observation, outcome: DecisionOutcome, *, turn: int, step_idx: int, metadata: StepMetadata
) -> dict[str, Any]:
    """Answer of POST /env/step; `reward` is the sum of `env_rewards`."""
    after = outcome.observation
    return {
        "observation": observation_json(after),
        "reward": float(sum(outcome.env_rewards)),
        "done": outcome.terminated or outcome.truncated,
        "terminated": outcome.terminated,
        "truncated": outcome.truncated,
        "env_rewards": list(outcome.env_rewards),
        "reward_parts": [],
        "step_idx": step_idx,
        "info": {
            "turn": turn,
            "achievements_added": achievements_added(before.achievements_counts, after.achievements_counts),
            "invalid_reason": outcome.invalid_reason,
            "executed_actions": list(outcome.executed_actions),
            "tool_result": outcome.result,
        },
        "metadata": {} if metadata is NO_METADATA else metadata.model_dump(mode="json", exclude_none=True),
    }


def tool_calls_json(read: ReadAction) -> list[dict[str, Any]]:
    """In OpenAI's form, as POST /env/step takes them."""
    return [call.model_dump(mode="json", exclude_none=True) for call in read.tool_calls]


def messages_json(messages: Iterable[Message]) -> list[dict[str, Any]]:
    return [message.model_dump(mode="json", exclude_none=True) for message in messages]
