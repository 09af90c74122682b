"""Every table, as typed models. Migrations (migrations/versions) create them; a test compares the two.

`Job` is the only copy of a job. The other tables index run directories: the next sync fills them again.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Connection,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    MetaData,
    Text,
    TypeDecorator,
    UniqueConstraint,
    select,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from trainer_backend.store.database import UnknownJob

# Column types that behave alike in both databases. Migrations use them too, so existing ones never change.

_WHOLE_NUMBERS = range(-(2**31), 2**31)  # the integers of a PostgreSQL column; SQLite's are longer


def fits(number: int) -> bool:
    """Return whether an integer column can hold the number.

    Never query for one it cannot: both databases fail.
    """
    return number in _WHOLE_NUMBERS


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC. SQLite stores no time zone and would return a naive datetime."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is not None and value.tzinfo is None:
            raise ValueError(f"{value} has no zone; the store keeps UTC")
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class AnyText(TypeDecorator[str]):
    """Text that both databases accept: PostgreSQL refuses NUL, and both refuse half a surrogate pair.

    A replacement character stands in their place. The files of the run keep the original text.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or (value.isascii() and "\0" not in value):
            return value
        whole = value.replace("\0", "\N{REPLACEMENT CHARACTER}")
        return whole.encode("utf-8", "replace").decode("utf-8")


class Base(DeclarativeBase):
    # Names for all, so that a migration can drop or change them in both databases.
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy's own)
        datetime: UtcDateTime,
        str: AnyText,
        dict[str, Any]: JSON,
        dict[str, str]: JSON,
        list[str]: JSON,
    }


def _job() -> Mapped[int]:
    """Return a column that refers to the job; deleting the job deletes the row."""
    return mapped_column(ForeignKey("jobs.number", ondelete="CASCADE"))


class Job(Base):
    """A job: posted to the service, or a run directory that `turnwise train` made."""

    __tablename__ = "jobs"
    __table_args__ = (
        UniqueConstraint("home", "idempotency_key"),
        {"sqlite_autoincrement": True},  # a number is never used again, even after a deletion
    )

    number: Mapped[int] = mapped_column(primary_key=True)  # in order of creation; pages go by it
    id: Mapped[str] = mapped_column(unique=True)  # uuid, hex
    name: Mapped[str]
    state: Mapped[str] = mapped_column(index=True)
    wanted: Mapped[str]
    config: Mapped[str]  # the resolved TOML, without secrets
    run_dir: Mapped[str | None] = mapped_column(unique=True)  # absolute; None until the job has one
    run_id: Mapped[str | None]
    origin: Mapped[str]
    home: Mapped[str]  # the service that runs it: several services may share one PostgreSQL, but no disk
    idempotency_key: Mapped[str | None]  # the client's key for its request to that service
    body_hash: Mapped[str | None]  # a digest of that request's body
    tags: Mapped[dict[str, str]]
    attempt: Mapped[int]  # number of processes started for it so far
    created: Mapped[datetime]
    started: Mapped[datetime | None]
    ended: Mapped[datetime | None]
    code: Mapped[str | None]  # why it failed or was stopped, for programs; `detail`: as a sentence
    detail: Mapped[str | None]
    version: Mapped[int]  # number of changes; compare-and-set uses it
    # Of the run, by the sync, for the list of runs. They are no changes of the job.
    environment: Mapped[str]
    model: Mapped[str]
    iteration: Mapped[int]  # the last finished one; 0 before the first
    finished: Mapped[datetime | None]  # when the sync first saw the row of that iteration in metrics.jsonl
    numbers: Mapped[dict[str, Any]]  # what a line of the list shows, see sync.summary_of
    outcome: Mapped[float | None]  # of the last iteration
    evaluation: Mapped[float | None]  # the outcome of the last evaluation


class SyncedFile(Base):
    """The part of a run directory's file that the store has seen.

    Of metrics.jsonl `size` bytes of whole lines (metrics.Mark). A Parquet file of rollouts was indexed at
    this size and time.
    """

    __tablename__ = "synced_files"
    __table_args__ = (Index(None, "job", "name", unique=True),)

    number: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[int] = _job()
    name: Mapped[str]
    size: Mapped[int] = mapped_column(BigInteger)
    modified_ns: Mapped[int] = mapped_column(BigInteger)
    digest: Mapped[str | None]
    base: Mapped[int] = mapped_column(BigInteger)
    rows: Mapped[int]


class Rollout(Base):
    """One stored rollout, failed ones included. The Parquet file holds the full record."""

    __tablename__ = "rollouts"
    __table_args__ = (
        Index(None, "file", "rollout_id", unique=True),
        Index(None, "job", "rollout_id"),
        Index(None, "job", "stage", "iteration"),
        Index(None, "job", "outcome_reward"),
        Index(None, "job", "group_id"),
        # One index per sort order of a page: without it SQLite sorts all rollouts of a run each time.
        Index(None, "job", "number"),
        Index(None, "job", "reward"),
        Index(None, "job", "unique_achievements"),
        Index(None, "job", "decisions"),
        # Every column that facets count: SQLite reads this index instead of the table.
        Index(
            "ix_rollouts_facets",
            *("job", "stage", "policy", "status", "failure_code", "stop_reason", "iteration"),
        ),
    )

    number: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[int] = _job()
    file: Mapped[int] = mapped_column(ForeignKey("synced_files.number", ondelete="CASCADE"))
    place: Mapped[int]  # its row in that file, from 0
    rollout_id: Mapped[str]
    stage: Mapped[str]
    iteration: Mapped[int]
    group_id: Mapped[str]
    sibling: Mapped[int]
    attempt: Mapped[int]
    policy: Mapped[str]  # last part of `model`, or the policy's name
    status: Mapped[str]
    seed: Mapped[int | None] = mapped_column(BigInteger)
    outcome_reward: Mapped[float | None]
    reward: Mapped[float | None]  # sum of r_t; None where no decision has a reward
    unique_achievements: Mapped[int | None]
    decisions: Mapped[int]
    env_steps: Mapped[int | None]
    stop_reason: Mapped[str | None]
    failure_code: Mapped[str | None]


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
