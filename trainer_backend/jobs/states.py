"""Pure functions that decide how a job's state changes: after its process ended, or after a request."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from service_kit.process import name_exit
from trainer_backend.rundir.state import (
    DONE,
    FAULTY,
    FULL,
    REFUSED,
    STOPPED,
    RunState,
    RunStatus,
    describe_place,
)
from trainer_backend.store.database import JobConflict
from trainer_backend.store.jobs import Changes, state_of_run
from trainer_backend.store.rows import ENDED, Job

# The longest wait before a restart; each wait is twice as long as the previous one.
LONGEST_WAIT_S = 60.0
# A job that ends this often as FAULTY after the same iteration is not restarted.
MOST_FAULTS = 2


@dataclass(frozen=True, slots=True)
class Ending:
    exit_code: int
    """The exit code of the process; -N if the signal N killed it."""
    state: RunState | None = None
    """The last state that the process wrote to state.json, or None."""
    crashes: int = 0
    """Crashes since the job last finished an iteration, including this one."""
    error: str | None = None
    """The error that the process printed, or why the process could not start; None: no error is known."""
    code: str | None = None
    """The code of the error that prevented the start; None: the process started."""
    faults: int = 0
    """The number of `crashes` that were caused by an error in the job's data or in code."""
    last_line: str = ""
    """The last printed line, or the line with which Python reports a crash; may be empty."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The changes to store after a process ended, and the wait before its restart; None: no restart."""

    changes: Changes
    restart_in_s: float | None = None


def is_stop(exit_code: int) -> bool:
    """Return whether SIGTERM ended the process: after it saved, or before it could handle the signal."""
    return exit_code in (STOPPED, -signal.SIGTERM)


def decide_outcome(job: Job, ending: Ending, *, restarts: int, first_wait_s: float, now: datetime) -> Outcome:
    """Return what to store for a job whose process ended, and whether to restart the job.

    `job` must be read after the end, because a request may have changed `wanted`. The settings of the
    supervisor define `restarts` and `first_wait_s`.
    """
    code, detail = explain(ending)
    if ending.exit_code == DONE:  # even if a stop came too late
        return Outcome({"state": "succeeded", "ended": now, "code": None, "detail": None})
    if ending.state is not None and ending.state.state == "ended":  # a finished run stays finished
        detail = f"the run has ended and is saved; after that: {detail}"
        return Outcome({"state": "succeeded", "ended": now, "code": None, "detail": detail})
    if job.wanted == "cancel":
        return Outcome({"state": "cancelled", "ended": now})
    if ending.exit_code == REFUSED:
        return Outcome({"state": "failed", "ended": now, "code": code, "detail": detail})
    if job.wanted == "pause":
        if is_stop(ending.exit_code):
            return Outcome({"state": "paused"})
        return Outcome({"state": "paused", "code": code, "detail": detail})
    if job.state == "pausing":  # resumed while it was pausing
        return Outcome({"state": "queued"})
    if is_stop(ending.exit_code):
        detail = "its process was told to stop from outside; what was finished is saved"
        return Outcome({"state": "paused", "wanted": "pause", "code": "stopped", "detail": detail})
    if ending.exit_code == FAULTY and ending.faults >= MOST_FAULTS:
        detail = f"{detail} (twice after the same iteration, so it is not tried again)"
        return Outcome({"state": "failed", "ended": now, "code": code, "detail": detail})
    if ending.crashes > restarts:
        return Outcome({"state": "failed", "ended": now, "code": code, "detail": detail})
    wait_s = min(first_wait_s * 2 ** (ending.crashes - 1), LONGEST_WAIT_S)
    detail = f"restart {ending.crashes} of {restarts} in {wait_s:g} s after: {detail}"
    return Outcome({"code": "restarting", "detail": detail}, restart_in_s=wait_s)


def without_process(job: Job, now: datetime) -> Changes | None:
    """Return the changes that complete a pause or cancel of a job without a process; None for other jobs."""
    if job.state == "cancelling":
        return {"state": "cancelled", "ended": now}
    if job.state == "pausing":
        return {"state": "paused"} if job.wanted == "pause" else {"state": "queued"}
    return None


