"""Pure: lines of a run's log with a clock that a person can read."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer_backend.rundir.run_log import LogLine


@dataclass(frozen=True, slots=True)
class ShownLine:
    """`clock` is the time of day; `time` the whole moment, UTC."""

    time: str
    clock: str
    text: str


def log_lines(lines: Sequence[LogLine]) -> list[ShownLine]:
    return [ShownLine(line.time, line.time[11:19], line.text) for line in lines]
