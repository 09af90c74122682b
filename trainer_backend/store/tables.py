"""Every table, as typed models. Migrations (migrations/versions) make them; a test holds the two equal.

`Job` is the truth of jobs. All else is an index of run directories: gone, it comes back with the next sync.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    MetaData,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

# Column types that both databases answer alike. Migrations use them too, so they never change, only grow.

_WHOLE_NUMBERS = range(-(2**31), 2**31)  # of a column of PostgreSQL; SQLite's are longer


def fits(number: int) -> bool:
    """Whether a column of whole numbers could hold it. What could not, is asked of no database: one answers
    with an error, the other's driver with another."""
    return number in _WHOLE_NUMBERS


class UtcDateTime(TypeDecorator[datetime]):
    """A moment with its zone, UTC: SQLite keeps none, and would give back a naive one."""

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
    """Text, whatever a model or a client wrote: PostgreSQL holds no NUL, and no database half a character.

    In their place stands a mark. A record that must keep them is no column of ours, but a file of the run.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or (value.isascii() and "\0" not in value):
            return value
        whole = value.replace("\0", "\N{REPLACEMENT CHARACTER}")
        return whole.encode("utf-8", "replace").decode("utf-8")


class Base(DeclarativeBase):
    # Named, so that a migration can drop or change any of them on both databases.
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
    """Whose row it is; with the job it goes."""
    return mapped_column(ForeignKey("jobs.number", ondelete="CASCADE"))


class Job(Base):
    """A job: posted, or found as a run directory that `turnwise train` made."""

    __tablename__ = "jobs"
    __table_args__ = (
        UniqueConstraint("home", "idempotency_key"),
        {"sqlite_autoincrement": True},  # a number is never used twice, also after a delete
    )

    number: Mapped[int] = mapped_column(primary_key=True)  # in order of creation; pages go by it
    id: Mapped[str] = mapped_column(unique=True)  # uuid, hex
    name: Mapped[str]
    state: Mapped[str] = mapped_column(index=True)
    wanted: Mapped[str]
    config: Mapped[str]  # the resolved TOML, without secrets
    run_dir: Mapped[str | None] = mapped_column(unique=True)
    run_id: Mapped[str | None]
    origin: Mapped[str]
    home: Mapped[str]  # which service runs it: several may share one PostgreSQL, and no disk
    idempotency_key: Mapped[str | None]  # a client's name of its request to that service
    body_hash: Mapped[str | None]
    tags: Mapped[dict[str, str]]
    attempt: Mapped[int]
    created: Mapped[datetime]
    started: Mapped[datetime | None]
    ended: Mapped[datetime | None]
    code: Mapped[str | None]
    detail: Mapped[str | None]
    version: Mapped[int]  # counts changes: who changes a row says which version he saw


class SyncedFile(Base):
    """How far a file of a run directory is in the store.

    Of a file that grows line by line, `size` bytes are in, and `digest` is of the last ones, which tells a
    file that was written anew. A file of rollouts was read whole when it had this size and time;
    `decisions` says whether those are in too: retention takes them out.
    """

    __tablename__ = "synced_files"
    __table_args__ = (Index(None, "job", "name", unique=True),)

    number: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[int] = _job()
    name: Mapped[str]
    size: Mapped[int] = mapped_column(BigInteger)
    modified_ns: Mapped[int] = mapped_column(BigInteger)
    digest: Mapped[str | None]
    decisions: Mapped[bool]


class MetricRow(Base):
    """A row of metrics.jsonl as it was written, lists and texts too; live pages go on from its `number`."""

    __tablename__ = "metric_rows"
    __table_args__ = (
        Index(None, "job", "kind", "iteration", unique=True),
        {"sqlite_autoincrement": True},
    )

    number: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[int] = _job()
    kind: Mapped[str]
    iteration: Mapped[int]
    row: Mapped[dict[str, Any]]


class Curve(Base):
    """The name of a number that rows of a kind have. Of a dict in a row each number has one: `name/key`."""

    __tablename__ = "curves"
    __table_args__ = (Index(None, "job", "kind", "name", unique=True),)

    number: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[int] = _job()
    kind: Mapped[str]
    name: Mapped[str]


class Metric(Base):
    """A point of a curve."""

    __tablename__ = "metrics"
    __table_args__ = ({"sqlite_with_rowid": False},)  # clustered by the key: a curve is one stretch of it

    curve: Mapped[int] = mapped_column(ForeignKey("curves.number", ondelete="CASCADE"), primary_key=True)
    iteration: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[float]


class Iteration(Base):
    """A finished iteration: it has a row of metrics."""

    __tablename__ = "iterations"

    job: Mapped[int] = mapped_column(ForeignKey("jobs.number", ondelete="CASCADE"), primary_key=True)
    iteration: Mapped[int] = mapped_column(primary_key=True)
    policy_version: Mapped[int | None]
    finished: Mapped[datetime]  # when its row was first seen in metrics.jsonl, by that file's time


class Rollout(Base):
    """One stored rollout, failed ones too; the record itself stands in the Parquet file."""

    __tablename__ = "rollouts"
    __table_args__ = (
        Index(None, "file", "rollout_id", unique=True),
        Index(None, "job", "rollout_id"),
        Index(None, "job", "stage", "iteration"),
        Index(None, "job", "outcome_reward"),
        Index(None, "job", "group_id"),
        # What pages are sorted by: SQLite would sort all rollouts of a run for each.
        Index(None, "job", "number"),
        Index(None, "job", "reward"),
        Index(None, "job", "unique_achievements"),
        Index(None, "job", "decisions"),
        # All that facets count: of a hundred thousand rollouts the index is read, and not the table.
        Index(
            "ix_rollouts_facets",
            *("job", "stage", "policy", "status", "failure_code", "stop_reason", "iteration"),
        ),
    )

    number: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[int] = _job()
    file: Mapped[int] = mapped_column(ForeignKey("synced_files.number", ondelete="CASCADE"))
    rollout_id: Mapped[str]
    stage: Mapped[str]
    iteration: Mapped[int]
    group_id: Mapped[str]
    sibling: Mapped[int]
    attempt: Mapped[int]
    policy: Mapped[str]  # last part of `model`, or the name of a policy without one
    status: Mapped[str]
    seed: Mapped[int | None] = mapped_column(BigInteger)
    outcome_reward: Mapped[float | None]
    reward: Mapped[float | None]  # sum of r_t; None where nothing was credited
    unique_achievements: Mapped[int | None]
    decisions: Mapped[int]
    env_steps: Mapped[int | None]
    stop_reason: Mapped[str | None]
    failure_code: Mapped[str | None]


class Decision(Base):
    """One decision of a rollout, with what training made of it."""

    __tablename__ = "decisions"
    __table_args__ = ({"sqlite_with_rowid": False},)

    rollout: Mapped[int] = mapped_column(ForeignKey("rollouts.number", ondelete="CASCADE"), primary_key=True)
    turn: Mapped[int] = mapped_column(primary_key=True)
    action: Mapped[str]
    unique_delta: Mapped[int]
    ach_delta: Mapped[int]
    unique: Mapped[list[str]]
    env_reward: Mapped[float]
    reward: Mapped[float | None]
    return_to_go: Mapped[float | None]
    advantage: Mapped[float | None]
    state_key: Mapped[str | None]
    invalid_reason: Mapped[str | None]


class Checkpoint(Base):
    """A checkpoint folder that stands."""

    __tablename__ = "checkpoints"

    job: Mapped[int] = mapped_column(ForeignKey("jobs.number", ondelete="CASCADE"), primary_key=True)
    folder: Mapped[str] = mapped_column(primary_key=True)
    iteration: Mapped[int]
    best: Mapped[bool]
    bytes: Mapped[int] = mapped_column(BigInteger)


class Consumed(Base):
    """A rollout that an update learned from. What was planned is learned from once in a run's life, whatever
    start has played it, which the key holds."""

    __tablename__ = "consumed"
    __table_args__ = (Index(None, "job", "iteration"),)

    job: Mapped[int] = mapped_column(ForeignKey("jobs.number", ondelete="CASCADE"), primary_key=True)
    planned: Mapped[str] = mapped_column(primary_key=True)  # rundir.ledger.planned_id
    rollout_id: Mapped[str]
    iteration: Mapped[int]
