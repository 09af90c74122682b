"""Which state of a job may follow which, and which one a run directory tells of. Pure."""

from trainer_backend.rundir.state import Watched
from trainer_backend.store.errors import JobConflict
from trainer_backend.store.rows import ENDED, JobRow, JobState

# paused, cancelled, failed -> queued: it is asked for again, and goes on from its last checkpoint.
# running -> queued: its process is gone, or its service was restarted, and it waits for its turn again.
_AFTER: dict[JobState, frozenset[JobState]] = {
    "queued": frozenset({"running", "paused", "cancelled", "failed"}),
    "running": frozenset({"pausing", "cancelling", "succeeded", "failed", "queued", "paused", "cancelled"}),
    "pausing": frozenset({"paused", "cancelling", "succeeded", "failed", "running", "queued", "cancelled"}),
    "paused": frozenset({"queued", "cancelled"}),
    "cancelling": frozenset({"cancelled", "succeeded", "failed"}),
    "cancelled": frozenset({"queued"}),
    "succeeded": frozenset(),
    "failed": frozenset({"queued", "cancelled"}),
}

_OF_RUNS: dict[str, JobState] = {"ended": "succeeded", "stopped": "paused", "failed": "failed"}
_GONE = "its process ended without a word; turnwise train --resume goes on"


def state_of_run(watched: Watched) -> tuple[JobState, str | None, str | None]:
    """State, code and detail of a run that no service runs, by its lock and what it wrote last."""
    if watched.holder is not None:
        return "running", None, None
    if watched.interrupted:
        return "failed", "killed", _GONE
    if watched.state is None:  # of a version that wrote none
        return "paused", None, None
    return _OF_RUNS[watched.state.state], watched.state.code or None, watched.state.detail or None


def refuse_unended(job: JobRow) -> None:
    """Let through what may be deleted.

    Raises:
        JobConflict: it has not ended.
    """
    if job.state not in (*ENDED, "paused"):
        raise JobConflict(f"job {job.id} is {job.state}; cancel it first, then delete it")


def refuse_leap(job: JobRow, state: JobState) -> None:
    """Let nothing through that no road leads to. The run of another process (origin cli) is as it is found.

    Raises:
        JobConflict: with the state that the job is in, and those that may follow it.
    """
    if job.origin == "cli" or state == job.state or state in _AFTER[job.state]:
        return
    after = ", ".join(sorted(_AFTER[job.state])) or "none"
    raise JobConflict(f"job {job.id} is {job.state} and cannot become {state}; what may follow: {after}")
