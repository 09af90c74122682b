"""What pause, resume and cancel do to a job, whatever state it is in. Pure.

A job that runs is told so by its process's supervisor; what is written here is what it should come to.
"""

from datetime import datetime
from typing import Literal

from trainer_backend.store.errors import JobConflict
from trainer_backend.store.jobs import Changes
from trainer_backend.store.rows import JobRow

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
    """What to change; None where it is so already, so that asking twice is harmless.

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
