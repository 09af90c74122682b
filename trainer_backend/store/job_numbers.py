"""Row numbers of jobs; a writer also locks the job."""

from collections.abc import Sequence

from sqlalchemy import Connection, select

from trainer_backend.store.database import UnknownJob
from trainer_backend.store.tables import Job


def job_number(connection: Connection, job_id: str, *, lock: bool = False) -> int:
    """Return the number that rows of a job refer to.

    Args:
        lock: hold the job until the transaction ends, so that no second sync and no deletion interferes.
            (SQLite has only one writer anyway.)
    """
    query = select(Job.number).where(Job.id == job_id)
    number = connection.scalar(query.with_for_update() if lock else query)
    if number is None:
        raise UnknownJob(f"there is no job {job_id[:64]!r}")
    return number


def job_numbers(connection: Connection, job_ids: Sequence[str]) -> dict[int, str]:
    """Return the ids of several jobs by number, in one query."""
    query = select(Job.number, Job.id).where(Job.id.in_(job_ids))
    ids = {number: job_id for number, job_id in connection.execute(query)}
    missing = next((job_id for job_id in job_ids if job_id not in ids.values()), None)
    if missing is not None:
        raise UnknownJob(f"there is no job {missing[:64]!r}")
    return ids
