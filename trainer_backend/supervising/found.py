"""What state a run is in that somebody else trains, by its lock and what it wrote last. Pure."""

from datetime import datetime

from trainer_backend.rundir.state import Watched
from trainer_backend.store.jobs import Changes
from trainer_backend.store.rows import ENDED, JobRow, JobState

_STATES: dict[str, JobState] = {"ended": "succeeded", "stopped": "paused", "failed": "failed"}
_GONE = "its process ended without a word; turnwise train --resume goes on"


def changes_for_found(job: JobRow, watched: Watched, now: datetime) -> Changes | None:
    """What to change in its row; None: it is as the row says."""
    state, code, detail = _found(watched)
    if (job.state, job.code, job.detail) == (state, code, detail):
        return None
    changes: Changes = {"state": state, "code": code, "detail": detail}
    changes["ended"] = (job.ended or now) if state in ENDED else None
    if state == "running" and job.started is None:
        changes["started"] = now
    return changes


def _found(watched: Watched) -> tuple[JobState, str | None, str | None]:
    if watched.holder is not None:
        return "running", None, None
    if watched.interrupted:
        return "failed", "killed", _GONE
    if watched.state is None:  # of a version that wrote none
        return "paused", None, None
    state = _STATES[watched.state.state]
    return state, watched.state.code or None, watched.state.detail or None
