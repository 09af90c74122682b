"""The interaction of grade-school maths: right answers end the episode, wrong ones are to be thought over."""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from pydantic import Field

from shared_schemas.base import Body
from task_app.plugins import config_of
from task_app.protocols import BaseInteraction

# Pure: the score of an answer to a grade-school maths problem, as `verl.utils.reward_score.gsm8k` has it.

Method = Literal["strict", "flexible"]

# As published: an answer stands at the end, and a search through megabytes would hold up everybody.
_TAIL = 300
_STRICT = re.compile(r"#### (-?\$?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def extract_solution(solution_str: str, method: Method = "strict") -> str | None:
    """The final answer in a text, without commas, dollar signs and a full stop behind it.

    Args:
        solution_str: what the assistant wrote; its last 300 characters are read.
        method: "strict" finds the last `#### 42`, "flexible" the last number, whatever it stands for.

    Returns:
        The number as text, or None where there is none.

    Raises:
        ValueError: another method.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method is {method!r}; known: strict, flexible")
    pattern = _STRICT if method == "strict" else _NUMBER
    numbers = [_plain(text) for text in pattern.findall(solution_str[-_TAIL:])]
    return next((number for number in reversed(numbers) if any(map(str.isdigit, number))), None)


def compute_score(
    solution_str: str,
    ground_truth: str,
    method: Method = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` for the right answer, `format_score` for a wrong one, 0 for none.

    Equal numbers are equal answers: "42.0" and "42", "1,000" and "1000". The published function compares
    text, so that `#### 42.` at the end of a sentence is wrong, and answers the int 0 for none.

    Args:
        solution_str: what the assistant wrote.
        ground_truth: the number as text.
        method: of `extract_solution`.

    Source: 5-interactions.md, and the function that it imports.
    """
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return float(score if _value(answer) == _value(_plain(str(ground_truth))) else format_score)


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "").strip().removesuffix(".")


def _value(number: str) -> Decimal | str:
    """As a number, so that 42.0 is 42; "1.2.3" stays text, and equals only itself."""
    try:
        return Decimal(number)
    except InvalidOperation:
        return number


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
