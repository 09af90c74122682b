"""A dialogue without tools and without a world, as a `ConversationalEnvironment`.

The rollout's interaction (a simulated user, see task_app.interactions) replies to the model and scores its
answers, or a reward function scores the whole dialogue. The environment itself gives no reward.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import Field, field_validator

from shared_schemas.base import Body
from shared_schemas.messages import Message, ToolSpec, dialogue_opening, refuse_no_opening
from task_app.complaints import state_in
from task_app.errors import started
from task_app.past import refuse_decision
from task_app.plugins import EnvironmentPlugin
from task_app.protocols import DecisionOutcome, Observation, PastDecision, ToolRequest

NO_TOOLS = "there are no tools here; answer in words"


class DialogueConfig(Body):
    """The prompt of a dialogue. The system message `system` is used only if `prompt` is a text."""

    prompt: tuple[Message, ...] | str = Field(
        min_length=1, description="chat messages, or the text of a user message"
    )
    system: str = Field(default="", max_length=100_000)

    @field_validator("prompt", mode="before")
    @classmethod
    def _opens_a_dialogue(cls, prompt: Any) -> Any:
        refuse_no_opening(prompt, "prompt")
        return prompt


class DialogueState(Body):
    """The number of the model's answers so far; the episode itself stores the conversation."""

    answers: int = Field(ge=0, strict=True)


class DialogueEnvironment:
    """Runs one dialogue; its opening is the same for every seed."""

    name = "dialogue"
    outcome_definition = ""
    quick_step = True

    def __init__(self, config: DialogueConfig) -> None:
        self._opening = dialogue_opening(config.prompt, config.system)
        self._answers: int | None = None

    def reset(self, seed: int) -> Observation:
        self._answers = 0
        return self._observation()

    def opening(self) -> tuple[Message, ...]:
        started(self._answers)
        return self._opening

    def step(self, calls: Sequence[ToolRequest], *, invalid_reason: str | None = None) -> DecisionOutcome:
        started(self._answers)
        return refuse_decision(self._observation(), calls, invalid_reason or NO_TOOLS)

    def answer(self, text: str) -> DecisionOutcome:
        self._answers = started(self._answers) + 1
        return DecisionOutcome(self._observation(), env_rewards=(0.0,), executed_actions=("answer",))

    def tools(self) -> tuple[ToolSpec, ...]:
        return ()

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        return self._opening

    def outcome_reward(self) -> float:
        return 0.0

    def snapshot(self) -> bytes:
        return DialogueState(answers=started(self._answers)).model_dump_json().encode()

    def restore(self, state: bytes) -> Observation:
        self._answers = state_in(DialogueState, state).answers
        return self._observation()

    def _observation(self) -> Observation:
        return Observation(self._opening[-1].content or "", {"answers": self._answers or 0})


PLUGIN = EnvironmentPlugin(DialogueConfig, DialogueEnvironment)
