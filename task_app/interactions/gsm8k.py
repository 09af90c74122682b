"""The interaction of grade-school maths: right answers end the episode, wrong ones are to be thought over."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from shared_schemas.base import Body
from task_app.interactions.entry import config_of
from task_app.interactions.gsm8k_score import Method, compute_score
from task_app.protocols import BaseInteraction

RIGHT = "Your response is correct!"
MARK = "#### "
WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


class Gsm8kConfig(Body):
    method: Method = Field(
        default="flexible",
        description="flexible: the last number, as published, which rewards any guess; strict: `#### 42`",
    )
    format_score: float = Field(default=0.0, description="of a wrong answer in the right form")
    score: float = Field(default=1.0, description="of the right answer")


class Gsm8kInteraction(BaseInteraction):
    """Scores the last assistant message against `ground_truth`, which the row gives.

    As published, the response that is scored begins with `#### `; with `strict` it is what the assistant
    wrote, for the mark is what that asks for.

    Source: 5-interactions.md, whose example reads the last *user* message and so never scores an answer;
    DESIGN.md 4.11.
    """

    never_blocks = True

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._settings = config_of(Gsm8kConfig, config)
        self._instance_dict: dict[str, dict[str, str]] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        ground_truth = kwargs.get("ground_truth")
        if not isinstance(ground_truth, str | int | float) or isinstance(ground_truth, bool):
            # Its type alone: errors are logged and answered, and the value is what the model is to find.
            kind = type(ground_truth).__name__
            raise ValueError(f"ground_truth is a {kind}; the answer as a number or text is needed")
        instance_id = await super().start_interaction(instance_id)
        self._instance_dict[instance_id] = {"response": "", "ground_truth": str(ground_truth)}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        answer = last_answer(messages)
        marked = self._settings.method == "strict" or answer.startswith(MARK)
        self._instance_dict[instance_id]["response"] = answer if marked else MARK + answer
        score = await self.calculate_score(instance_id)
        right = await self._is_right(instance_id)
        return right, RIGHT if right else WRONG, score, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        settings = self._settings
        return self._scored(instance_id, format_score=settings.format_score, score=settings.score)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        del self._instance_dict[instance_id]

    async def _is_right(self, instance_id: str) -> bool:
        # Not by the score: with score = 0.5, or format_score = score, it does not tell.
        return self._scored(instance_id, format_score=0.0, score=1.0) == 1.0

    def _scored(self, instance_id: str, *, format_score: float, score: float) -> float:
        kept = self._instance_dict[instance_id]
        return compute_score(
            kept["response"],
            kept["ground_truth"],
            method=self._settings.method,
            format_score=format_score,
            score=score,
        )


def last_answer(messages: Sequence[Mapping[str, Any]]) -> str:
    """What the assistant wrote last; nothing where it wrote nothing."""
    for message in reversed(messages):
        if message.get("role") == "assistant":
            content = message.get("content")
            return content if isinstance(content, str) else ""
    return ""
