"""The rows of jobs as JSON, which a backup holds: read from a store, and put into another one."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import DateTime, insert, select

from trainer_backend.errors import JobError
from trainer_backend.store.database import Store
from trainer_backend.store.tables import Job, UtcDateTime

# A row's place in its own store: its number, and the service that runs it.
_PLACE = ("number", "home")


def read_rows(store: Store, home: str) -> list[dict[str, Any]]:
    """Read the jobs of a service in their order, without their place in this store."""
    with store.read() as connection:
        found = connection.execute(select(Job.__table__).where(Job.home == home).order_by(Job.number))
        rows = [dict(row) for row in found.mappings()]
    for row in rows:
        for name in _PLACE:
            del row[name]
        for name, value in row.items():
            row[name] = value.isoformat() if isinstance(value, datetime) else value
    return rows


def put_rows(store: Store, rows: Sequence[Mapping[str, Any]], home: str, *, finish: Callable[[], int]) -> int:
    """Put jobs into a store in their order, for a service; return what `finish` does.

    Args:
        finish: called before the rows are committed; if it raises, none is there.

    Raises:
        JobError: the store has one of them.
    """
    moments = [
        column.name for column in Job.__table__.columns if isinstance(column.type, UtcDateTime | DateTime)
    ]
    with store.write() as connection:
        known = set(connection.scalars(select(Job.id)))
        for row in rows:
            if row["id"] in known:
                raise JobError(
                    f"the store {store.shown} has job {row['id']} already",
                    hint="A backup is restored into a database that does not have its jobs.",
                )
            times = {name: datetime.fromisoformat(row[name]) for name in moments if row[name] is not None}
            connection.execute(insert(Job).values({**row, **times, "home": home}))
        return finish()
