"""Pure: the score of an answer to a grade-school maths problem, as `verl.utils.reward_score.gsm8k` has it."""

import re
from decimal import Decimal, InvalidOperation
from typing import Literal

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
