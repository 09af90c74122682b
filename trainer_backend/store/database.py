"""Access to the database: address, transactions, migrations, and errors."""

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
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

from trainer_backend.errors import RETRY_S, ApiError, TrainerError
from trainer_backend.store.metrics import MetricsFiles


class StoreError(TrainerError, code="store_invalid", status=400, title="Store cannot be used"):
    """The store cannot be used: its URL is invalid, or a newer Turnwise has migrated its tables."""


class StoreUnavailable(
    StoreError, code="store_unavailable", status=503, title="Store does not answer", retry_after_s=RETRY_S
):
    """The database does not answer, or refuses to write.

    Runs lose no data: they write files, which the next sync indexes.
    """


class UnknownJob(StoreError, code="job_unknown", status=404, title="Unknown job"):
    """No job has the requested id."""


class UnknownRollout(StoreError, code="rollout_unknown", status=404, title="Unknown rollout"):
    """No rollout has the requested id."""


class UnknownCursor(ApiError):
    """The cursor was not issued by the store."""

    def __init__(self, cursor: str) -> None:
        super().__init__(f"cursor is {cursor[:40]!r}; send the cursor of the previous page unchanged")


class IdempotencyConflict(
    StoreError, code="idempotency_conflict", status=409, title="Idempotency key was used for another job"
):
    """An idempotency key was used again, with a different request body."""


class JobConflict(StoreError, code="job_conflict", status=409, title="The job's state does not allow it"):
    """The job's state does not allow the request."""


class JobChanged(JobConflict, code="job_changed", title="The job was changed meanwhile"):
    """The job has changed since the caller read it. The caller must read the job again."""


_BUSY_S = 15.0  # how long a SQLite writer waits for another writer
_CONNECT_S = 5  # PostgreSQL: an address that drops packets must not delay the start for minutes
_STATEMENT_S = 60  # maximum duration of a PostgreSQL statement, including its wait for locks
# These settings detect a dead server in half a minute. With the system's defaults it takes a quarter of an
# hour after a send, and two hours while listening.
_PEER = {
    "connect_timeout": _CONNECT_S,
    "keepalives": 1,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,  # milliseconds
}
# All queries of a read transaction then see the same state of the database, as in SQLite by default.
_ONE_STATE = {"postgresql": {"isolation_level": "REPEATABLE READ"}}


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Store:
    """An open database of jobs and runs.

    Threads may share a store: each call of `read` or `write` opens a transaction of its own.
    """

    engine: Engine
    shown: str  # the address without its password, for messages
    clock: Callable[[], datetime] = utc_now  # the source of every stored time
    metrics: MetricsFiles = field(default_factory=MetricsFiles, compare=False)

    def read(self) -> AbstractContextManager[Connection]:
        """Open a read transaction, whose queries all see the same state of the database."""
        return self._transaction(**_ONE_STATE.get(self.engine.dialect.name, {}))

    def write(self) -> AbstractContextManager[Connection]:
        """Open a write transaction: either all of its changes are committed, or none.

        In SQLite the transaction acquires the database's single write lock when it begins. If it requested
        the lock only after a read, SQLite could refuse at once instead of waiting.
        """
        return self._transaction(writes=True)

    def migration(self) -> AbstractContextManager[Connection]:
        """Open a write transaction for `migrate`. In SQLite it does not enforce foreign keys.

        A migration changes a SQLite table by copying it and dropping the original. With foreign keys, the
        drop would delete every row that refers to the table.
        """
        return self._transaction(writes=True, migrates=True)

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def _transaction(self, **options: Any) -> Iterator[Connection]:
        try:
            with self.engine.connect() as connection:
                if "migrates" in options:
                    connection.detach()  # the pool must not reuse a connection with these settings
                connection = connection.execution_options(**options)
                with connection.begin():
                    yield connection
        except (IntegrityError, DataError):
            raise  # a defect of this program, not of the database
        except (DBAPIError, PoolTimeout) as error:
            raise _unavailable(self.shown, error) from error


def open_store(url: str, *, clock: Callable[[], datetime] = utc_now) -> Store:
    """Open and migrate sqlite:///FILE (created if missing) or postgresql://USER:PASSWORD@HOST/DATABASE."""
    address = _address(url)
    # Without the password, and without the query of the URL, which may contain a password too.
    shown = address.set(drivername=address.drivername.partition("+")[0], query={})
    store = Store(_engine(address), shown.render_as_string(hide_password=True), clock)
    try:
        with store.migration() as connection:
            migrate(connection, store.shown)
    except BaseException:
        store.close()
        raise
    return store


