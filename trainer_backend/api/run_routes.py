"""What came of a job's run so far: its curves, its log."""

from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field

from shared_schemas.base import Body
from trainer_backend.api.finding import job_named
from trainer_backend.api.log_lines import last_piece
from trainer_backend.api.service import service_of
from trainer_backend.rundir import run_log
from trainer_backend.store import reads
from trainer_backend.store.rows import JobRow
from trainer_backend.supervising.processes import PROCESS_LOG

router = APIRouter(tags=["runs"])

_FILES = {"run": run_log.FILE, "process": PROCESS_LOG, "task_app": "task_app.log"}


class Curve(Body):
    """A metric over iterations; of one that was thinned, means of stretches with their bounds."""

    iterations: tuple[int, ...]
    values: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


class Metrics(Body):
    job_id: str
    kind: str
    series: dict[str, Curve]


class MetricsQuery(Body):
    names: tuple[str, ...] = Field(
        default=(), max_length=200, description="`time/*`: all that begin so; may be repeated; absent: all"
    )
    kind: str = Field(default="iteration", max_length=40, description="of rows: iteration, evaluation …")
    points: int = Field(default=300, ge=2, le=5000, description="at most so many a curve")


class Line(Body):
    """`time` is UTC; empty where the file has none."""

    time: str
    text: str


class Log(Body):
    """`next_offset` is given to the next request: only what is new comes then."""

    lines: tuple[Line, ...]
    next_offset: int


class LogQuery(Body):
    part: Literal["run", "process", "task_app"] = Field(
        default="run", description="what the run told; all that its process, or its own task app, printed"
    )
    offset: int = Field(default=0, ge=0, le=2**53, description="`next_offset` of the answer before")
    tail: int = Field(default=1000, ge=1, le=10_000, description="the last so many lines of what is new")


@router.get("/jobs/{job_id}/metrics")
async def metrics(request: Request, job_id: str, query: Annotated[MetricsQuery, Query()]) -> Metrics:
    """Curves of a run, by metric name; docs/metrics.md says what each means."""
    service = service_of(request)
    job = await job_named(service, job_id)
    names = query.names or await service.ask(reads.metric_names, service.store, job.id, query.kind)
    found = await service.ask(
        reads.series, service.store, [job.id], names, kind=query.kind, points=query.points
    )
    series = {
        name: Curve(iterations=one.iterations_N, values=one.values_N, low=one.low_N, high=one.high_N)
        for name, one in found[job.id].items()
    }
    return Metrics(job_id=job.id, kind=query.kind, series=series)


@router.get("/jobs/{job_id}/log")
async def log(request: Request, job_id: str, query: Annotated[LogQuery, Query()]) -> Log:
    """What a run has told, line by line; of a long log the last megabyte."""
    service = service_of(request)
    return await service.ask(_log, await job_named(service, job_id), query)


def _log(job: JobRow, query: LogQuery) -> Log:
    if job.run_dir is None:
        return Log(lines=(), next_offset=0)
    piece = last_piece(Path(job.run_dir, _FILES[query.part]), query.offset)
    if query.part == "run":
        lines = [Line(time=line.time, text=line.text) for line, _ in piece.told()]
    else:
        lines = [Line(time="", text=text) for text in piece.texts()]
    return Log(lines=tuple(lines[-query.tail :]), next_offset=piece.end)
