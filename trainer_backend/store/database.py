"""The door to the database: its address, transactions, migrations, and its errors as one sentence."""

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from trainer_backend.errors import TrainerError

# What the store raises on purpose; drawn in the tree of trainer_backend/errors.py.


class StoreError(TrainerError):
    """The store cannot be used as it stands: its address, its version."""

    code = "store_invalid"
    status = 400
    title = "Store cannot be used"


class StoreUnavailable(StoreError):
    """The database does not answer, or refuses to write. No run loses anything: the next sync catches up."""

    code = "store_unavailable"
    status = 503
    retry_after_s = 5  # about as long as a database needs to start
    title = "Store does not answer"


class UnknownJob(StoreError):
    code = "job_unknown"
    status = 404
    title = "Unknown job"


class UnknownRollout(StoreError):
    code = "rollout_unknown"
    status = 404
    title = "Unknown rollout"


class UnknownCursor(StoreError):
    """Where a page would begin, and no page before has said so."""

    code = "request_invalid"
    status = 422
    title = "Request cannot be read"

    def __init__(self, cursor: str) -> None:
        super().__init__(f"cursor is {cursor[:40]!r}; give back the one of the page before, as it came")


class IdempotencyConflict(StoreError):
    """The same key with another body."""

    code = "idempotency_conflict"
    status = 409
    title = "Idempotency key was used for another job"


class JobConflict(StoreError):
    """The job is in a state in which that makes no sense."""

    code = "job_conflict"
    status = 409
    title = "The job's state does not allow it"


class JobChanged(JobConflict):
    """Somebody else changed the job since it was read; read it again."""

    code = "job_changed"
    title = "The job was changed meanwhile"


_BUSY_S = 15.0  # how long a writer waits for another one of SQLite
_CONNECT_S = 5  # PostgreSQL: an address that swallows packets must not hold a start for minutes
_STATEMENT_S = 60  # and no statement may wait for ever, not for a lock either
# A server that is gone without a word is told in half a minute: the system would wait a quarter of an hour
# where it has sent something, and two hours where it only listens.
_PEER = {
    "connect_timeout": _CONNECT_S,
    "keepalives": 1,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,  # milliseconds
}
# SQLite does so by itself.
_ONE_STATE = {"postgresql": {"isolation_level": "REPEATABLE READ"}}


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Store:
    """An open store; safe to use from many threads, each call is a transaction of its own.

    Attributes:
        shown: the address as it may be printed: no password.
        clock: what is written down as the time of things.
    """

    engine: Engine
    shown: str
    clock: Callable[[], datetime] = utc_now

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that sees one state of the store.

        Raises:
            StoreUnavailable: the database does not answer.
        """
        with self._errors(), self.engine.connect() as connection:
            connection = connection.execution_options(**_ONE_STATE.get(self.engine.dialect.name, {}))
            with connection.begin():
                yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that is kept as a whole, or not at all.

        SQLite takes its only write lock at the beginning: a lock that is wanted after a read would be refused
        at once, whatever the waiting time.

        Raises:
            StoreUnavailable: the database does not answer, is read-only or full.
        """
        with self._errors(), self.engine.connect() as connection:
            connection = connection.execution_options(writes=True)
            with connection.begin():
                yield connection

    @contextmanager
    def migrating(self) -> Iterator[Connection]:
        """As `writing`, for `migrate`: a table of SQLite that is copied to be changed takes
        nothing with it that refers to it.

        Raises:
            StoreUnavailable: the database does not answer, is read-only or full.
        """
        with self._errors(), self.engine.connect() as connection:
            connection.detach()  # what it is prepared for, no other use of it is to meet
            connection = connection.execution_options(writes=True, migrates=True)
            with connection.begin():
                yield connection

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (IntegrityError, DataError):
            raise  # a mistake of ours
        except (DBAPIError, PoolTimeout) as error:
            raise _unavailable(self.shown, error) from error


def open_store(url: str, *, clock: Callable[[], datetime] = utc_now) -> Store:
    """Connect, and bring the tables to this version.

    Args:
        url: sqlite:///FILE (made where it is missing) or postgresql://USER:PASSWORD@HOST/DATABASE.

    Raises:
        StoreError: another kind of database, or one that a newer version of Turnwise made.
        StoreUnavailable: it does not answer.
    """
    address = _address(url)
    store = Store(_engine(address), _shown(address), clock)
    try:
        with store.migrating() as connection:
            migrate(connection, store.shown)
    except BaseException:
        store.close()
        raise
    return store


def _address(url: str) -> URL:
    try:
        address = make_url(url)
    except (ArgumentError, ValueError):
        # From nothing: what could not be read may be the password.
        raise StoreError(
            "the database URL cannot be read; write sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE"
        ) from None
    kind = address.drivername.partition("+")[0]
    if kind in ("postgresql", "postgres"):
        return address.set(drivername="postgresql+psycopg")
    if kind != "sqlite":
        raise StoreError(f"the database URL names {kind!r}; known: sqlite, postgresql")
    if not address.database or address.database == ":memory:":
        raise StoreError("a store in memory would forget its jobs; write sqlite:///FILE")
    return address


