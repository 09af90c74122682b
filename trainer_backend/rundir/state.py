"""The state of a run on disk: state.json, run.log, and the exit of its process.

The training process writes them for others to read; the run does not depend on them, and the lock beside
them says whether that process still lives.
"""

import errno
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from service_kit.errors import ServiceError
from shared_schemas.json_text import encodable
from trainer_backend.errors import UpdateStopped
from trainer_backend.rundir.files import append_line, now, object_of, read_texts, replace_text
from trainer_backend.rundir.lock import Holder, holder

STATE_FILE = "state.json"
StateName = Literal["starting", "training", "evaluating", "ended", "stopped", "failed"]
# After these the process ends.
FINAL: frozenset[StateName] = frozenset({"ended", "stopped", "failed"})


@dataclass(frozen=True, slots=True)
class RunState:
    """
    Attributes:
        pid: the process that wrote it.
        iteration: the last that is finished; 0 before the first.
        stage: what is under way, as the terminal names it, such as `collect 3`; empty between stages.
        done, total: how far that has come.
        code, detail: of the error, where it failed; of JobError and the like, else empty.
        since: when `state` became what it is; UTC, ISO 8601.
        starts: how often the run was begun or continued, this time counted.
        run_id: that task apps know this start by; until they are asked for anything, that of the start before
            (empty: it is the first).
    """

    state: StateName
    pid: int
    iteration: int = 0
    stage: str = ""
    done: int = 0
    total: int = 0
    code: str = ""
    detail: str = ""
    since: str = ""
    starts: int = 1
    run_id: str = ""


@dataclass(frozen=True, slots=True)
class Watched:
    """A run as it is seen from outside.

    Attributes:
        state: the last that was written; None: by no version that writes one.
        holder: who trains it now; None: nobody.
    """

    state: RunState | None
    holder: Holder | None

    @property
    def interrupted(self) -> bool:
        """Its process is gone without a word: killed, or the machine went down."""
        return self.holder is None and self.state is not None and self.state.state not in FINAL


def watch(folder: Path) -> Watched:
    """What a run directory says of its run, and whether anybody is there to say it."""
    found = holder(folder)  # first: a process that ends in between has then written its last state
    return Watched(read_state(folder), found)


def read_state(folder: Path) -> RunState | None:
    """Return the last written state; None if there is none, or it cannot be read."""
    try:
        found = json.loads((folder / STATE_FILE).read_bytes())
        values = {field.name: found[field.name] for field in fields(RunState)}
        texts = {name: encodable(value) for name, value in values.items() if isinstance(value, str)}
        state = RunState(**{**values, **texts})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state if state.state in get_args(StateName) else None


def write_state(folder: Path, state: RunState) -> None:
    """
    Raises:
        RunNotWritten: the disk is full, or refuses.
    """
    # Each second, for those who watch: not worth a wait for the disk.
    replace_text(folder / STATE_FILE, json.dumps(asdict(state)), durable=False)


# terminal/job_process.py writes how a job's process ended; jobs/ reads it.

# Begins the last line of one that ended with an error.
ERROR = "error: "

DONE = 0
# An error of ours that another start may find mended: a task app that was away, a port that was taken.
FAILED = 1
# The job itself cannot be run so: another start would end the same.
REFUSED = 2
# Somebody asked it to stop; what is finished is saved.
STOPPED = 3

# What the machine is short of now, or its disk does now, whatever was about to be opened.
_PASSING = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EAGAIN,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)


def is_final(error: ServiceError) -> bool:
    """Whether the same start would fail the same way: the user's mistake, or weights that went wrong."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in _PASSING:
        return False
    return error.status < 500 or isinstance(error, UpdateStopped)


# run.log has every line that a run has shown a person, with its time.

LOG_FILE = "run.log"


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
    append_line(folder / LOG_FILE, {"time": now(), "text": text}, durable=False)


def read_log(folder: Path, *, last: int | None = None) -> tuple[list[LogLine], int]:
    """The last lines, oldest first, or all; and how many stand before them."""
    texts = read_texts(folder / LOG_FILE)
    shown = texts if last is None else texts[-last:]
    rows = [row for line in shown if (row := object_of(line)) is not None]
    return [line_of(row) for row in rows], len(texts) - len(shown)


def line_of(row: Mapping[str, Any]) -> LogLine:
    return LogLine(encodable(str(row.get("time", ""))), encodable(str(row.get("text", ""))))
