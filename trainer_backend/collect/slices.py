"""Rollout requests as they are sent: as JSON, and as many at a time as a task app takes. Pure."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from shared_schemas.rollouts import RolloutRequest
from trainer_backend.collect.sources import row_of
from trainer_backend.errors import JobError

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
    """
    Raises:
        JobError: the task app at `url` would not take the request, even alone; it names the row.
    """
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
