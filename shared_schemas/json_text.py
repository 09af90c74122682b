"""JSON text as both services take it: whole characters, finite numbers, bounded depth.

Python's own reader lets through what no record, reply or database can hold: half a character ("\\ud83d"),
NaN, 1e999, nesting of hundreds of levels. Whoever writes it out later fails, far from the sender. So it is
refused where it enters. A model's or an environment's text, which nobody could send again, is made encodable.
"""

import sys
from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json

# Below it a walk by recursion is safe; pydantic_core.from_json refuses what is deeper.
MAX_DEPTH = 201
# Every unknown key of an object is an error of its own to pydantic, and may be compared with the known ones.
MAX_MEMBERS = 10_000
NUL = "U+0000, which no database holds"
# What the reader lets through, as it may be spelt once every digit is a 0: most texts hold none of it, and
# are not walked. Where an exponent has two digits, the number has 200 others.
_DIGITS = bytes.maketrans(b"123456789E", b"000000000e")
_SUSPECTS = (b"0e000", b"0e+000", b"0" * 200)
_LARGEST = sys.float_info.max
_HALVES = ("hex escape", "surrogate", "unicode code point")


def read_json(text: bytes | str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON in UTF-8, or holds half a character, U+0000, a number that no float can
            hold, more than MAX_DEPTH levels, or an object of more than MAX_MEMBERS; the message says which,
            and where.
    """
    # A lone surrogate of a str is passed on, for the reader to refuse with its place.
    raw = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as exc:
        raise ValueError(_reason(str(exc))) from exc
    if _is_suspect(raw):
        found = _fault(value)
        if found is not None:
            place, fault = found
            raise ValueError(f"{place.lstrip('.') or 'the value'} holds {fault}")
    return value


def says_json(content_type: bytes) -> bool:
    """Whether FastAPI would read a body of this content type as JSON; which strips U+00A0 and U+0085 too."""
    main, _, kind = content_type.decode("latin-1").partition(";")[0].strip().lower().partition("/")
    return main == "application" and (kind == "json" or kind.endswith("+json"))


def encodable(text: str) -> str:
    """The text with `?` for half characters: JSON can spell them, and no UTF-8 can hold them."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def encodable_json(value: Any) -> Any:
    """JSON-able data with every string in it passed through `encodable`, keys too."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {encodable_json(name): encodable_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [encodable_json(one) for one in value]
    return value


def _is_suspect(raw: bytes) -> bool:
    # No expression: in every request this is a part of what a step costs.
    if b"\\u0000" in raw or raw.count(b":") > MAX_MEMBERS:
        return True
    digits = raw.translate(_DIGITS)
    return any([spelling in digits for spelling in _SUSPECTS])


def _reason(told: str) -> str:
    reason, _, place = told.rpartition(" at ")
    if any(word in reason for word in _HALVES):
        reason = "half a character (a lone surrogate, or bytes that are no UTF-8)"
    elif reason.startswith("recursion"):
        reason = f"more than {MAX_DEPTH} levels"
    return f"no JSON: {reason} at {place}"


def _fault(value: Any) -> tuple[str, str] | None:
    """Where the first fault stands, below this value, and what it is."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, str):
        return ("", NUL) if "\0" in value else None
    if isinstance(value, int | float):
        return None if -_LARGEST <= value <= _LARGEST else ("", "a number beyond 1.8e308")
    if isinstance(value, list):
        parts = enumerate(value)
    elif isinstance(value, dict):
        if len(value) > MAX_MEMBERS:
            return "", f"{len(value)} keys; at most {MAX_MEMBERS} are read"
        if "\0" in "".join(value):
            return "", f"a key with {NUL}"
        parts = value.items()
    for name, one in parts:
        found = _fault(one)
        if found is not None:
            return f".{str(name)[:80]}{found[0]}", found[1]
    return None
