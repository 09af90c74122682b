"""Bodies that differ from a valid one in one place, for servers that must name it."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

# No value of a chat request is 1.5, so that a number is wrong wherever it is no real number.
VALUES: tuple[Any, ...] = (None, 1.5, True, "x", [], [None], {}, {"x": 1})
DELETED = object()
Path = tuple[str | int, ...]


def malformed(
    body: dict[str, Any], values: Sequence[Any] = (*VALUES, DELETED)
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Each place of a body, its new value, and the body with it: each of the values, or none."""
    for path in _paths(body, ()):
        for value in values:
            changed = copy.deepcopy(body)
            *above, last = path
            home: Any = changed
            for key in above:
                home = home[key]
            if value is DELETED:
                del home[last]
            else:
                home[last] = value
            yield ".".join(map(str, path)), value, changed


def absences(
    body: dict[str, Any], names: Iterable[str] = ()
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each key of a body, and further names: the place, the body without it, and with null there."""
    changes = malformed({**dict.fromkeys(names), **body}, (DELETED, None))
    for (place, _, without), (_, _, with_null) in zip(changes, changes, strict=True):
        if not place.rpartition(".")[2].isdecimal():
            yield place, without, with_null


def names_item(where: str, path: str) -> bool:
    """Whether a place is a path, or one in it; or, where a key decides how others are read, one of these."""
    above = path.rpartition(".")[0]
    return f"{where}.".startswith(f"{path}.") or (bool(above) and above in (where, where.rpartition(".")[0]))


def _paths(value: Any, path: Path) -> Iterator[Path]:
    parts: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, part in parts:
        yield (*path, key)
        yield from _paths(part, (*path, key))