def _shown(address: URL) -> str:
    """Without the password, and without the query, which may hold one too."""
    kind = address.drivername.partition("+")[0]
    return address.set(drivername=kind, query={}).render_as_string(hide_password=True)


def _engine(address: URL) -> Engine:
    # hide_parameters: an error would repeat whole jobs and rollouts in the log.
    if address.drivername.startswith("postgresql"):
        given = {name: value for name, value in _PEER.items() if name not in address.query}
        engine = create_engine(
            address, pool_pre_ping=True, pool_recycle=1800, connect_args=given, hide_parameters=True
        )
        event.listen(engine, "connect", _prepare_postgresql)
        return engine
    file = Path(str(address.database))
    try:
        file.parent.mkdir(0o700, parents=True, exist_ok=True)
        # Before SQLite makes it for everybody to read; the files that it puts beside have the same mode.
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise StoreUnavailable(f"{file} cannot be made for the store: {error}") from error
    engine = create_engine(address, connect_args={"timeout": _BUSY_S}, hide_parameters=True)
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_postgresql(connection: Any, _record: Any) -> None:
    connection.execute(f"SET statement_timeout = '{_STATEMENT_S}s'")
    connection.commit()


def _prepare_sqlite(connection: sqlite3.Connection, _record: Any) -> None:
    connection.isolation_level = None  # the driver begins nothing by itself: `_begin_sqlite` does
    for pragma in ("foreign_keys = ON", "journal_mode = WAL", "synchronous = NORMAL"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: Connection) -> None:
    options = connection.get_execution_options()
    if options.get("migrates", False):
        connection.exec_driver_sql("PRAGMA foreign_keys = OFF")
    writes = options.get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _unavailable(shown: str, error: SQLAlchemyError) -> StoreUnavailable:
    told = str(error.orig if isinstance(error, DBAPIError) else error).strip()
    first = told.splitlines()[0] if told else type(error).__name__
    return StoreUnavailable(
        f"the store {shown} cannot be used: {first}",
        hint="Runs go on without it; what they write is in their run directories, and synced later.",
    )


_FOLDER = Path(__file__).parent / "migrations"
# Any number: two services that start together on one PostgreSQL migrate one after the other.
_LOCK_KEY = 7_421_986
_LOCK_S, _LOCK_TIMEOUT = 60.0, "55P03"  # PostgreSQL's lock_not_available
# Alembic keeps the migration at hand in a global, so a process does one at a time.
_ONE_AT_A_TIME = threading.Lock()


def migrate(connection: Connection, shown: str, revision: str = "head", *, lock_s: float = _LOCK_S) -> None:
    """Bring the tables to `revision`, up or down, in the transaction of `connection`: wholly or not at all.

    Args:
        connection: of `Store.migrating`.
        shown: the database's address as errors may name it.
        revision: a version of migrations/versions, "head", or "base" (no tables).
        lock_s: how long it may wait for others who use a table of PostgreSQL, or migrate it too.

    Raises:
        StoreError: the database has a version that this code does not know.
        StoreUnavailable: others have held it for so long.
    """
    with _ONE_AT_A_TIME, _told_of_locks(shown, lock_s):
        if connection.dialect.name == "postgresql":
            connection.execute(text("SET LOCAL statement_timeout = 0"))  # a large database takes its time
            connection.execute(text(f"SET LOCAL lock_timeout = {round(1000 * lock_s)}"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
        else:
            # Else a table that is copied would take along all that refers to it.
            assert not connection.scalar(text("PRAGMA foreign_keys")), "of Store.migrating"
        config = Config()
        config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
        config.attributes["connection"] = connection
        known = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
        now = MigrationContext.configure(connection).get_current_revision()
        _refuse_newer(known, now, shown)
        target = known[0] if revision == "head" else revision
        if now == target:
            return
        downwards = now is not None and (target == "base" or known.index(target) > known.index(now))
        (command.downgrade if downwards else command.upgrade)(config, target)


@contextmanager
def _told_of_locks(shown: str, lock_s: float) -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != _LOCK_TIMEOUT:
            raise
        raise StoreUnavailable(
            f"the store {shown} must be migrated, and others have held its tables for {lock_s:g} s",
            hint="Wait for a service that migrates it, or stop those of an earlier version, and start again.",
        ) from error


def _refuse_newer(newest_first: list[str], now: str | None, shown: str) -> None:
    if now is not None and now not in newest_first:
        raise StoreError(
            f"the store {shown} has version {now!r}, and this Turnwise knows up to {newest_first[0]!r}",
            hint="A newer Turnwise made it: install that one, or name another --database-url.",
        )
