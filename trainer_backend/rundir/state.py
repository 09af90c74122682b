"""The state of a run on disk: state.json, run.log, and the exit codes of its process.

The training process writes these files for other processes. The lock shows whether the process is alive.
"""

import errno
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from service_kit.errors import ServiceError
from shared_schemas.plain_text import encodable
from trainer_backend.errors import TrainerError, UpdateStopped
from trainer_backend.rundir.files import append_line, now, parse_object, read_texts, replace_text
from trainer_backend.rundir.lock import Holder, holder

STATE_FILE = "state.json"
StateName = Literal["starting", "training", "evaluating", "ended", "stopped", "failed"]
# The process ends after these states.
FINAL: frozenset[StateName] = frozenset({"ended", "stopped", "failed"})


ProcessRole = Literal["gateway", "learner", "replica", "task app"]
# A process in this state is no longer shown.
GONE = "gone"


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One of the processes that work for a run."""

    role: ProcessRole
    name: str
    """Unique among processes with the same role."""
    host: str
    """The host of the process; empty if `name` contains it."""
    state: str
    """One word, such as `starting`, `stale`, `serving` or `lost` for a replica."""
    version: int | None
    """Version of the policy that the process serves; None if there is none or it is unknown."""
    word: str
    """The last message from the process or about the process; may be empty."""
    since: str
    """When `state` last changed; UTC, ISO 8601."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The content of state.json."""

    state: StateName
    pid: int
    """Id of the process that wrote the file."""
    iteration: int = 0
    """The last finished iteration; 0 before the first."""
    stage: str = ""
    """The current stage as the terminal names it, such as `collect 3`; empty between stages."""
    done: int = 0
    total: int = 0
    code: str = ""
    """The code of the error that ended the run; empty if there was none."""
    detail: str = ""
    since: str = ""
    """When `state` last changed; UTC, ISO 8601."""
    starts: int = 1
    """How often the run was started or resumed, this start included."""
    run_id: str = ""
    """Identifies this start at task apps. Until this start sends requests, the id of the previous start."""
    processes: tuple[ProcessRecord, ...] = ()
    """The reported processes of this start, in the order of their first report."""
    notes: tuple[str, ...] = ()
    """Sentences on what makes this start of the run slow."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of a run as other processes see it."""

    state: RunState | None
    """The last written state; None if state.json is missing or unreadable."""
    holder: Holder | None
    """The process that trains the run now, or None."""

    @property
    def interrupted(self) -> bool:
        """Whether the process ended without a final state, because it was killed or the machine went down."""
        return self.holder is None and self.state is not None and self.state.state not in FINAL


def read_status(folder: Path) -> RunStatus:
    current = holder(folder)  # first: if the process ends now, it has written its last state
    return RunStatus(read_state(folder), current)


def read_state(folder: Path) -> RunState | None:
    """Read the last written state; None if it is missing or unreadable."""
    try:
        stored = {"notes": [], **json.loads((folder / STATE_FILE).read_bytes())}  # older versions: no notes
        values = {field.name: stored[field.name] for field in fields(RunState)}
        processes = tuple(ProcessRecord(**_encodable(dict(one))) for one in stored["processes"])
        notes = tuple(encodable(str(one)) for one in stored["notes"])
        state = RunState(**_encodable(values) | {"processes": processes, "notes": notes})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state if state.state in get_args(StateName) else None


def _encodable(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: encodable(value) if isinstance(value, str) else value for name, value in values.items()}


def describe_place(state: RunState | None) -> str:
    """Return text that names the last stage or iteration, to append to a sentence; empty if unknown."""
    if state is None or state.state in FINAL:
        return ""
    if state.stage:
        return f"; its last stage: {state.stage}"
    return f"; it was after iteration {state.iteration}" if state.state != "starting" else "; it was starting"


def write_state(folder: Path, state: RunState) -> None:
    # Not flushed, since it is written every second for observers.
    replace_text(folder / STATE_FILE, json.dumps(asdict(state)), durable=False)


# terminal/job_process.py exits with these codes; jobs/ reads them.

# Prefix of the last line of a process that ended with an error.
ERROR = "error: "

DONE = 0
# An error that another start may not meet: an absent task app, a port in use.
FAILED = 1
# The job itself is wrong: another start would fail the same way.
REFUSED = 2
# Stopped by request; everything finished is saved.
STOPPED = 3
# An error of the job's data or of code. It may depend on sampled tokens, so one more start is worth a try.
FAULTY = 4

# Like FAILED, but the disk is full: only the exit code can report it, since messages need room.
FULL = 5

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Shortages of the machine that may pass, whichever file was opened.
_OF_MACHINE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}
_PASSING = _NO_ROOM | _OF_MACHINE | {errno.EIO, errno.ESTALE, errno.ETIMEDOUT}


def is_final(error: ServiceError) -> bool:
    """Return whether another start would fail in the same way, because of a user's mistake or bad weights."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in _PASSING:
        return False
    return error.status < 500 or isinstance(error, UpdateStopped)


def choose_exit_code(error: Exception) -> int:
    cause = error.__cause__ if isinstance(error, ServiceError) else error
    if isinstance(cause, OSError) and cause.errno in _NO_ROOM:
        return FULL
    if isinstance(error, ServiceError):
        if is_final(error):
            return REFUSED
        return FAULTY if isinstance(error, TrainerError) and error.recurs else FAILED
    # Errors of the machine or a network may pass. All others are errors in Turnwise's code or a plug-in's.
    return FAILED if isinstance(error, OSError | MemoryError) else FAULTY


# run.log holds every message of a run with its time.

LOG_FILE = "run.log"


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a log; `time` is UTC, ISO 8601, and empty in files without times."""

    time: str
    text: str


def append_log(folder: Path, text: str) -> None:
    append_line(folder / LOG_FILE, {"time": now(), "text": text}, durable=False)


def read_log(folder: Path, *, last: int | None = None) -> tuple[list[LogLine], int]:
    """Return the last `last` lines of run.log (or all), oldest first, and the number of lines before them."""
    texts = read_texts(folder / LOG_FILE)
    shown = texts if last is None else texts[-last:]
    rows = [row for line in shown if (row := parse_object(line)) is not None]
    return [parse_line(row) for row in rows], len(texts) - len(shown)


def parse_line(row: Mapping[str, Any]) -> LogLine:
    return LogLine(encodable(str(row.get("time", ""))), encodable(str(row.get("text", ""))))
