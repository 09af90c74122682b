"""The interaction for grade-school maths: a right answer ends the episode; wrong answers may be corrected."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from shared_schemas.base import Body
from shared_schemas.numbers import Number, last_number, read_number
from task_app.plugins import validate_config
from task_app.protocols import BaseInteraction

Method = Literal["strict", "flexible"]


def extract_solution(solution_str: str, method: Method = "strict") -> str | None:
    """Return the final answer in a text, or None if the text contains no answer.

    Commas, dollar signs and a full stop at the end of the answer are removed.

    Args:
        solution_str: the assistant's text. The published function reads only its last 300 characters, which
            may begin inside a number; this function reads the last 100,000.
        method: "strict" returns the last number after a mark, as in `#### 42`; "flexible" returns the last
            number.

    Raises:
        ValueError: the method is unknown.
    """
    answer = _find_answer(solution_str, method)
    return None if answer is None else answer.text


def compute_score(
    solution_str: str,
    ground_truth: str,
    method: Method = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` for the right answer, `format_score` for a wrong answer, 0 for no answer.

    Answers are compared as numbers: "42.0" equals "42", and "1,000" equals "1000". The published function
    compares texts, so it counts `#### 42.` at the end of a sentence as wrong. For no answer it returns the
    int 0, where this function returns the float 0.0.

    Raises:
        ValueError: the method is unknown, or the ground truth is not a number.

    Source: 5-interactions.md, and the function that it imports.
    """
    truth, answer = read_truth(ground_truth), _find_answer(solution_str, method)
    if answer is None:
        return 0.0
    return float(score if answer.equals(truth) else format_score)


def read_truth(ground_truth: Any) -> Number:
    """Parse the ground truth: the number that a right answer equals.

    Raises:
        ValueError: the ground truth is not a number. The message states only the type of the value, because
            the value is the secret answer, and errors reach logs and replies.
    """
    truth = read_number(ground_truth)
    if truth is None:
        found = f"a {type(ground_truth).__name__} that is no number"
        raise ValueError(f"ground_truth is {found}; the answer as a number or text is needed")
    return truth


def _find_answer(solution_str: str, method: Method) -> Number | None:
    if method not in ("strict", "flexible"):
        raise ValueError(f"method is {method!r}; known: strict, flexible")
    return last_number(solution_str, marked=method == "strict")


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
    """Scores the last assistant message by comparing its answer with `ground_truth` of the data row.

    As in the published class, the mark `#### ` is put before a message that does not begin with it. The
    method `strict` leaves the message unchanged, because the model itself must write this mark.

    Source: 5-interactions.md. Its example reads the last *user* message, and so never scores an answer
    (DESIGN.md 4.11).
    """

    never_blocks = True

    @staticmethod
    def ground_truth_is_number(config: Mapping[str, Any]) -> bool:
        return True

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._settings = validate_config(Gsm8kConfig, config)
        self._instance_dict: dict[str, dict[str, str]] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        ground_truth = kwargs.get("ground_truth")
        read_truth(ground_truth)
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
        # Compare again with the scores 0 and 1, because the configured scores may be equal to each other.
        right = self._score(instance_id, format_score=0.0, score=1.0) == 1.0
        return right, RIGHT if right else WRONG, score, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        settings = self._settings
        return self._score(instance_id, format_score=settings.format_score, score=settings.score)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._instance_dict.pop(instance_id, None)  # missing if the start was refused

    def _score(self, instance_id: str, *, format_score: float, score: float) -> float:
        instance, method = self._instance_dict[instance_id], self._settings.method
        return compute_score(instance["response"], instance["ground_truth"], method, format_score, score)


def last_answer(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the content of the last assistant message; empty if there is none."""
    contents = (each.get("content") for each in reversed(messages) if each.get("role") == "assistant")
    content = next(contents, "")
    return content if isinstance(content, str) else ""
