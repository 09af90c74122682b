"""The door to the database: its address, its transactions, and what goes wrong with it as one sentence."""

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from trainer_backend.store.errors import StoreError, StoreUnavailable
from trainer_backend.store.schema_version import migrate

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
        """As `writing`, for `schema_version.migrate`: a table of SQLite that is copied to be changed takes
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
