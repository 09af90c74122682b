"""A policy in which a model plays and a teacher labels: each decision also records the teacher's choice.

A model that imitates a teacher's own episodes never learns what to do after its own mistakes. Here the model
plays, so the labelled states are those that the model reaches. [warmup] of a job then imitates the labels.

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
    """Plays like `OpenAIAgentPolicy`; the action's key `label` contains the teacher's calls and text.

    The teacher is asked at each observation, but only the model's action is executed.
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
        return {**action, "label": _make_label(answer)}, raw, log_probs, value

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the model's policy, and the teacher's state if the teacher has snapshots."""
        own, teacher = super().snapshot(), self._teacher
        return {**own, "teacher": teacher.snapshot()} if isinstance(teacher, RestorablePolicy) else own

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        if isinstance(self._teacher, RestorablePolicy):
            self._teacher.restore(state.get("teacher") or {})


def _make_label(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return calls and text of a teacher's answer, with `exploratory` set if it is a random detour."""
    action = read_action(answer)
    label = {
        "content": action.text,
        "tool_calls": [call.model_dump(mode="json") for call in action.tool_calls],
    }
    return label | ({"exploratory": True} if answer.get("exploratory", False) else {})
