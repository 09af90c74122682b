"""Converts rollout requests to JSON bodies, and the error replies of task apps to exceptions. Pure."""

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
# The maximum of characters that a message quotes from each part of a problem.
_MOST_TOLD = 1_000


class CursorExpired(TaskAppError, code="cursor_expired"):
    """The task app was restarted after it issued the cursor, and has lost the requests it had accepted."""


class TaskAppLost(TaskAppError, code="task_app_lost"):
    """The task app does not answer, or answers with a server error. It may recover; other apps may work."""


class Answered(TaskAppError):
    """The task app answered that it cannot serve a request; `finding` explains why."""

    def __init__(self, detail: str, finding: Problem) -> None:
        super().__init__(detail)
        self.finding = finding


class Refused(Answered, code="request_refused"):
    """The task app refused a request because of the content of its body."""


class PluginFailed(Answered, code="plugin_failed", status=422, title="A plug-in failed", recurs=True):
    """A plug-in of the task app raised an exception. The message contains the exception, file and line."""


class BackendFailed(Answered, code="backend_failed"):
    """A server or process that the task app calls failed. The failure may be temporary."""


class NoPictures(TaskAppError, code="no_pictures"):
    """No pictures of an episode can be drawn, and a retry would fail too."""


class ReplayDeparts(NoPictures, code="replay_departs"):
    """The replay of an episode differs from the recorded episode."""


_OF_BACKENDS = (502, 504)
# A request that exceeded its deadline may still be running; a retry then gets its answer.
_GOES_ON = "deadline_exceeded"
_ANSWERS: dict[int, type[Answered]] = {
    422: Refused,
    424: PluginFailed,
    **dict.fromkeys(_OF_BACKENDS, BackendFailed),
}
# Error classes by the code of the problem that a task app reports.
_REFUSALS = {kind.code: kind for kind in (CursorExpired, NoPictures, ReplayDeparts)}


def json_in(text: str) -> Any:
    """Parse `text` as JSON; return None if it is not JSON."""
    try:
        return read_json(text)
    except ValueError:
        return None


def is_final(status: int, answer: Any) -> bool:
    """Return whether a reply with an error status is the task app's final answer, so that a retry is useless.

    The same status may come from a proxy; such a reply is not final.
    """
    if not isinstance(answer, dict):
        return False
    by_itself = status in _OF_BACKENDS and _kind_of_answer(status, problem_in(answer)) is not None
    return by_itself or answer.get("code") == "missing_environment_api_key"


def _kind_of_answer(status: int, problem: Problem | None) -> type[Answered] | None:
    """Return the error class for a problem that ends a request, or None if a retry may succeed."""
    return None if problem is None or problem.code == _GOES_ON else _ANSWERS.get(status)


def problem_in(answer: Any) -> Problem | None:
    """Parse the problem in a task app's reply; return None for any other reply, such as that of a proxy."""
    try:
        return Problem.model_validate(answer)
    except ValidationError:
        return None


def word_answer(answer: Any, text: str) -> str:
    """Return a text that describes an error reply.

    For a task app's problem, the text consists of detail, place and hint. For any other reply, it is the
    beginning of `text`.

    Args:
        answer: the reply as parsed JSON, or None.
        text: the body of the reply.
    """
    if not isinstance(answer, dict):
        return text[:200]
    parts = [answer.get("detail"), answer.get("where") and f"at {answer['where']}", answer.get("hint")]
    return "; ".join(str(part)[:_MOST_TOLD] for part in parts if part) or text[:200]


def refusal(status: int, answer: Any, sentence: str) -> TaskAppError:
    """Return the exception for a reply with an error status.

    Args:
        answer: the reply as parsed JSON, or None.
        sentence: the message of the exception.
    """
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
    """Return the first exception inside an exception group, at any depth, or `error` if it is no group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# The assumed limit of a request's bytes at a task app that does not report a limit.
DEFAULT_BODY_BYTES = 1 << 20
# The bytes of one slice are limited because a document or a snapshot makes requests large, and other requests
# wait until the slice is sent.
_SLICE_BYTES = 1 << 19
_SLICE_REQUESTS = 64
# Bytes of `{"rollouts": [` and `]}`, and of the separator between two requests.
_AROUND, _BETWEEN = 16, 2


def slices(
    requests: Sequence[RolloutRequest], *, max_body_bytes: int, url: str
) -> Iterator[list[dict[str, Any]]]:
    """Convert requests to JSON, and yield them in order in slices, each of which fits one POST body.

    Args:
        max_body_bytes: limit of the bytes of one body at the task app.
        url: address of the task app, for error messages.

    Raises:
        JobError: a single request exceeds `max_body_bytes`.
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
