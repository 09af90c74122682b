"""run.log: every line that a run has told a person, with its time."""

from dataclasses import dataclass
from pathlib import Path

from trainer_backend.rundir.json_lines import append_line, read_lines
from trainer_backend.rundir.times import now

FILE = "run.log"


@dataclass(frozen=True, slots=True)
class LogLine:
    """`time` is UTC, ISO 8601."""

    time: str
    text: str


def append_log(folder: Path, text: str) -> None:
    """
    Raises:
        RunNotWritten: the disk is full, or refuses.
    """
    append_line(folder / FILE, {"time": now(), "text": text}, durable=False)


def read_log(folder: Path, *, offset: int = 0) -> tuple[list[LogLine], int]:
    """The lines from a byte on, oldest first, and the byte to go on from; see `json_lines.read_lines`."""
    rows, end = read_lines(folder / FILE, offset=offset)
    return [LogLine(str(row.get("time", "")), str(row.get("text", ""))) for row in rows], end
