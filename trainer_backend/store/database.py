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
    """The store cannot be used: its address or its version is wrong."""


class StoreUnavailable(
    StoreError, code="store_unavailable", status=503, title="Store does not answer", retry_after_s=RETRY_S
):
    """The database does not answer, or refuses to write. Runs lose nothing: the next sync catches up."""


class UnknownJob(StoreError, code="job_unknown", status=404, title="Unknown job"):
    """No job has that id."""


class UnknownRollout(StoreError, code="rollout_unknown", status=404, title="Unknown rollout"):
    """No rollout has that id."""


class UnknownCursor(ApiError):
    """The cursor was not issued by the store."""

    def __init__(self, cursor: str) -> None:
        super().__init__(f"cursor is {cursor[:40]!r}; send the cursor of the previous page unchanged")


class IdempotencyConflict(
    StoreError, code="idempotency_conflict", status=409, title="Idempotency key was used for another job"
):
    """An idempotency key was used again with another body."""


class JobConflict(StoreError, code="job_conflict", status=409, title="The job's state does not allow it"):
    """The job's state does not allow the request."""


class JobChanged(JobConflict, code="job_changed", title="The job was changed meanwhile"):
    """The job has changed since it was read. Read it again."""


_BUSY_S = 15.0  # how long a SQLite writer waits for another writer
_CONNECT_S = 5  # PostgreSQL: an address that swallows packets must not hold a start for minutes
_STATEMENT_S = 60  # no statement waits for ever, not even for a lock
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
# So a transaction that reads sees one state of the database, as it does in SQLite by default.
_ONE_STATE = {"postgresql": {"isolation_level": "REPEATABLE READ"}}


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Store:
    """An open store. Threads may share it; each call is a transaction of its own."""

    engine: Engine
    shown: str  # the address without its password, for messages
    clock: Callable[[], datetime] = utc_now  # the source of every stored time
    metrics: MetricsFiles = field(default_factory=MetricsFiles, compare=False)

    def read(self) -> AbstractContextManager[Connection]:
        """Open a transaction that reads one state of the store."""
        return self._transaction(**_ONE_STATE.get(self.engine.dialect.name, {}))

    def write(self) -> AbstractContextManager[Connection]:
        """Open a transaction that is committed whole or not at all.

        In SQLite the transaction takes the only write lock at its beginning. If it asked for the lock after a
        read, SQLite would refuse at once, whatever the waiting time.
        """
        return self._transaction(writes=True)

    def migration(self) -> AbstractContextManager[Connection]:
        """Open a write transaction for `migrate`, without foreign keys in SQLite.

        With foreign keys, copying a table in order to change it would delete every row that refers to it.
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
    # Neither the password nor the query, which may hold one too.
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
        # Created here, since SQLite would make it readable for everybody. Its other files copy this mode.
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
    connection.isolation_level = None  # `_begin_sqlite` begins transactions, not the driver
    connection.execute("PRAGMA foreign_keys = ON").close()
    _use_write_ahead_log(connection)
    connection.execute("PRAGMA synchronous = NORMAL").close()


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Switch the file permanently to write-ahead logging.

    SQLite refuses the switch at once while another connection reads or writes. BEGIN IMMEDIATE waits for that
    connection, up to `_BUSY_S`; then the switch is tried again.
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
# Alembic keeps the current migration in a global variable, so a process runs one at a time.
_ONE_AT_A_TIME = threading.Lock()


def migrate(connection: Connection, shown: str, revision: str = "head", *, lock_s: float = _LOCK_S) -> None:
    """Migrate the tables, up or down, in the transaction of a `Store.migration`: wholly or not at all.

    Args:
        revision: a version of migrations/versions, "head", or "base" (no tables).
        lock_s: PostgreSQL: how long to wait for other users of the tables.
    """
    with _ONE_AT_A_TIME, _lock_errors(shown, lock_s):
        if connection.dialect.name == "postgresql":
            connection.execute(text("SET LOCAL statement_timeout = 0"))  # a large database takes its time
            connection.execute(text(f"SET LOCAL lock_timeout = {round(1000 * lock_s)}"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
        else:
            # With foreign keys, copying a table would delete the rows that refer to it.
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
