"""run.log: every line that a run has told a person, with its time."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_schemas.json_text import encodable
from trainer_backend.rundir.json_lines import append_line, object_of, read_texts
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


def read_log(folder: Path, *, last: int | None = None) -> tuple[list[LogLine], int]:
    """The last lines, oldest first, or all; and how many stand before them."""
    texts = read_texts(folder / FILE)
    shown = texts if last is None else texts[-last:]
    rows = [row for line in shown if (row := object_of(line)) is not None]
    return [line_of(row) for row in rows], len(texts) - len(shown)


def line_of(row: Mapping[str, Any]) -> LogLine:
    return LogLine(encodable(str(row.get("time", ""))), encodable(str(row.get("text", ""))))
