"""From whatever version a database has to that of this code, by Alembic; never past what this code knows."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from trainer_backend.store.errors import StoreError, StoreUnavailable

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
