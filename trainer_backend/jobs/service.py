"""The object that all routes share, made once at the start, and the job that a request names."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from fastapi import Request

from service_kit.keys import Guesses, Keys, LoginSessions
from service_kit.observed import Requests
from shared_schemas.base import did_you_mean
from trainer_backend.errors import RunsNoJobs
from trainer_backend.jobs.check_process import CheckProcess
from trainer_backend.jobs.data_dir import DataDir, Sweeper
from trainer_backend.jobs.settings import Settings
from trainer_backend.jobs.slots import late
from trainer_backend.jobs.supervisor import Supervisor
from trainer_backend.jobs.watcher import News, Watcher
from trainer_backend.store import jobs
from trainer_backend.store.database import JobConflict, Store, UnknownJob
from trainer_backend.store.rows import JobRow

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(slots=True)
class Service:
    """
    Attributes:
        checks: where what strangers sent is read.
        supervisor: None where no jobs are run (--no-jobs).
        requests: what was answered so far.
        streams: event streams that are open.
    """

    settings: Settings
    store: Store
    data: DataDir
    news: News
    watcher: Watcher
    sweeper: Sweeper
    checks: CheckProcess
    supervisor: Supervisor | None
    keys: Keys
    sessions: LoginSessions
    guesses: Guesses = field(default_factory=Guesses)
    requests: Requests = field(default_factory=Requests)
    streams: int = 0

    async def ask(
        self, call: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Result:
        """What a call to the store or the disk returns; made on a thread, and waited for so long at most.

        Raises:
            StoreUnavailable: it took too long.
        """
        try:
            async with asyncio.timeout(self.settings.store_s):
                return await asyncio.to_thread(call, *arguments, **named)
        except TimeoutError as error:
            raise late(self.store.shown, self.settings.store_s) from error

    def changed(self, job_id: str) -> None:
        """Tell the supervisor and the open pages that a job's row has changed, so that both look now."""
        self.news.tell(job_id)
        if self.supervisor is not None:
            self.supervisor.wake()


def service_of(request: Request) -> Service:
    """The application's."""
    found = request.app.state.service
    assert isinstance(found, Service)
    return found


_SHORTEST = 6
_LOOKED_AT = 500
_LONGEST = 64
_TOLD = 8


async def job_named(service: Service, name: str) -> JobRow:
    """Find a job by its id, the beginning of its id, or a name that only one job has.

    Raises:
        UnknownJob: no job matches, or more than one does.
        StoreUnavailable: the database does not answer.
    """
    try:
        return await service.ask(jobs.get, service.store, name)
    except UnknownJob:
        page = await service.ask(jobs.find, service.store, limit=_LOOKED_AT)
    return _only(name, page.items)


def refuse_foreign(service: Service, job: JobRow) -> None:
    """Refuse to act on another service's job: several services may share a database, and no disk.

    Raises:
        RunsNoJobs: this service only shows runs.
        JobConflict: another one runs that job, and has its files.
    """
    if service.supervisor is None:
        raise RunsNoJobs("this service only shows runs (--no-jobs), and so it changes none")
    if job.home != service.data.home:
        raise JobConflict(f"job {job.id} is of another trainer service, which has its files; ask that one")


def _only(name: str, known: tuple[JobRow, ...]) -> JobRow:
    found = [job for job in known if job.name == name]
    if len(name) >= _SHORTEST:
        found += [job for job in known if job.id.startswith(name) and job.name != name]
    if len(found) == 1:
        return found[0]
    shown = name[:_LONGEST]
    if found:
        told = ", ".join(f"{job.id} ({job.state})" for job in found[:_TOLD])
        raise UnknownJob(f"{len(found)} jobs are called {shown!r}; name one by its id: {told}")
    if not known:
        raise UnknownJob(f"there is no job {shown!r}, nor any other")
    newest = dict.fromkeys(job.name for job in known[:_TOLD])
    close = did_you_mean(shown, {*newest, *(job.id for job in known[:_TOLD])})
    raise UnknownJob(f"there is no job {shown!r}{close}")
