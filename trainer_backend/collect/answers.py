"""What a task app answered, when it is an error or nothing that a task app would say. Pure."""

import json
from typing import Any

from pydantic import ValidationError

from shared_schemas.problem import Problem
from trainer_backend.errors import TaskAppError

_INVALID = 422
_ITS_OWN_FAULT = 500


class CursorExpired(TaskAppError):
    """The task app was started anew since the cursor was given; what it had accepted is lost."""

    code = "cursor_expired"


class TaskAppLost(TaskAppError):
    """The task app does not answer, or only with errors of its own; others may, and it may come back."""

    code = "task_app_lost"


class Refused(TaskAppError):
    """The task app finds something wrong in the body of a request; `problem_found` says what, and where."""

    code = "request_refused"

    def __init__(self, detail: str, problem_found: Problem) -> None:
        super().__init__(detail)
        self.problem_found = problem_found


def json_in(text: str) -> Any:
    """The JSON in `text`, or None where there is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def is_final(answer: Any) -> bool:
    """Whether an answer with a status that says 'later' will be the same later."""
    return isinstance(answer, dict) and answer.get("code") == "missing_environment_api_key"


def told_by(answer: Any, text: str) -> str:
    """The problem's own words, its place and its hint, if the answer is a problem."""
    if not isinstance(answer, dict):
        return text[:200]
    parts = [answer.get("detail"), answer.get("where") and f"at {answer['where']}", answer.get("hint")]
    return "; ".join(str(part) for part in parts if part) or text[:200]


def refusal(status: int, answer: Any, sentence: str) -> TaskAppError:
    """The error that an answer with an error status stands for; `sentence` tells it."""
    if isinstance(answer, dict) and answer.get("code") == CursorExpired.code:
        return CursorExpired(sentence)
    if status >= _ITS_OWN_FAULT and not is_final(answer):
        return TaskAppLost(sentence)
    if status != _INVALID:
        return TaskAppError(sentence)
    try:
        return Refused(sentence, Problem.model_validate(answer))
    except ValidationError:
        return TaskAppError(sentence)


def first_finding(error: ValidationError) -> str:
    """`accepted.0: Input should be a valid string`; what was found is left out: it may be a whole page."""
    first, *others = error.errors(include_url=False, include_input=False, include_context=False)
    place = ".".join(map(str, first["loc"])) or "the answer"
    return f"{place}: {first['msg']}" + (f" (and {len(others)} more)" if others else "")
