"""Rollout requests as JSON in batches, and the errors of task apps. Pure."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from shared_schemas.json_text import read_json
from shared_schemas.problem import Problem
from shared_schemas.rollouts import RolloutRequest
from trainer_backend.collect.sources import read_row_id
from trainer_backend.errors import JobError, TaskAppError

_ITS_OWN_FAULT = 500
# The most characters of each part of a problem in a message.
_MOST_TOLD = 1_000


class CursorExpired(TaskAppError, code="cursor_expired"):
    """The task app was restarted after it gave the cursor, and has lost its accepted requests."""


class TaskAppLost(TaskAppError, code="task_app_lost"):
    """The task app does not answer, or fails; it may recover, and others may answer."""


class Answered(TaskAppError):
    """The task app works, and explains in `finding` why it cannot serve a request."""

    def __init__(self, detail: str, finding: Problem) -> None:
        super().__init__(detail)
        self.finding = finding


class Refused(Answered, code="request_refused"):
    """The task app refused the body of a request."""


class PluginFailed(Answered, code="plugin_failed", status=422, title="A plug-in failed", recurs=True):
    """A plug-in of the task app raised; the message has the exception, file and line."""


class BackendFailed(Answered, code="backend_failed"):
    """A server or process that the task app calls failed, perhaps temporarily; the message is its own."""


class NoPictures(TaskAppError, code="no_pictures"):
    """An episode has no pictures, and a retry would not change that."""


class ReplayDeparts(NoPictures, code="replay_departs"):
    """The replay of an episode differs from the record."""


_OF_BACKENDS = (502, 504)
# A request that took too long may still finish, and a retry gets its answer.
_GOES_ON = "deadline_exceeded"
_ANSWERS: dict[int, type[Answered]] = {
    422: Refused,
    424: PluginFailed,
    **dict.fromkeys(_OF_BACKENDS, BackendFailed),
}
# Errors by the code of a task app's problem.
_REFUSALS = {kind.code: kind for kind in (CursorExpired, NoPictures, ReplayDeparts)}


def json_in(text: str) -> Any:
    """Parse `text` as JSON; return None if it is not JSON."""
    try:
        return read_json(text)
    except ValueError:
        return None


def is_final(status: int, answer: Any) -> bool:
    """Return whether an error status, which a proxy could also send, is the task app's final answer."""
    if not isinstance(answer, dict):
        return False
    by_itself = status in _OF_BACKENDS and _kind_of_answer(status, problem_in(answer)) is not None
    return by_itself or answer.get("code") == "missing_environment_api_key"


def _kind_of_answer(status: int, problem: Problem | None) -> type[Answered] | None:
    """Return the error class of a problem that is a final answer to the request; None for any other."""
    return None if problem is None or problem.code == _GOES_ON else _ANSWERS.get(status)


def problem_in(answer: Any) -> Problem | None:
    """Read a task app's problem; None for another answer, such as a proxy's."""
    try:
        return Problem.model_validate(answer)
    except ValidationError:
        return None


def word_answer(answer: Any, text: str) -> str:
    """Describe a problem by its detail, place and hint, and another answer by its beginning."""
    if not isinstance(answer, dict):
        return text[:200]
    parts = [answer.get("detail"), answer.get("where") and f"at {answer['where']}", answer.get("hint")]
    return "; ".join(str(part)[:_MOST_TOLD] for part in parts if part) or text[:200]


def refusal(status: int, answer: Any, sentence: str) -> TaskAppError:
    """Convert an answer with an error status to an error with the message `sentence`."""
    kind = _REFUSALS.get(str(answer.get("code"))) if isinstance(answer, dict) else None
    if kind is not None:
        return kind(sentence)
    problem = problem_in(answer)
    answered = _kind_of_answer(status, problem)
    if answered is not None and problem is not None:
        return answered(sentence, problem)
    if status >= _ITS_OWN_FAULT and not is_final(status, answer):
        return TaskAppLost(sentence)
    return TaskAppError(sentence)


def pick_error(error: BaseException) -> BaseException:
    """Return the first leaf of a group of errors; one is enough for the user."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# The limit of a task app that does not report one.
DEFAULT_BODY_BYTES = 1 << 20
# Bytes of one slice. Requests with a document or snapshot are large, and others wait until the slice is sent.
_SLICE_BYTES = 1 << 19
_SLICE_REQUESTS = 64
# Bytes of `{"rollouts": [` and `]}`, and of the separator between two requests.
_AROUND, _BETWEEN = 16, 2


def slices(
    requests: Sequence[RolloutRequest], *, max_body_bytes: int, url: str
) -> Iterator[list[dict[str, Any]]]:
    """Yield the requests as JSON, in order, in slices limited by number and by bytes.

    Args:
        max_body_bytes: limit of one body at the task app at `url`.

    Raises:
        JobError: a single request is larger.
    """
    part: list[dict[str, Any]] = []
    limit = min(_SLICE_BYTES, max_body_bytes) - _AROUND
    room = limit
    for request in requests:
        wire = request.model_dump(mode="json")
        if (key := request.policy.inference_key) is not None:  # pydantic masks it
            wire["policy"]["inference_key"] = key.get_secret_value()
        size = len(json.dumps(wire)) + _BETWEEN
        if size > max_body_bytes - _AROUND:
            raise _too_large(request, size + _AROUND, max_body_bytes, url)
        if part and (len(part) == _SLICE_REQUESTS or size > room):
            yield part
            part, room = [], limit
        part.append(wire)
        room -= size
    if part:
        yield part


def _too_large(request: RolloutRequest, size: int, max_body_bytes: int, url: str) -> JobError:
    row = read_row_id(request.group_id)
    return JobError(
        f"its request has {size:,} bytes, and the task app at {url} takes {max_body_bytes:,}",
        where=f"rollout {request.rollout_id}" if row is None else f"data.path, row {row!r}",
        hint="The task app's TURNWISE_MAX_BODY_BYTES says how many it takes.",
    )
