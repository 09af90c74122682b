"""What every read begins with, and every write of a sync: the job, and for a write nobody else at it."""

from collections.abc import Sequence

from sqlalchemy import Connection, select

from trainer_backend.store.database import UnknownJob
from trainer_backend.store.tables import Job


def job_number(connection: Connection, job_id: str, *, lock: bool = False) -> int:
    """The number that rows of a job go by.

    Args:
        lock: hold the job until the transaction ends: two syncs of one run do not meet, and it is not deleted
            under them. (SQLite has one writer anyway.)

    Raises:
        UnknownJob: there is none of that id.
    """
    query = select(Job.number).where(Job.id == job_id)
    number = connection.scalar(query.with_for_update() if lock else query)
    if number is None:
        raise UnknownJob(f"there is no job {job_id[:64]!r}")
    return number


def job_numbers(connection: Connection, job_ids: Sequence[str]) -> dict[int, str]:
    """The ids of several jobs, by number: one query.

    Raises:
        UnknownJob: one of them is none.
    """
    query = select(Job.number, Job.id).where(Job.id.in_(job_ids))
    found = {number: job_id for number, job_id in connection.execute(query)}
    missing = next((job_id for job_id in job_ids if job_id not in found.values()), None)
    if missing is not None:
        raise UnknownJob(f"there is no job {missing[:64]!r}")
    return found
