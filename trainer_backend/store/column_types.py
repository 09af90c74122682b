"""Column types that both databases answer alike. Migrations use them too, so they never change, only grow."""

from datetime import UTC, datetime

from sqlalchemy import DateTime, Dialect, Text, TypeDecorator

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
