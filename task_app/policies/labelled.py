"""A model plays and a teacher labels: every decision also records the teacher's choice.

A model that imitates games of a teacher is never told what to do where its own mistakes have led it.
Here it plays, so the states are its own, and [warmup] of a job imitates the labels.

Source: Ross, Gordon and Bagnell, DAgger, arXiv:1011.0686.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from pydantic import Field

from shared_schemas.messages import Message
from task_app.episode.actions import read_action
from task_app.policies.openai import ModelAccess, OpenAIAgentPolicy
from task_app.policies.openai_config import OpenAIConfig
from task_app.protocols import AgentPolicy, PolicyAnswer, RestorablePolicy


class LabelledConfig(OpenAIConfig):
    """Settings of the model that plays, and of the policy that labels."""

    teacher: str = Field(
        min_length=1, max_length=200, description="the policy that labels, such as crafter_teacher"
    )
    teacher_config: dict[str, Any] = Field(default_factory=dict, description="passed to the teacher")


class LabelledPolicy(OpenAIAgentPolicy):
    """Plays as `OpenAIAgentPolicy` does; the action's key `label` holds the teacher's calls and words.

    The teacher sees each observation; what it answers is never executed.
    """

    name = "labelled"

    def __init__(self, config: LabelledConfig, teacher: AgentPolicy, **access: Unpack[ModelAccess]) -> None:
        super().__init__(config, **access)
        self._teacher = teacher

    async def get_action(
        self,
        observation: Sequence[Message | Mapping[str, Any]],
        available_tools_specs: list[dict[str, Any]] | None = None,
    ) -> PolicyAnswer:
        action, raw, log_probs, value = await super().get_action(observation, available_tools_specs)
        answer, _, _, _ = await self._teacher.get_action(observation, available_tools_specs)
        return {**action, "label": _label(answer)}, raw, log_probs, value

    def snapshot(self) -> dict[str, Any]:
        """The model's state, and the teacher's where it has one."""
        own, teacher = super().snapshot(), self._teacher
        return {**own, "teacher": teacher.snapshot()} if isinstance(teacher, RestorablePolicy) else own

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        if isinstance(self._teacher, RestorablePolicy):
            self._teacher.restore(state.get("teacher") or {})


def _label(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The calls and words of a teacher's answer, and its mark where it is a random detour."""
    action = read_action(answer)
    label = {
        "content": action.text,
        "tool_calls": [call.model_dump(mode="json") for call in action.tool_calls],
    }
    return label | ({"exploratory": True} if answer.get("exploratory", False) else {})
