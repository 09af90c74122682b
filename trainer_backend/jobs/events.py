"""GET /jobs/{job_id}/events: the progress of a job as server-sent events.

    metrics   a new row of metrics.jsonl                   {"kind", "iteration", "row"}
    log       a new line of the run's log                  {"time", "text"}
    state     the job, whenever it or its progress changed (as GET /jobs/{job_id})
    store     the database does not answer; missed events follow when it answers again
    end       the last event: the job has ended, or was deleted

Each `metrics` and `log` event carries an id: the position in the stream after this event. A client that sends
the last id back as Last-Event-ID, as browsers do, continues from there.
"""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import Header, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import StreamingResponse

from shared_schemas.base import Body
from trainer_backend.errors import ApiError, TooManyStreams
from trainer_backend.jobs.router import Router
from trainer_backend.jobs.run_routes import Piece, read_piece
from trainer_backend.jobs.service import Service, find_job, get_service, job_view
from trainer_backend.rundir.state import LOG_FILE
from trainer_backend.store import jobs, reads
from trainer_backend.store.database import StoreUnavailable, UnknownJob
from trainer_backend.store.rows import ENDED, JobView

router = Router(tags=["runs"])

_MOST_ROWS = 200
# The most digits that every database and every file offset accepts.
_MOST_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Place:
    """A position in the stream: the number of the last metrics row, and the byte after the last log line."""

    row: int = 0
    byte: int = 0

    def __str__(self) -> str:
        return f"{self.row}.{self.byte}"

    @classmethod
    def read(cls, text: str) -> "Place":
        row, _, byte = text.partition(".")
        if not all(part.isdecimal() and len(part) <= _MOST_DIGITS for part in (row, byte)):
            raise ApiError(f"{text[:40]!r} is no event id of this service", where="header Last-Event-ID")
        return cls(int(row), int(byte))


class EventsQuery(Body):
    after: str | None = Field(
        default=None, max_length=40, description="an event id, as Last-Event-ID; absent: from the beginning"
    )


@router.get(
    "/jobs/{job_id}/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def stream_job_events(
    request: Request,
    job_id: str,
    query: Annotated[EventsQuery, Query()],
    last_event_id: Annotated[str | None, Header(max_length=40)] = None,
) -> StreamingResponse:
    """Stream a job's progress as server-sent events.

    The events are `metrics`, `log`, `state`, `store` and `end`. Comment lines keep an idle connection open.
    """
    service = get_service(request)
    place = Place.read(last_event_id or query.after or "0.0")
    job = await find_job(service, job_id)
    if service.streams >= service.settings.max_streams:
        raise TooManyStreams(f"{service.streams} event streams are open, the most that this service holds")
    return StreamingResponse(
        _stream(service, job.id, place),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _stream(service: Service, job_id: str, place: Place) -> AsyncIterator[bytes]:
    last_job: JobView | None = None
    service.streams += 1
    try:
        while not service.news.closed:
            count = service.news.count(job_id)  # first, so that no news is missed during the read
            try:
                job, events, place, more = await service.line.ask(_look, service, job_id, place)
            except UnknownJob:
                yield _event("end", {"state": "deleted"})
                return
            except StoreUnavailable as error:
                yield _event("store", error.problem())
                await service.news.wait(job_id, count, at_most_s=service.settings.heartbeat_s)
                continue
            for event in events:
                yield event
            if more:
                continue
            if job != last_job:
                last_job = job
                yield _event("state", job)
            if job.state in ENDED:
                yield _event("end", {"state": job.state})
                return
            if not await service.news.wait(job_id, count, at_most_s=service.settings.heartbeat_s):
                yield b": still here\n\n"
    finally:
        service.streams -= 1


def _look(service: Service, job_id: str, before: Place) -> tuple[JobView, list[bytes], Place, bool]:
    """Return the job, the events after a position, the next position, and whether there are more events."""
    job = jobs.get(service.store, job_id)  # first: after the job's end, rows and log are complete
    rows = reads.metric_lines(service.store, job_id, after=before.row, limit=_MOST_ROWS)
    log = read_piece(Path(job.run_dir, LOG_FILE), before.byte) if job.run_dir else Piece()
    place = Place(rows[-1].number if rows else before.row, log.end)
    events: list[bytes] = []
    for row in rows:
        data = {"kind": row.kind, "iteration": row.iteration, "row": dict(row.row)}
        events.append(_event("metrics", data, Place(row.number, before.byte)))
    for line, end in log.log_lines():
        events.append(_event("log", {"time": line.time, "text": line.text}, Place(place.row, end)))
    return job_view(job), events, place, len(rows) == _MOST_ROWS or log.more


def _event(name: str, data: BaseModel | dict[str, Any], place: Place | None = None) -> bytes:
    text = data.model_dump_json() if isinstance(data, BaseModel) else json.dumps(data)
    identity = f"id: {place}\n" if place is not None else ""
    return f"event: {name}\n{identity}data: {text}\n\n".encode()
