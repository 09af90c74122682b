"""What state a run is in that somebody else trains, by its lock and what it wrote last. Pure."""

from datetime import datetime

from trainer_backend.rundir.state import Watched
from trainer_backend.store.jobs import Changes
from trainer_backend.store.rows import ENDED, JobRow
from trainer_backend.store.states import state_of_run


def changes_for_found(job: JobRow, watched: Watched, now: datetime) -> Changes | None:
    """What to change in its row; None: it is as the row says."""
    state, code, detail = state_of_run(watched)
    if (job.state, job.code, job.detail) == (state, code, detail):
        return None
    changes: Changes = {"state": state, "code": code, "detail": detail}
    changes["ended"] = (job.ended or now) if state in ENDED else None
    if state == "running" and job.started is None:
        changes["started"] = now
    return changes
