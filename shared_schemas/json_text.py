"""JSON text as both services take it: whole characters, finite numbers, bounded depth.

Python's own reader lets through what no record, reply or database can hold: half a character ("\\ud83d"),
NaN, 1e999, nesting of hundreds of levels. Whoever writes it out later fails, far from the sender. So it is
refused where it enters.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

# Below it a walk by recursion is safe; pydantic_core.from_json refuses what is deeper.
MAX_DEPTH = 201
# Every unknown key of an object is an error of its own to pydantic, and may be compared with the known ones.
MAX_MEMBERS = 10_000
NUL = "U+0000, which no database holds"
# What the reader lets through, as it may be spelt: most texts hold none of it, and are not walked.
_SUSPECT = re.compile(rb"\\u0000|[0-9][eE]\+?[0-9]{3}|[0-9]{300}")
_HALVES = ("hex escape", "surrogate", "unicode code point")


def read_json(text: bytes | str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON in UTF-8, or holds half a character, U+0000, a number that no float can
            hold, more than MAX_DEPTH levels, or an object of more than MAX_MEMBERS; the message says which,
            and where.
    """
    raw = text.encode() if isinstance(text, str) else text
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as exc:
        raise ValueError(_reason(str(exc))) from exc
    if _SUSPECT.search(raw) or raw.count(b":") > MAX_MEMBERS:
        for place, fault in _faults(value, ""):
            raise ValueError(f"{place.lstrip('.') or 'the value'} holds {fault}")
    return value


def _reason(told: str) -> str:
    reason, _, place = told.rpartition(" at ")
    if any(word in reason for word in _HALVES):
        reason = "half a character (a lone surrogate, or bytes that are no UTF-8)"
    elif reason.startswith("recursion"):
        reason = f"more than {MAX_DEPTH} levels"
    return f"no JSON: {reason} at {place}"


def _faults(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        if "\0" in value:
            yield place, NUL
    elif isinstance(value, dict):
        if len(value) > MAX_MEMBERS:
            yield place, f"{len(value)} keys; at most {MAX_MEMBERS} are read"
        for name, one in value.items():
            yield from _faults(name, f"{place}: a key")
            yield from _faults(one, f"{place}.{name[:80]}")
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _faults(one, f"{place}.{index}")
    elif isinstance(value, int | float) and not _fits_a_float(value):
        yield place, "a number beyond 1.8e308"


def _fits_a_float(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:
        return False
