"""Jobs in the store: creation, compare-and-set changes, claims, and the transitions between states."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict, Unpack
from uuid import uuid4

from sqlalchemy import Connection, Row, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from trainer_backend.errors import JobError
from trainer_backend.rundir.state import RunStatus, describe_place
from trainer_backend.store.database import (
    IdempotencyConflict,
    JobChanged,
    JobConflict,
    Store,
    UnknownCursor,
    UnknownJob,
)
from trainer_backend.store.rows import ENDED, Job, JobState, Origin, Page, Wanted, named_in
from trainer_backend.store.tables import JOBS, fits

# Fields that a new row does not set: the store assigns the number, and progress is not stored.
_NOT_GIVEN = {"number", "progress"}


class Changes(TypedDict, total=False):
    """The fields of a job that `transition` changes. Absent fields keep their values."""

    state: JobState
    wanted: Wanted
    run_dir: str | None
    run_id: str | None
    attempt: int
    config: str
    started: datetime | None
    ended: datetime | None
    code: str | None
    detail: str | None


def job_of_request(store: Store, home: str, key: str, body_hash: str) -> Job | None:
    """Return the job that an earlier request with this idempotency key created, or None.

    Raises IdempotencyConflict if the earlier request had a different body.
    """
    with store.read() as connection:
        return _of_key(connection, home, key, body_hash)


def create(store: Store, new: Job) -> tuple[Job, bool]:
    """Store a new job; return it, and True.

    If an earlier request with the same idempotency key and body created a job, return that job, and False.
    Raises IdempotencyConflict if the bodies differ, and JobConflict if another job has the run directory.
    """
    job_id = uuid4().hex
    given = {"id": job_id, "created": store.clock(), **named_in(new.config)}
    values = new.model_copy(update=given).model_dump(exclude=_NOT_GIVEN)
    try:
        with store.write() as connection:
            if (earlier := _of_key(connection, new.home, new.idempotency_key, new.body_hash)) is not None:
                return earlier, False
            connection.execute(insert(JOBS).values(values))
            return _one(connection, job_id), True
    except IntegrityError as error:  # another job has the run directory, or a concurrent request used the key
        with store.read() as connection:
            earlier = _of_key(connection, new.home, new.idempotency_key, new.body_hash)
        if earlier is not None:
            return earlier, False
        raise JobConflict(f"another job has the run directory {new.run_dir}") from error


def _of_key(connection: Connection, home: str, key: str | None, body_hash: str | None) -> Job | None:
    if key is None:
        return None
    query = select(JOBS).where(JOBS.c.home == home, JOBS.c.idempotency_key == key)
    row = connection.execute(query).first()
    if row is None:
        return None
    if row.body_hash != body_hash:
        raise IdempotencyConflict(
            f"Idempotency-Key {key!r} made job {row.id} with another body; use a new key"
        )
    return job_row(row)


def get(store: Store, job_id: str) -> Job:
    with store.read() as connection:
        return _one(connection, job_id)


def find(
    store: Store,
    *,
    states: Iterable[JobState] = (),
    home: str | None = None,
    origin: Origin | None = None,
    ended_since: datetime | None = None,
    cursor: str | None = None,
    limit: int = 50,
) -> Page[Job]:
    """Return a page of at most `limit` jobs, newest first, after the page that returned `cursor`.

    A filter (`states`, `home`, `origin`, `ended_since`) that is empty or None excludes no job.
    """
    query = select(JOBS).order_by(JOBS.c.number.desc()).limit(limit + 1)
    if allowed := tuple(states):
        query = query.where(JOBS.c.state.in_(allowed))
    if home is not None:
        query = query.where(JOBS.c.home == home)
    if origin is not None:
        query = query.where(JOBS.c.origin == origin)
    if ended_since is not None:
        query = query.where(JOBS.c.ended >= ended_since)
    if cursor is not None:
        query = query.where(JOBS.c.number < read_cursor(cursor))
    with store.read() as connection:
        rows = [job_row(row) for row in connection.execute(query)]
    return Page(tuple(rows[:limit]), str(rows[limit - 1].number) if len(rows) > limit else None)


def counts(store: Store, home: str) -> dict[str, int]:
    """Return the number of jobs of the service `home` by state. States without jobs are absent."""
    query = select(JOBS.c.state, func.count()).where(JOBS.c.home == home).group_by(JOBS.c.state)
    with store.read() as connection:
        return {state: count for state, count in connection.execute(query)}


def read_cursor(cursor: str) -> int:
    """Return the job number that a page's cursor contains."""
    if not cursor.isdecimal() or len(cursor) > 18 or not fits(int(cursor)):
        raise UnknownCursor(cursor)
    return int(cursor)


def transition(store: Store, job: Job, **changes: Unpack[Changes]) -> Job:
    """Change a job and return it, unless it has changed since `job` was read.

    This is a compare-and-set on the job's `version`.

    Raises:
        JobChanged: the job has changed; read it again and decide again.
        JobConflict: `_AFTER` does not allow the new state after the current one.
        UnknownJob: the job was deleted.
    """
    with store.write() as connection:
        return _compare_and_set(connection, job, changes)


