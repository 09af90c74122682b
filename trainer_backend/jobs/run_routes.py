"""Routes that read the run of a job: its metrics as curves, and its logs."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated

from fastapi import Query, Request
from pydantic import Field

from shared_schemas.base import Body
from trainer_backend.jobs.processes import PROCESS_LOG
from trainer_backend.jobs.router import Router
from trainer_backend.jobs.service import find_job, get_service
from trainer_backend.rundir.files import parse_object
from trainer_backend.rundir.state import LOG_FILE, LogLine, parse_line
from trainer_backend.store import reads
from trainer_backend.store.rows import Curve, Job

router = Router(tags=["runs"])

_FILES = {"run": LOG_FILE, "process": PROCESS_LOG}  # the files of other parts are called PART.log


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


class Log(Body):
    """Lines of a log. Send `next_offset` as `offset` in the next request to receive only new lines."""

    lines: tuple[LogLine, ...]
    next_offset: int


class LogQuery(Body):
    part: str = Field(
        default="run",
        pattern=r"^(run|process|task_app(_\d{1,2})?|learner|gateway_\d{1,2})$",
        description="run: what the run told; process, task_app: all that its process or its own task app "
        "printed; task_app_1, ...: those of its further task apps; learner, gateway_0, gateway_1, ...: those "
        "of its processes with [cluster]",
    )
    offset: int = Field(default=0, ge=0, le=2**53, description="`next_offset` of the answer before")
    tail: int = Field(default=1000, ge=1, le=10_000, description="the last so many lines of what is new")


@router.get("/jobs/{job_id}/metrics")
async def show_job_metrics(request: Request, job_id: str, query: Annotated[MetricsQuery, Query()]) -> Metrics:
    """Return the curves of a run by metric name. docs/metrics.md describes each metric."""
    service = get_service(request)
    job = await find_job(service, job_id)
    names = query.names or await service.line.ask(reads.metric_names, service.store, job.id, query.kind)
    curves = await service.line.ask(
        reads.series, service.store, [job.id], names, kind=query.kind, points=query.points
    )
    return Metrics(job_id=job.id, kind=query.kind, series=curves[job.id])


@router.get("/jobs/{job_id}/log")
async def show_job_log(request: Request, job_id: str, query: Annotated[LogQuery, Query()]) -> Log:
    """Return the lines of a log from `offset` on. If they exceed 1 MiB, return only the last 1 MiB."""
    service = get_service(request)
    return await service.line.ask(_log, await find_job(service, job_id), query)


def _log(job: Job, query: LogQuery) -> Log:
    if job.run_dir is None:
        return Log(lines=(), next_offset=0)
    piece = read_piece(
        Path(job.run_dir, _FILES.get(query.part, f"{query.part}.log")), query.offset, last=True
    )
    if query.part == "run":
        lines = [line for line, _ in piece.log_lines()]
    else:
        lines = [LogLine("", text) for text in piece.texts()]
    return Log(lines=tuple(lines[-query.tail :]), next_offset=piece.end)


# The most bytes of a log file in one reply.
MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """A sequence of whole lines of a log file."""

    lines: tuple[bytes, ...] = ()
    """The lines in file order, without their line ends."""
    ends: tuple[int, ...] = ()
    """For each line, the offset of the byte after it in the file."""
    end: int = 0
    """The offset of the byte after the last line, where the next piece begins."""
    more: bool = False
    """Whether the file contains bytes after this piece."""

    def texts(self) -> list[str]:
        """Return the lines of a file as text. The file may contain bytes that are not UTF-8."""
        return [part for line in self.lines for part in line.decode("utf-8", "replace").splitlines() or [""]]

    def log_lines(self) -> Iterator[tuple[LogLine, int]]:
        """Yield each line of run.log and the offset where it ends; skip lines that are no JSON object."""
        for line, end in zip(self.lines, self.ends, strict=True):
            if (row := parse_object(line)) is not None:
                yield parse_line(row), end


def read_piece(path: Path, offset: int, *, last: bool = False) -> Piece:
    """Read lines from `offset` on: the first MOST_BYTES, or with `last` the last MOST_BYTES.

    A first line longer than MOST_BYTES is read whole. If `offset` is beyond the end, read from the start.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            begin = offset if offset <= size else 0
            skips = last and size - begin > MOST_BYTES
            file.seek(size - MOST_BYTES - 1 if skips else begin)
            if skips:
                file.readline()  # the end of a line that began before
            begin = file.tell()
            data = file.read(MOST_BYTES)
            if b"\n" not in data:
                data += file.readline()
    except FileNotFoundError:
        return Piece()
    lines = data.split(b"\n")[:-1]
    ends = tuple(accumulate((len(line) + 1 for line in lines), initial=begin))
    return Piece(tuple(lines), ends[1:], ends[-1], begin + len(data) < size)
