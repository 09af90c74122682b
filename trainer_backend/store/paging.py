"""Pages of a sorted query. Rows whose sort value is NULL come last in both directions.

The key of the table breaks ties.
"""

import base64
import json
import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Column, ColumnElement, Integer, Select, and_, or_

from trainer_backend.store.database import UnknownCursor
from trainer_backend.store.rows import Page
from trainer_backend.store.tables import AnyText, UtcDateTime, fits


def sort_page(
    query: Select[Any],
    by: Column[Any],
    number: Column[int],
    *,
    descending: bool,
    cursor: str | None,
    limit: int,
) -> Select[Any]:
    """Restrict a query to one page. The result returns `limit` + 1 rows if another page follows.

    Args:
        by: the column to sort by.
        number: the key of the table.
        cursor: the cursor of the previous page, which must have the same filter and order.
    """
    if cursor is not None:
        query = query.where(_beyond(by, number, *_read_cursor(cursor, by), descending=descending))
    order = (by.desc(), number.desc()) if descending else (by.asc(), number.asc())
    return query.order_by(order[0].nulls_last(), order[1]).limit(limit + 1)


def make_page(rows: Sequence[Any], column: str, limit: int) -> Page[Any]:
    """Make a page from the rows of a `sort_page` query; `column` is the name of the sort column."""
    if len(rows) <= limit:
        return Page(tuple(rows), None)
    end = rows[limit - 1]
    value = getattr(end, column)
    value = value.isoformat() if isinstance(value, datetime) else value
    cursor = base64.urlsafe_b64encode(json.dumps([value, end.number]).encode()).decode().rstrip("=")
    return Page(tuple(rows[:limit]), cursor)


def _beyond(
    by: Column[Any], numbers: Column[int], value: Any, number: int, *, descending: bool
) -> ColumnElement[bool]:
    """Return the condition for the rows that follow the row with this sort value and number."""
    behind = numbers < number if descending else numbers > number
    if value is None:
        return and_(by.is_(None), behind)
    return or_(by < value if descending else by > value, and_(by == value, behind), by.is_(None))


def _read_cursor(cursor: str, by: Column[Any]) -> tuple[Any, int]:
    """Return the sort value and the number in a cursor; raise UnknownCursor if a column cannot hold them."""
    try:
        value, number = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        value, valid = (None, True) if value is None else _read_value(value, by)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise UnknownCursor(cursor) from error
    if not (valid and _is_whole(number)):
        raise UnknownCursor(cursor)
    return value, number


def _read_value(value: Any, by: Column[Any]) -> tuple[Any, bool]:
    """Convert a sort value to the type of its column; also return whether the column can hold the value."""
    if isinstance(by.type, UtcDateTime):
        moment = datetime.fromisoformat(value)
        return moment, moment.tzinfo is not None
    if isinstance(by.type, AnyText):
        return value, isinstance(value, str)
    return value, _is_whole(value) if isinstance(by.type, Integer) else math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and fits(value)