def _compare_and_set(connection: Connection, job: Job, changes: Changes) -> Job:
    if "state" in changes:
        refuse_leap(job, changes["state"])
    result = connection.execute(
        update(JOBS)
        .where(JOBS.c.number == job.number, JOBS.c.version == job.version)
        .values({**changes, "version": job.version + 1})
    )
    now = _one(connection, job.id)
    if not result.rowcount:
        raise JobChanged(f"job {job.id} is {now.state} now, and was {job.state} when it was read")
    return now


def change(store: Store, job_id: str, decide: Callable[[Job], Changes | None]) -> Job:
    """Read a job and apply the changes that `decide` returns, in one transaction; return the changed job.

    `decide` receives the current job. If it returns None or raises, the job stays as it is.
    """
    with store.write() as connection:
        job = _one(connection, job_id, lock=True)
        changes = decide(job)
        return job if changes is None else _compare_and_set(connection, job, changes)


def claim(store: Store, home: str) -> Job | None:
    """Set the oldest queued job of the service `home` to running; return it, or None if none is queued."""
    oldest = (
        select(JOBS).where(JOBS.c.state == "queued", JOBS.c.home == home).order_by(JOBS.c.number).limit(1)
    )
    while True:
        with store.read() as connection:
            row = connection.execute(oldest).first()
        if row is None:
            return None
        job = job_row(row)
        try:
            changes: Changes = {"state": "running", "ended": None, "code": None, "detail": None}
            changes |= {"attempt": job.attempt + 1, "started": job.started or store.clock()}
            return transition(store, job, **changes)
        except (JobChanged, UnknownJob):
            continue  # another process claimed this job


def remove(store: Store, job_id: str) -> Job:
    """Delete an ended or paused job, and the index of its run, from the store; return the job.

    The run directory stays.
    """
    job = get(store, job_id)
    refuse_unended(job)
    with store.write() as connection:
        result = connection.execute(
            delete(JOBS).where(JOBS.c.number == job.number, JOBS.c.version == job.version)
        )
        if not result.rowcount:
            raise JobChanged(f"job {job_id} is {_one(connection, job_id).state} now; look at it again")
    return job


def _one(connection: Connection, job_id: str, *, lock: bool = False) -> Job:
    query = select(JOBS).where(JOBS.c.id == job_id)
    row = connection.execute(query.with_for_update() if lock else query).first()
    if row is None:
        raise UnknownJob(f"there is no job {job_id[:64]!r}")
    return job_row(row)


def job_row(row: Row[Any]) -> Job:
    return Job.model_validate(row._asdict())


# paused, cancelled, failed -> queued: a user resumes the job from its last checkpoint.
# running -> queued: its process died or its service restarted, and it waits for its turn again.
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
_GONE = "its process was killed, or had no room on its disk to write why it ended"


def state_of_run(status: RunStatus) -> tuple[JobState, str | None, str | None]:
    """Return the state, code and detail of the job of a run that no service started.

    They are derived from the run's lock and its state file.
    """
    if status.holder is not None:
        return "running", None, None
    if status.interrupted:
        detail = f"{_GONE}{describe_place(status.state)}; turnwise train --resume continues it"
        return "failed", "killed", detail
    if status.state is None:  # written by a version without a state file
        return "paused", None, None
    return _OF_RUNS[status.state.state], status.state.code or None, status.state.detail or None


def refuse_unended(job: Job) -> None:
    """Raise JobConflict unless a job has ended or is paused, because other jobs must not be deleted."""
    if job.state not in (*ENDED, "paused"):
        raise JobConflict(f"job {job.id} is {job.state}; cancel it first, then delete it")


def refuse_leap(job: Job, state: JobState) -> None:
    """Raise JobConflict if `_AFTER` does not allow a job to change to `state`.

    A job whose process no service controls (origin cli) may change to any state.
    """
    if job.origin == "cli" or state == job.state or state in _AFTER[job.state]:
        return
    after = ", ".join(sorted(_AFTER[job.state])) or "none"
    raise JobConflict(f"job {job.id} is {job.state} and cannot become {state}; what may follow: {after}")


def read_rows(store: Store, home: str) -> list[dict[str, Any]]:
    """Return the jobs of the service `home`, in order of creation, as JSON for a backup.

    The fields `number`, `home` and `progress` are left out.
    """
    with store.read() as connection:
        rows = connection.execute(select(JOBS).where(JOBS.c.home == home).order_by(JOBS.c.number))
        return [job_row(row).model_dump(mode="json", exclude={"number", "home", "progress"}) for row in rows]


def put_rows(store: Store, rows: Sequence[Mapping[str, Any]], home: str, *, finish: Callable[[], int]) -> int:
    """Insert the jobs of a backup, in order, for the service `home`; return the result of `finish`.

    `finish` is called before the jobs are committed: if it raises, no job is stored. Raises JobError if the
    store already contains one of the jobs.
    """
    with store.write() as connection:
        known = set(connection.scalars(select(JOBS.c.id)))
        for row in rows:
            job = Job.model_validate({**row, "home": home})
            if job.id in known:
                raise JobError(
                    f"the store {store.shown} has job {job.id} already",
                    hint="A backup is restored into a database that does not have its jobs.",
                )
            connection.execute(insert(JOBS).values(job.model_dump(exclude=_NOT_GIVEN)))
        return finish()