def _address(url: str) -> URL:
    try:
        address = make_url(url)
    except (ArgumentError, ValueError):
        # No `from error`: the part that cannot be read may be the password.
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


def _engine(address: URL) -> Engine:
    # hide_parameters: otherwise an error repeats whole jobs and rollouts in the log.
    if address.drivername.startswith("postgresql"):
        connect_args = {name: value for name, value in _PEER.items() if name not in address.query}
        engine = create_engine(
            address, pool_pre_ping=True, pool_recycle=1800, connect_args=connect_args, hide_parameters=True
        )
        event.listen(engine, "connect", _prepare_postgresql)
        return engine
    file = Path(str(address.database))
    try:
        file.parent.mkdir(0o700, parents=True, exist_ok=True)
        # Created here, since SQLite would make the file readable by everyone. SQLite gives its other files
        # (log and shared memory) the same mode.
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
    connection.isolation_level = None  # not the driver but `_begin_sqlite` begins transactions
    connection.execute("PRAGMA foreign_keys = ON").close()
    _use_write_ahead_log(connection)
    connection.execute("PRAGMA synchronous = NORMAL").close()


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Switch the file permanently to write-ahead logging.

    While another connection reads or writes, SQLite refuses the switch at once. `BEGIN IMMEDIATE` waits up
    to `_BUSY_S` seconds for the other connection; after that the switch is tried again.
    """
    until = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").close()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        connection.execute("BEGIN IMMEDIATE").close()
        connection.execute("COMMIT").close()


def _begin_sqlite(connection: Connection) -> None:
    options = connection.get_execution_options()
    if options.get("migrates", False):
        connection.exec_driver_sql("PRAGMA foreign_keys = OFF")
    writes = options.get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _unavailable(shown: str, error: SQLAlchemyError) -> StoreUnavailable:
    message = str(error.orig if isinstance(error, DBAPIError) else error).strip()
    first = message.splitlines()[0] if message else type(error).__name__
    return StoreUnavailable(
        f"the store {shown} cannot be used: {first}",
        hint="Runs continue without it; their run directories hold everything, and a later sync reads it.",
    )


_FOLDER = Path(__file__).parent / "migrations"
# An arbitrary number: services that start together on one PostgreSQL take this lock and migrate in turn.
_LOCK_KEY = 7_421_986
_LOCK_S, _LOCK_TIMEOUT = 60.0, "55P03"  # PostgreSQL's lock_not_available
# Alembic keeps the current migration in a global variable, so a process runs one migration at a time.
_ONE_AT_A_TIME = threading.Lock()


def migrate(connection: Connection, shown: str, revision: str = "head", *, lock_s: float = _LOCK_S) -> None:
    """Upgrade or downgrade the tables to `revision`. If a step fails, the transaction undoes all steps.

    Args:
        connection: the transaction of `Store.migration`.
        shown: the store's address for error messages.
        revision: a version of migrations/versions, "head", or "base" (no tables).
        lock_s: in PostgreSQL, how many seconds to wait for other connections that use the tables.
    """
    with _ONE_AT_A_TIME, _lock_errors(shown, lock_s):
        if connection.dialect.name == "postgresql":
            connection.execute(text("SET LOCAL statement_timeout = 0"))  # a large database takes long
            connection.execute(text(f"SET LOCAL lock_timeout = {round(1000 * lock_s)}"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
        else:
            # With foreign keys, replacing a table would delete the rows that refer to it.
            assert not connection.scalar(text("PRAGMA foreign_keys")), "not from Store.migration"
        config = Config()
        config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
        config.attributes["connection"] = connection
        revisions = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
        now = MigrationContext.configure(connection).get_current_revision()
        if now is not None and now not in revisions:
            raise StoreError(
                f"the store {shown} has version {now!r}, and this Turnwise knows up to {revisions[0]!r}",
                hint="A newer Turnwise made it: install that one, or name another --database-url.",
            )
        target = revisions[0] if revision == "head" else revision
        if now == target:
            return
        downwards = now is not None and (target == "base" or revisions.index(target) > revisions.index(now))
        (command.downgrade if downwards else command.upgrade)(config, target)


@contextmanager
def _lock_errors(shown: str, lock_s: float) -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != _LOCK_TIMEOUT:
            raise
        raise StoreUnavailable(
            f"the store {shown} must be migrated, and others have held its tables for {lock_s:g} s",
            hint="Wait until another service has migrated it, or stop services of an earlier version.",
        ) from error
