"""The API's view of a job: its row in the store, and its progress from the run directory."""

from pathlib import Path

from shared_schemas.base import Body
from trainer_backend.rundir.state import FINAL, read_state
from trainer_backend.store.rows import ACTIVE, Job, JobView, Progress, iterations_of


class JobList(Body):
    """A page of jobs, newest first. Send `next_cursor` with the next request; null: this page is the last."""

    jobs: tuple[JobView, ...]
    next_cursor: str | None


def job_view(job: Job) -> JobView:
    """Build the view of a job. It reads the run directory: call it on a thread."""
    state, progress = read_state(Path(job.run_dir)) if job.run_dir is not None else None, None
    if state is not None:
        same = {name: getattr(state, name) for name in ("iteration", "stage", "done", "total", "since")}
        stage_state = state.state if job.state in ACTIVE or state.state in FINAL else "gone"
        progress = Progress(state=stage_state, iterations=iterations_of(job.config), **same)
    return JobView(**{name: getattr(job, name) for name in JobView.model_fields} | {"progress": progress})
