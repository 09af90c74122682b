"""The states of a job: after its process has ended, after a verb, and while another process trains. Pure."""

import signal
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from trainer_backend.rundir.state import DONE, REFUSED, STOPPED, RunState, Watched
from trainer_backend.store.database import JobConflict
from trainer_backend.store.jobs import Changes, state_of_run
from trainer_backend.store.rows import ENDED, JobRow

# Each restart waits twice as long as the one before it, and so long at most.
LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended.

    Attributes:
        exit_code: negative: the signal that killed it.
        state: the last that the process wrote; None: it wrote none.
        crashes: crashes of this job without an iteration in between, this one counted, if it is one.
        said: the error that it printed last; None: none.
        code: of the error that kept it from starting, which is then what was `said`; None: it started.
    """

    exit_code: int
    state: RunState | None
    crashes: int
    said: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What to write down; and how long to wait before it is started again, None: not at all."""

    changes: Changes
    restart_in_s: float | None = None


def is_stop(exit_code: int) -> bool:
    """Whether it ended because it was told to; also before it could hear that, with nothing to save."""
    return exit_code in (STOPPED, -signal.SIGTERM)


def is_crash(exit_code: int) -> bool:
    return exit_code not in (DONE, REFUSED) and not is_stop(exit_code)


def stays(job: JobRow, exit_code: int) -> bool:
    """Whether a job whose process has ended while the service stops is left as it is: the next start goes on
    with it, also where its process was killed because it had not saved in time."""
    return job.wanted == "run" and exit_code not in (DONE, REFUSED)


def outcome_of(job: JobRow, ending: Ending, *, restarts: int, first_wait_s: float, now: datetime) -> Outcome:
    """
    Args:
        job: as it is now: what is wanted of it may have changed while its process ended.
        restarts: how often a job that crashes is started again, with no iteration in between.
        first_wait_s: before the first of them.
    """
    code, detail = _told(ending)
    if ending.exit_code == DONE:  # also where a stop came too late to be heeded
        return Outcome({"state": "succeeded", "ended": now, "code": None, "detail": None})
    if ending.state is not None and ending.state.state == "ended":  # a run that has ended stays so
        told = f"the run has ended and is saved; after that: {detail}"
        return Outcome({"state": "succeeded", "ended": now, "code": None, "detail": told})
    if job.wanted == "cancel":
        return Outcome({"state": "cancelled", "ended": now})
    if ending.exit_code == REFUSED:
        return Outcome({"state": "failed", "ended": now, "code": code, "detail": detail})
    if job.wanted == "pause":
        if is_stop(ending.exit_code):
            return Outcome({"state": "paused"})
        return Outcome({"state": "paused", "code": code, "detail": detail})
    if job.state == "pausing":  # and wanted again meanwhile
        return Outcome({"state": "queued"})
    if is_stop(ending.exit_code):
        told = "its process was told to stop by somebody else; what was finished is saved"
        return Outcome({"state": "paused", "wanted": "pause", "code": "stopped", "detail": told})
    if ending.crashes > restarts:
        return Outcome({"state": "failed", "ended": now, "code": code, "detail": detail})
    wait_s = min(first_wait_s * 2 ** (ending.crashes - 1), LONGEST_WAIT_S)
    told = f"restart {ending.crashes} of {restarts} in {wait_s:g} s after: {detail}"
    return Outcome({"code": "restarting", "detail": told}, restart_in_s=wait_s)


def without_process(job: JobRow, now: datetime) -> Changes | None:
    """What becomes of a job that was to end and has no process: there is nothing left to wait for."""
    if job.state == "cancelling":
        return {"state": "cancelled", "ended": now}
    if job.state == "pausing":
        return {"state": "paused"} if job.wanted == "pause" else {"state": "queued"}
    return None


def _told(ending: Ending) -> tuple[str, str]:
    """Return a code and a sentence that say why the process did not start, failed, or was killed."""
    if ending.code is not None:
        return ending.code, ending.said or ""
    if ending.exit_code < 0:
        name = _signal_name(-ending.exit_code)
        hint = "; often the system, short of memory" if name == "SIGKILL" else ""
        return "killed", f"its process was killed by {name}{hint}"
    if ending.state is not None and ending.state.state == "failed":
        return ending.state.code or "crashed", ending.state.detail
    if ending.said is not None:  # before it came to its run: what there is of state.json is not its own
        return ("refused" if ending.exit_code == REFUSED else "crashed"), ending.said
    return "crashed", f"its process ended with exit code {ending.exit_code}; process.log may say why"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# Pause, resume and cancel write the wanted state; the supervisor makes the running process follow it.

Verb = Literal["pause", "resume", "cancel"]


def refuse_found(job: JobRow, verb: str) -> None:
    """
    Raises:
        JobConflict: somebody trains, or has trained, that run by hand; this service only shows it.
    """
    if job.origin == "cli":
        raise JobConflict(
            f"job {job.id} is a run of `turnwise train`, and not this service's to {verb}",
            hint=f"Its run directory is {job.run_dir}: whoever has started it stops it, goes on with it "
            "(turnwise train --resume) or removes it there.",
        )


def changes_for(verb: Verb, job: JobRow, now: datetime) -> Changes | None:
    """Return the changes that a verb makes; None where the job is in that state already.

    So a request may be sent twice.

    Raises:
        JobConflict: it makes no sense in the state that the job is in.
    """
    refuse_found(job, verb)
    if verb == "pause":
        return _pause(job)
    return _resume(job) if verb == "resume" else _cancel(job, now)


def _pause(job: JobRow) -> Changes | None:
    match job.state:
        case "queued":
            return {"state": "paused", "wanted": "pause"}
        case "running":
            return {"state": "pausing", "wanted": "pause"}
        case "pausing":
            return None if job.wanted == "pause" else {"wanted": "pause"}
        case "paused":
            return None
    raise _refused("pause", job)


def _resume(job: JobRow) -> Changes | None:
    match job.state:
        case "queued" | "running":
            return None
        case "pausing":  # it goes on once its process has saved and ended
            return None if job.wanted == "run" else {"wanted": "run"}
        case "paused" | "failed" | "cancelled":
            return {"state": "queued", "wanted": "run", "ended": None, "code": None, "detail": None}
    raise _refused("resume", job)


def _cancel(job: JobRow, now: datetime) -> Changes | None:
    match job.state:
        case "queued" | "paused" | "failed":
            return {"state": "cancelled", "wanted": "cancel", "ended": now}
        case "running" | "pausing":
            return {"state": "cancelling", "wanted": "cancel"}
        case "cancelling" | "cancelled":
            return None
    raise _refused("cancel", job)


def _refused(verb: Verb, job: JobRow) -> JobConflict:
    return JobConflict(f"job {job.id} is {job.state}, so there is nothing to {verb}")


def changes_for_found(job: JobRow, watched: Watched, now: datetime) -> Changes | None:
    """Return the changes for the row of a run that another process trains; None: the row is right.

    The state follows from the run's lock and from the last state that its process wrote.
    """
    state, code, detail = state_of_run(watched)
    if (job.state, job.code, job.detail) == (state, code, detail):
        return None
    changes: Changes = {"state": state, "code": code, "detail": detail}
    changes["ended"] = (job.ended or now) if state in ENDED else None
    if state == "running" and job.started is None:
        changes["started"] = now
    return changes
