"""Pure: reads and writes the query strings of list pages, which contain filter, order and position."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_type_hints
from urllib.parse import urlencode

from starlette.datastructures import QueryParams

from trainer_backend.pages.figures import spaced
from trainer_backend.pages.page import BadAddress

# The largest number that an integer column of every database can be compared with.
_LARGEST = 2**31 - 1
Filter = TypeVar("Filter")


def read_filter(kind: type[Filter], params: Mapping[str, str]) -> Filter:
    """Return an instance of the dataclass `kind`, whose fields are read from query parameters.

    Each field has the name of its parameter. Empty parameters are ignored, because a form also sends the
    fields that the user left empty.
    """
    hints = get_type_hints(kind)
    texts = {name: params[name].strip() for name in hints if params.get(name, "").strip()}
    return kind(**{name: _value(name, text, get_args(hints[name])) for name, text in texts.items()})


def _value(name: str, text: str, kinds: Sequence[type]) -> Any:
    if bool in kinds:
        return text != "0" or None
    if not {int, float} & {*kinds}:
        return text
    try:
        value = int(text) if int in kinds else float(text)
    except ValueError:
        value = math.inf
    if not abs(value) <= _LARGEST:  # also NaN
        what = "a whole number" if int in kinds else "a number"
        raise BadAddress(f"{name} is {text[:40]!r}; it must be {what} of at most {_LARGEST}")
    return value


def read_order(params: Mapping[str, str], sorts: Collection[str], default: str) -> tuple[str, bool]:
    """Return the column by which a list is sorted, and whether the highest value comes first."""
    sort = params.get("sort") or default
    if sort not in sorts:
        raise BadAddress(f"sort is {sort[:40]!r}; known: {', '.join(sorts)}")
    return sort, params.get("down", "1") != "0"


def describe_order(sort: str, down: bool, newest: str) -> str:
    """Return a sort order in words, for example "by reward, lowest first".

    For the column `newest`, which increases with time, the words are "newest first" or "oldest first".
    """
    if sort == newest:
        return "newest first" if down else "oldest first"
    return f"by {spaced(sort)}, {'highest' if down else 'lowest'} first"


def change_query(params: QueryParams, **changes: object) -> str:
    """Return a query string with these changes and without empty fields. A change to None removes a field."""
    kept = [(name, text) for name, text in params.multi_items() if text.strip() and name not in changes]
    return urlencode(kept + [(name, value) for name, value in changes.items() if value is not None])


def link_list(
    path: str, params: QueryParams, *, sort: str, down: bool, sorts: Collection[str], cursor: str | None
) -> dict[str, Any]:
    """Return the template values of a paged list: how it is sorted, and the addresses to which it links.

    `cursor` is the position of the next page, or None on the last page. In the result, `address`, `first` and
    `later` are the addresses of the current, the first and the next page. `sorted_by` maps each column to the
    address of the list sorted by that column.
    """

    def address(**changes: object) -> str:
        return f"{path}?{change_query(params, **changes)}".removesuffix("?")

    # A click on the current column reverses the order.
    downs = {key: int(not (key == sort and down)) for key in sorts}
    return {
        "sort": sort, "down": down, "paged": bool(params.get("cursor")),
        "address": address(), "first": address(cursor=None),
        "later": address(cursor=cursor) if cursor else "",
        "sorted_by": {key: address(sort=key, down=downs[key], cursor=None) for key in sorts},
    }  # fmt: skip
