"""The service object that all routes share, and the look-up of the job that a request names."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import Request

from service_kit.keys import Guesses, Keys
from service_kit.observed import Requests
from shared_schemas.base import did_you_mean
from trainer_backend.errors import RunsNoJobs
from trainer_backend.jobs.check_process import CheckProcess
from trainer_backend.jobs.data_dir import DataDir, Sweeper
from trainer_backend.jobs.sessions import LoginSessions
from trainer_backend.jobs.settings import Settings
from trainer_backend.jobs.slots import Line
from trainer_backend.jobs.supervisor import Supervisor
from trainer_backend.jobs.watcher import News, Watcher
from trainer_backend.rundir.state import FINAL, read_state
from trainer_backend.store import jobs
from trainer_backend.store.database import JobConflict, Store, UnknownJob
from trainer_backend.store.rows import ACTIVE, Job, JobView, Progress, read_iterations


@dataclass(slots=True)
class Service:
    settings: Settings
    store: Store
    data: DataDir
    news: News
    watcher: Watcher
    sweeper: Sweeper
    checks: CheckProcess
    """The process that parses clients' input."""
    supervisor: Supervisor | None
    """None if the service runs no jobs (--no-jobs)."""
    line: Line
    """Runs the store and disk calls of requests on threads."""
    keys: Keys
    sessions: LoginSessions
    guesses: Guesses = field(default_factory=Guesses)
    requests: Requests = field(default_factory=Requests)
    """Statistics of the replies."""
    streams: int = 0
    """Number of open event streams."""

    def changed(self, job_id: str) -> None:
        """Tell the supervisor and the open event streams that a job's row changed."""
        self.news.tell(job_id)
        if self.supervisor is not None:
            self.supervisor.wake()


def get_service(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def job_view(job: Job) -> JobView:
    """Return a job as the API shows it. Call this on a thread, because it reads the run directory."""
    state, progress = read_state(Path(job.run_dir)) if job.run_dir is not None else None, None
    if state is not None:
        same = {name: getattr(state, name) for name in ("iteration", "stage", "done", "total", "since")}
        stage_state = state.state if job.state in ACTIVE or state.state in FINAL else "gone"
        progress = Progress(state=stage_state, iterations=read_iterations(job.config), **same)
    return JobView(**{name: getattr(job, name) for name in JobView.model_fields} | {"progress": progress})


_SHORTEST = 6
_MOST_SEARCHED = 500
_LONGEST = 64
_MOST_NAMED = 8


async def find_job(service: Service, name: str) -> Job:
    """Return the only job with this id, beginning of an id (6 characters at least) or name."""
    with suppress(UnknownJob):
        return await service.line.ask(jobs.get, service.store, name)
    rows = (await service.line.ask(jobs.find, service.store, limit=_MOST_SEARCHED)).items
    matches = [job for job in rows if job.name == name]
    if len(name) >= _SHORTEST:
        matches += [job for job in rows if job.id.startswith(name) and job.name != name]
    if len(matches) == 1:
        return matches[0]
    shown = name[:_LONGEST]
    if matches:
        choices = ", ".join(f"{job.id} ({job.state})" for job in matches[:_MOST_NAMED])
        raise UnknownJob(f"{len(matches)} jobs are called {shown!r}; name one by its id: {choices}")
    if not rows:
        raise UnknownJob(f"there is no job {shown!r}, nor any other")
    newest = dict.fromkeys(job.name for job in rows[:_MOST_NAMED])
    close = did_you_mean(shown, {*newest, *(job.id for job in rows[:_MOST_NAMED])})
    raise UnknownJob(f"there is no job {shown!r}{close}")


def refuse_foreign(service: Service, job: Job) -> None:
    """Raise an error if another service runs this job. Only that service has the job's files."""
    if service.supervisor is None:
        raise RunsNoJobs("this service only shows runs (--no-jobs), and so it changes none")
    if job.home != service.data.home:
        raise JobConflict(f"job {job.id} is of another trainer service, which has its files; ask that one")
