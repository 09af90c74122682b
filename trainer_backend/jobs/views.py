"""The API's view of a job: its row in the store, and its progress from the run directory."""

from datetime import datetime
from pathlib import Path

from pydantic import Field

from shared_schemas.base import Body
from trainer_backend.rundir.state import FINAL, read_state
from trainer_backend.store.rows import ACTIVE, JobRow, JobState, Origin, Wanted, iterations_of


class Progress(Body):
    """The progress of a job from `state.json` of its run directory.

    `iteration` is the last finished one, `iterations` the job's total. `stage` is the current stage, with
    `done` of `total` steps.
    """

    state: str
    iteration: int
    iterations: int | None
    stage: str
    done: int
    total: int
    since: str


class JobView(Body):
    """A job. `wanted` is the last requested state, `attempt` the number of processes started so far.

    `code` and `detail` say why it failed, was stopped, or is being restarted.
    """

    id: str
    name: str
    state: JobState
    wanted: Wanted
    origin: Origin
    tags: dict[str, str]
    attempt: int
    created: datetime
    started: datetime | None
    ended: datetime | None
    code: str | None
    detail: str | None
    run_dir: str | None
    run_id: str | None
    version: int = Field(description="counts changes of the job")
    progress: Progress | None = None


class JobList(Body):
    """A page of jobs, newest first. Send `next_cursor` with the next request; null: this page is the last."""

    jobs: tuple[JobView, ...]
    next_cursor: str | None


def job_view(job: JobRow) -> JobView:
    """Build the view of a job. It reads the run directory: call it on a thread."""
    row = {name: getattr(job, name) for name in JobView.model_fields if name != "progress"}
    return JobView(**{**row, "tags": dict(job.tags), "progress": _progress(job)})


def _progress(job: JobRow) -> Progress | None:
    state = read_state(Path(job.run_dir)) if job.run_dir is not None else None
    if state is None:
        return None
    same = {name: getattr(state, name) for name in ("iteration", "stage", "done", "total", "since")}
    stage_state = state.state if job.state in ACTIVE or state.state in FINAL else "gone"
    return Progress(state=stage_state, iterations=iterations_of(job.config), **same)
