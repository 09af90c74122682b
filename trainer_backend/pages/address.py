"""Pure: the filter and the order of a list in its address: what a form sends, and what links change."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar, get_args, get_type_hints
from urllib.parse import urlencode

from trainer_backend.pages.page import BadAddress

# A database refuses to compare with a larger whole number.
_LARGEST = 2**31 - 1
Filter = TypeVar("Filter")


def read_filter(kind: type[Filter], params: Mapping[str, str]) -> Filter:
    """Read a filter, a dataclass, from an address; a form also sends its empty fields."""
    hints = get_type_hints(kind)
    texts = {name: params[name].strip() for name in hints if params.get(name, "").strip()}
    return kind(**{name: _value(name, text, get_args(hints[name])) for name, text in texts.items()})


def read_order(params: Mapping[str, str], sorts: Collection[str], default: str) -> tuple[str, bool]:
    """Read by what a list is sorted, and whether the highest comes first."""
    sort = params.get("sort") or default
    if sort not in sorts:
        raise BadAddress(f"sort is {sort[:40]!r}; known: {', '.join(sorts)}")
    return sort, params.get("down", "1") != "0"


def write_query(where: Any, **others: object) -> str:
    """The query string of an address with this filter, and with the others that are not None."""
    values = {field.name: getattr(where, field.name) for field in fields(where)} | others
    return urlencode({
        name: int(value) if isinstance(value, bool) else value
        for name, value in values.items()
        if value is not None
    })  # fmt: skip


def _value(name: str, text: str, kinds: Sequence[type]) -> Any:
    if bool in kinds:
        return text != "0"
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
