"""Defines all tables of the store. The migrations create the tables; a test compares both definitions.

Jobs are stored only in JOBS. The other tables index run directories; if they are lost, a sync fills them.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from types import NoneType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Connection,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    select,
)

from trainer_backend.store.database import UnknownJob
from trainer_backend.store.rows import Job, RolloutRow

# Column types that behave alike in both databases. Migrations use them too, so they must never change.

_WHOLE_NUMBERS = range(-(2**31), 2**31)  # the integers of a PostgreSQL column; SQLite's are longer


def fits(number: int) -> bool:
    """Return whether an integer column can hold the number; a query with any other number would fail."""
    return number in _WHOLE_NUMBERS


class UtcDateTime(TypeDecorator[datetime]):
    """A column of times in UTC. SQLite stores no time zone; without this type it would return naive times."""

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
    """A text column that accepts every string, although both databases refuse some characters.

    PostgreSQL refuses NUL, which is stored as U+FFFD. Both databases refuse lone surrogates, which are stored
    as `?`. The files of the run keep the original text.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or (value.isascii() and "\0" not in value):
            return value
        whole = value.replace("\0", "\N{REPLACEMENT CHARACTER}")
        return whole.encode("utf-8", "replace").decode("utf-8")


# Names for all indexes and constraints, so that a migration can drop or change them in both databases.
METADATA = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)
_TYPES: Mapping[Any, Any] = {int: Integer, float: Double, str: AnyText, datetime: UtcDateTime, dict: JSON}


def _columns(row: type, *, without: str, **options: Mapping[str, Any]) -> Iterator[Column[Any]]:
    """Yield a column for each field of the class `row` except `without`. `options` has arguments by field."""
    for name, hint in get_type_hints(row).items():
        if name == without or name.startswith("_") or get_origin(hint) is ClassVar:
            continue
        nullable = NoneType in get_args(hint)
        kind = get_args(hint)[0] if nullable else hint
        plain = str if get_origin(kind) is Literal else get_origin(kind) or kind
        yield Column(name, **{"type_": _TYPES[plain], "nullable": nullable, **options.get(name, {})})


def _refer(name: str, table: str) -> Column[int]:
    """Return a foreign key to `table`. If a row of `table` is deleted, so are the rows that refer to it."""
    return Column(name, ForeignKey(f"{table}.number", ondelete="CASCADE"), nullable=False)


JOBS = Table(
    "jobs",
    METADATA,
    *_columns(
        Job,
        without="progress",
        number={"primary_key": True},
        id={"unique": True},
        run_dir={"unique": True},
        state={"index": True},
    ),
    UniqueConstraint("home", "idempotency_key"),
    sqlite_autoincrement=True,  # a number is never used again, even after a deletion
)

# The files of run directories that the store has indexed. For metrics.jsonl, `size` counts bytes of whole
# lines (metrics.Mark). For a Parquet file of rollouts, size and time are those at which it was indexed.
SYNCED_FILES = Table(
    "synced_files",
    METADATA,
    Column("number", Integer, primary_key=True),
    _refer("job", "jobs"),
    Column("name", AnyText, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("modified_ns", BigInteger, nullable=False),
    Column("digest", AnyText),
    Column("base", BigInteger, nullable=False),
    Column("rows", Integer, nullable=False),
    # For a Parquet file: how many rollouts have each combination of values, as [*COUNTED, count].
    Column("counts", JSON, nullable=False, default=list),
    Index(None, "job", "name", unique=True),
)

# The index of rollouts, failed ones included. The Parquet file holds the full record.
ROLLOUTS = Table(
    "rollouts",
    METADATA,
    *_columns(RolloutRow, without="file", number={"primary_key": True}, seed={"type_": BigInteger}),
    _refer("job", "jobs"),
    _refer("file", "synced_files"),
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
)
# Columns by which pages count rollouts. Pages add the files' counts, so no page reads all rollouts of a run.
COUNTED = ("stage", "policy", "status", "failure_code", "stop_reason", "iteration")


def job_number(connection: Connection, job_id: str, *, lock: bool = False) -> int:
    """Return the number of a job. If `lock`, the job stays locked until the transaction ends."""
    query = select(JOBS.c.number).where(JOBS.c.id == job_id)
    number: int | None = connection.scalar(query.with_for_update() if lock else query)
    if number is None:
        raise UnknownJob(f"there is no job {job_id[:64]!r}")
    return number
