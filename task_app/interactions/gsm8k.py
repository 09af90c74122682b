"""The interaction of grade-school maths: a right answer ends the episode, a wrong one may be corrected."""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from pydantic import Field

from shared_schemas.base import Body
from task_app.plugins import config_of
from task_app.protocols import BaseInteraction

Method = Literal["strict", "flexible"]

# As published: the answer stands at the end, and a search through megabytes would block the event loop.
_TAIL = 300
_STRICT = re.compile(r"#### (-?\$?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def extract_solution(solution_str: str, method: Method = "strict") -> str | None:
    """The final answer in a text, without commas, dollar signs and trailing full stop.

    Args:
        solution_str: what the assistant wrote; only its last 300 characters are read.
        method: "strict" finds the last `#### 42`, "flexible" the last number.

    Returns:
        The number as text, or None if there is none.

    Raises:
        ValueError: the method is unknown.
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
    """`score` for the right answer, `format_score` for a wrong one, 0 for no answer.

    Equal numbers are equal answers: "42.0" and "42", "1,000" and "1000". The published function compares
    text, so `#### 42.` at the end of a sentence is wrong there, and it returns the int 0 for no answer.

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
    """The number as Decimal, so that 42.0 equals 42; text that is no number equals only itself."""
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
    """Scores the last assistant message against `ground_truth` of the data row.

    As published, `#### ` is put in front of a response that lacks it. `strict` scores the response as it was
    written, because the mark is what `strict` checks.

    Source: 5-interactions.md. Its example reads the last *user* message and so never scores an answer;
    DESIGN.md 4.11 says why ours differs.
    """

    never_blocks = True

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._settings = config_of(Gsm8kConfig, config)
        self._instance_dict: dict[str, dict[str, str]] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        ground_truth = kwargs.get("ground_truth")
        if not isinstance(ground_truth, str | int | float) or isinstance(ground_truth, bool):
            # Only the type is shown: errors reach logs and replies, and the value is the secret answer.
            kind = type(ground_truth).__name__
            raise ValueError(f"ground_truth is a {kind}; the answer as a number or text is needed")
        instance_id = await super().start_interaction(instance_id)
        self._instance_dict[instance_id] = {"response": "", "ground_truth": str(ground_truth)}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        answer = last_answer(messages)
        has_mark = self._settings.method == "strict" or answer.startswith(MARK)
        self._instance_dict[instance_id]["response"] = answer if has_mark else MARK + answer
        score = await self.calculate_score(instance_id)
        right = await self._is_right(instance_id)
        return right, RIGHT if right else WRONG, score, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        settings = self._settings
        return self._score(instance_id, format_score=settings.format_score, score=settings.score)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        del self._instance_dict[instance_id]

    async def _is_right(self, instance_id: str) -> bool:
        # Not decided by the score, which does not tell when score = 0.5 or format_score = score.
        return self._score(instance_id, format_score=0.0, score=1.0) == 1.0

    def _score(self, instance_id: str, *, format_score: float, score: float) -> float:
        instance = self._instance_dict[instance_id]
        return compute_score(
            instance["response"],
            instance["ground_truth"],
            method=self._settings.method,
            format_score=format_score,
            score=score,
        )


def last_answer(messages: Sequence[Mapping[str, Any]]) -> str:
    """The content of the last assistant message; empty if there is none."""
    for message in reversed(messages):
        if message.get("role") == "assistant":
            content = message.get("content")
            return content if isinstance(content, str) else ""
    return ""