def explain(ending: Ending) -> tuple[str, str]:
    """Return an error code and a sentence: why the process did not start, failed, or was killed."""
    if ending.code is not None:
        return ending.code, ending.error or ""
    place = describe_place(ending.state)
    # A SIGKILL leaves no time for a message, so the last line is about something else.
    words = "" if ending.exit_code == -signal.SIGKILL else ending.last_line
    said = f"; process.log says: {words!r}" if words else ""
    if ending.exit_code < 0:
        return "killed", f"its process was killed by {name_exit(ending.exit_code)}{place}{said}"
    if ending.state is not None and ending.state.state == "failed":
        return ending.state.code or "crashed", ending.state.detail
    if ending.error is not None:  # it failed before it opened its run and wrote state.json
        return ("refused" if ending.exit_code == REFUSED else "crashed"), ending.error
    if ending.exit_code == FULL:
        return "disk_full", f"its disk is full: no file could be written, not even one that says which{place}"
    return "crashed", f"its process ended with {name_exit(ending.exit_code)}{place}{said}"


# Pause, resume and cancel store the wanted state; the supervisor makes the process follow it.

Verb = Literal["pause", "resume", "cancel"]


def refuse_external(job: Job, verb: str) -> None:
    """Raise JobConflict if the job is a run of `turnwise train`, which this service only shows."""
    if job.origin == "cli":
        raise JobConflict(
            f"job {job.id} is a run of `turnwise train`, and not this service's to {verb}",
            hint=f"Its run directory is {job.run_dir}: who started it stops it, continues it "
            "(turnwise train --resume) or removes it there.",
        )


_WAITS: Changes = {"state": "queued", "wanted": "run", "ended": None, "code": None, "detail": None}
_CANCELLED: Changes = {"state": "cancelled", "wanted": "cancel"}
_CANCELLING: Changes = {"state": "cancelling", "wanted": "cancel"}
# The changes for each verb and current state; {} means none. In a state that is not listed, the verb is
# refused. A job that is resumed while it is pausing continues after its process has saved and ended.
_VERBS: Mapping[Verb, Mapping[str, Changes]] = {
    "pause": {
        "queued": {"state": "paused", "wanted": "pause"},
        "running": {"state": "pausing", "wanted": "pause"},
        "pausing": {"wanted": "pause"},
        "paused": {},
    },
    "resume": {
        **{"queued": {}, "running": {}, "pausing": {"wanted": "run"}},
        **{"paused": _WAITS, "failed": _WAITS, "cancelled": _WAITS},
    },
    "cancel": {
        **{"queued": _CANCELLED, "paused": _CANCELLED, "failed": _CANCELLED},
        **{"running": _CANCELLING, "pausing": _CANCELLING, "cancelling": {}, "cancelled": {}},
    },
}


def changes_for(verb: Verb, job: Job, now: datetime) -> Changes | None:
    """Return what pause, resume or cancel changes in a job; None if an earlier request changed it already."""
    refuse_external(job, verb)
    if job.state not in _VERBS[verb]:
        raise JobConflict(f"job {job.id} is {job.state}, so there is nothing to {verb}")
    changes = _VERBS[verb][job.state]
    if not changes or changes == {"wanted": job.wanted}:
        return None
    return {**changes, "ended": now} if changes is _CANCELLED else changes


def changes_for_external(job: Job, status: RunStatus, *, start: datetime, end: datetime) -> Changes | None:
    """Return the changes that bring the row of a run of `turnwise train` up to date; None if there are none.

    `start` and `end` are the times when the run was created and ended.
    """
    state, code, detail = state_of_run(status)
    if (job.state, job.code, job.detail) == (state, code, detail) and job.started is not None:
        return None
    changes: Changes = {"state": state, "code": code, "detail": detail, "started": job.started or start}
    changes["ended"] = end if state in ENDED else None
    return changes
