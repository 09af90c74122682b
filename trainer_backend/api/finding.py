"""From what a request names to a job: its id, the beginning of one, or a name that only one job has."""

from shared_schemas.base import did_you_mean
from trainer_backend.api.errors import RunsNoJobs
from trainer_backend.api.service import Service
from trainer_backend.store import jobs
from trainer_backend.store.errors import JobConflict, UnknownJob
from trainer_backend.store.rows import JobRow

_SHORTEST = 6
_LOOKED_AT = 500
_LONGEST = 64
_TOLD = 8


async def job_named(service: Service, name: str) -> JobRow:
    """
    Raises:
        UnknownJob: there is none, or more than one.
        StoreUnavailable: the database does not answer.
    """
    try:
        return await service.ask(jobs.get, service.store, name)
    except UnknownJob:
        page = await service.ask(jobs.find, service.store, limit=_LOOKED_AT)
    return _only(name, page.items)


def refuse_foreign(service: Service, job: JobRow) -> None:
    """Before anything is done to a job: several services may share a database, and no disk.

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
