"""Jobs in the store: made once, changed by compare-and-set, claimed by one; which states may follow."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypedDict, Unpack
from uuid import uuid4

from sqlalchemy import Connection, Row, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from trainer_backend.rundir.state import Watched
from trainer_backend.store.database import (
    IdempotencyConflict,
    JobChanged,
    JobConflict,
    Store,
    UnknownCursor,
    UnknownJob,
)
from trainer_backend.store.rows import ENDED, JobRow, JobState, Origin, Page, Wanted
from trainer_backend.store.tables import Job, fits

_COLUMNS = [getattr(Job, name) for name in JobRow.__slots__]


class Changes(TypedDict, total=False):
    """What a transition may change; what is not named stays."""

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


@dataclass(frozen=True, slots=True)
class NewJob:
    """The values that a new job is made of.

    Attributes:
        config: the resolved TOML, without secrets.
        home: which service runs it.
        run_dir: absolute; None until it has one.
        idempotency_key, body_hash: the client's name of its request to that service, and a digest of what it
            sent.
    """

    name: str
    config: str
    home: str
    origin: Origin = "api"
    state: JobState = "queued"
    run_dir: Path | None = None
    run_id: str | None = None
    tags: tuple[tuple[str, str], ...] = ()
    idempotency_key: str | None = None
    body_hash: str | None = None


def made_by(store: Store, home: str, key: str, body_hash: str) -> JobRow | None:
    """The job that a request has made at a service; None: none yet.

    Raises:
        IdempotencyConflict: the key was used there with another body.
        StoreUnavailable: the database does not answer.
    """
    with store.reading() as connection:
        return _of_key(connection, home, key, body_hash)


def create(store: Store, new: NewJob) -> tuple[JobRow, bool]:
    """The job, and whether this call made it: False where the same request did before.

    Raises:
        IdempotencyConflict: the key was used with another body.
        JobConflict: another job has that run directory.
        StoreUnavailable: the database does not answer.
    """
    job_id = uuid4().hex
    values = {
        "id": job_id,
        "name": new.name,
        "state": new.state,
        "wanted": "run",
        "config": new.config,
        "run_dir": None if new.run_dir is None else str(new.run_dir),
        "run_id": new.run_id,
        "origin": new.origin,
        "home": new.home,
        "idempotency_key": new.idempotency_key,
        "body_hash": new.body_hash,
        "tags": dict(new.tags),
        "attempt": 0,
        "created": store.clock(),
        "version": 1,
    }
    try:
        with store.writing() as connection:
            found = _of_request(connection, new)
            if found is not None:
                return found, False
            connection.execute(insert(Job).values(values))
            return _one(connection, job_id), True
    except IntegrityError as error:  # the directory is another job's, or somebody was quicker with the key
        with store.reading() as connection:
            found = _of_request(connection, new)
        if found is not None:
            return found, False
        raise JobConflict(f"another job has the run directory {new.run_dir}") from error


def _of_request(connection: Connection, new: NewJob) -> JobRow | None:
    if new.idempotency_key is None:
        return None
    return _of_key(connection, new.home, new.idempotency_key, new.body_hash)


def _of_key(connection: Connection, home: str, key: str, body_hash: str | None) -> JobRow | None:
    query = select(Job.id, Job.body_hash).where(Job.home == home, Job.idempotency_key == key)
    found = connection.execute(query).first()
    if found is None:
        return None
    if found.body_hash != body_hash:
        raise IdempotencyConflict(
            f"Idempotency-Key {key!r} made job {found.id} of another body; take a new key"
        )
    return _one(connection, found.id)


def get(store: Store, job_id: str) -> JobRow:
    """One job.

    Raises:
        UnknownJob: there is none of that id.
    """
    with store.reading() as connection:
        return _one(connection, job_id)


def find(
    store: Store,
    *,
    states: Iterable[JobState] = (),
    home: str | None = None,
    origin: Origin | None = None,
    cursor: str | None = None,
    limit: int = 50,
) -> Page[JobRow]:
    """Jobs, newest first; a page of at most `limit`.

    Args:
        states, home, origin: only those; absent: any.
        cursor: that of the page before.
    """
    query = select(*_COLUMNS).order_by(Job.number.desc()).limit(limit + 1)
    wanted = tuple(states)
    if wanted:
        query = query.where(Job.state.in_(wanted))
    if home is not None:
        query = query.where(Job.home == home)
    if origin is not None:
        query = query.where(Job.origin == origin)
    if cursor is not None:
        query = query.where(Job.number < number_of(cursor))
    with store.reading() as connection:
        rows = [job_row(row) for row in connection.execute(query)]
    return Page(tuple(rows[:limit]), str(rows[limit - 1].number) if len(rows) > limit else None)


def counts(store: Store, home: str) -> dict[str, int]:
    """How many jobs of a service are in each state; states without one are left out."""
    query = select(Job.state, func.count()).where(Job.home == home).group_by(Job.state)
    with store.reading() as connection:
        return {state: count for state, count in connection.execute(query)}


def number_of(cursor: str) -> int:
    """Return the number in a cursor.

    Raises:
        UnknownCursor: it is none of ours.
    """
    if not cursor.isdecimal() or len(cursor) > 18 or not fits(int(cursor)):
        raise UnknownCursor(cursor)
    return int(cursor)


def transition(store: Store, job: JobRow, **changes: Unpack[Changes]) -> JobRow:
    """Change a job as it was when `job` was read: compare-and-set on its version.

    Raises:
        JobChanged: somebody changed it since; read it again and decide anew.
        JobConflict: no state leads from its state to the new one (states.py).
        UnknownJob: it was deleted.
    """
    with store.writing() as connection:
        return _changed(connection, job, changes)


def _changed(connection: Connection, job: JobRow, changes: Changes) -> JobRow:
    if "state" in changes:
        refuse_leap(job, changes["state"])
    done = connection.execute(
        update(Job)
        .where(Job.number == job.number, Job.version == job.version)
        .values({**changes, "version": job.version + 1})
    )
    now = _one(connection, job.id)
    if not done.rowcount:
        raise JobChanged(f"job {job.id} is {now.state} now, and was {job.state} when it was read")
    return now


def change(store: Store, job_id: str, decide: Callable[[JobRow], Changes | None]) -> JobRow:
    """Read a job, decide, change it, with nobody in between.

    Args:
        decide: what to change, from the job as it is; None: nothing. What it raises leaves the job as it was.

    Returns:
        The job as it is afterwards.

    Raises:
        UnknownJob: there is none of that id.
        JobConflict: no state leads from its state to the new one (states.py).
    """
    with store.writing() as connection:
        job = _one(connection, job_id, lock=True)
        changes = decide(job)
        return job if changes is None else _changed(connection, job, changes)


def claim(store: Store, home: str) -> JobRow | None:
    """The oldest queued job of a service, running from now on and nobody else's; None: none waits."""
    oldest = select(*_COLUMNS).where(Job.state == "queued", Job.home == home).order_by(Job.number).limit(1)
    while True:
        with store.reading() as connection:
            found = connection.execute(oldest).first()
        if found is None:
            return None
        job = job_row(found)
        try:
            return transition(
                store,
                job,
                state="running",
                attempt=job.attempt + 1,
                started=job.started or store.clock(),
                ended=None,
                code=None,
                detail=None,
            )
        except (JobChanged, UnknownJob):
            continue  # another was quicker, so the queue moved on


def remove(store: Store, job_id: str) -> JobRow:
    """Delete an ended job with all that the store has of its run; the job as it was. Files stay.

    Raises:
        UnknownJob: there is none of that id.
        JobConflict: it has not ended.
    """
    job = get(store, job_id)
    refuse_unended(job)
    with store.writing() as connection:
        done = connection.execute(delete(Job).where(Job.number == job.number, Job.version == job.version))
        if not done.rowcount:
            raise JobChanged(f"job {job_id} is {_one(connection, job_id).state} now; look at it again")
    return job


def _one(connection: Connection, job_id: str, *, lock: bool = False) -> JobRow:
    query = select(*_COLUMNS).where(Job.id == job_id)
    found = connection.execute(query.with_for_update() if lock else query).first()
    if found is None:
        raise UnknownJob(f"there is no job {job_id[:64]!r}")
    return job_row(found)


def job_row(row: Row[Any]) -> JobRow:
    """A row of `jobs` as what the store gives out."""
    return JobRow(**{name: getattr(row, name) for name in JobRow.__slots__})


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
