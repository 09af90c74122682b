"""The wire to task apps: rollout requests as JSON, in batches, and the errors that may come back. Pure."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from shared_schemas.problem import Problem
from shared_schemas.rollouts import RolloutRequest
from trainer_backend.collect.sources import row_of
from trainer_backend.errors import JobError, TaskAppError

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


class NoPictures(TaskAppError):
    """An episode has no pictures, and a retry would not change that."""

    code = "no_pictures"


# By the code of the problem that a task app answers with.
_REFUSALS = {kind.code: kind for kind in (CursorExpired, NoPictures)} | {"replay_departs": NoPictures}


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
    kind = _REFUSALS.get(str(answer.get("code"))) if isinstance(answer, dict) else None
    if kind is not None:
        return kind(sentence)
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


# What a task app takes by default, where it does not say.
DEFAULT_BODY_BYTES = 1 << 20
# Of one slice: requests that bring a document or a snapshot are large, and others wait behind them.
_SLICE_BYTES = 1 << 19
_SLICE_REQUESTS = 64
# `{"rollouts": [` and `]}`; what parts two requests is counted with each.
_AROUND, _BETWEEN = 16, 2


def slices(
    requests: Sequence[RolloutRequest], *, max_body_bytes: int, url: str
) -> Iterator[list[dict[str, Any]]]:
    """The requests as JSON, in order, parted by number and by the bytes that they are sent as.

    Args:
        max_body_bytes: of one body, as the task app at `url` bounds it.

    Raises:
        JobError: a single one is larger.
    """
    part: list[dict[str, Any]] = []
    most = min(_SLICE_BYTES, max_body_bytes) - _AROUND
    room = most
    for request in requests:
        wire = _wire(request)
        size = _size(wire)
        if size > max_body_bytes - _AROUND:
            raise _too_large(request, size + _AROUND, max_body_bytes, url)
        if part and (len(part) == _SLICE_REQUESTS or size > room):
            yield part
            part, room = [], most
        part.append(wire)
        room -= size
    if part:
        yield part


def refuse_too_large(request: RolloutRequest, *, max_body_bytes: int, url: str) -> None:
    """"""
    for _ in slices([request], max_body_bytes=max_body_bytes, url=url):
        pass


def _too_large(request: RolloutRequest, size: int, max_body_bytes: int, url: str) -> JobError:
    row = row_of(request.group_id)
    return JobError(
        f"its request has {size:,} bytes, and the task app at {url} takes {max_body_bytes:,}",
        where=f"rollout {request.rollout_id}" if row is None else f"data.path, row {row!r}",
        hint="The task app's TURNWISE_MAX_BODY_BYTES says how many it takes.",
    )


def _size(wire: dict[str, Any]) -> int:
    """Bytes, as aiohttp writes JSON: in ASCII."""
    return len(json.dumps(wire)) + _BETWEEN


def _wire(request: RolloutRequest) -> dict[str, Any]:
    """As JSON; pydantic masks secrets, so the key is put back for this one request."""
    out = request.model_dump(mode="json")
    if request.policy.inference_key is not None:
        out["policy"]["inference_key"] = request.policy.inference_key.get_secret_value()
    return out
