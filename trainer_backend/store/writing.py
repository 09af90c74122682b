"""What every write of a sync begins with: the job, and nobody else at it."""

from sqlalchemy import Connection, select

from trainer_backend.store.errors import UnknownJob
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
