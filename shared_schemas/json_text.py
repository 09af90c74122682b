"""JSON text as both services accept it: valid characters, finite numbers, bounded depth.

Python's own reader accepts text that no record, reply or database can hold: lone surrogates ("\\ud83d"), NaN,
1e999, hundreds of levels. Writing it would fail later, far from the sender, so it is refused on entry. Text
of a model or an environment is made encodable instead, since no sender could correct it.
"""

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from pydantic_core import PydanticSerializationError, from_json, to_json, to_jsonable_python

from shared_schemas.base import shown
from shared_schemas.plain_text import decode_text, encodable, without_mark

Value = TypeVar("Value")

# Recursion up to this depth is safe; pydantic_core.from_json refuses more.
MAX_DEPTH = 201
# Pydantic reports each unknown key as an error, and may compare it with all known ones.
MAX_MEMBERS = 10_000
NUL = "U+0000, which no database holds"
# Signs of values that the reader accepts and we refuse, after every digit is replaced by 0. Most texts have
# none and are not walked. A number with a two-digit exponent is only too large if it has about 200 more
# digits.
_DIGITS = bytes.maketrans(b"123456789E", b"000000000e")
_HUGE, _HUGE_PLUS, _LONG = b"0e000", b"0e+000", b"0" * 200
_LARGEST = sys.float_info.max
_HALVES = ("hex escape", "surrogate", "unicode code point")


def read_json(text: bytes | str, *, keeps_nul: bool = False) -> Any:
    """Parse a JSON text; a byte order mark before it is ignored, as RFC 8259 allows.

    `keeps_nul` allows U+0000. Raises ValueError with cause and place for anything but JSON in UTF-8, a lone
    surrogate, U+0000, a number beyond a float's range, more than MAX_DEPTH levels, an object of more than
    MAX_MEMBERS, or a repeated key (RepeatedKey).
    """
    value = _read(text, keeps_nul)
    _refuse_repeated(text if isinstance(text, str) else without_mark(text))
    return value


def read_typed(validate: Callable[[bytes], Value], text: bytes) -> Value:
    """Parse a JSON text by pydantic's `validate_json`, and refuse repeated keys.

    Raises what `validate` does; RepeatedKey; and another ValueError for what Python's reader refuses.
    """
    value = validate(text)
    _refuse_repeated(text)  # afterwards: pydantic says where a wrong text is wrong
    return value


def _read(text: bytes | str, keeps_nul: bool) -> Any:
    # A lone surrogate is passed on, so that the reader refuses it with its place.
    raw = text.encode(errors="surrogatepass") if isinstance(text, str) else without_mark(text)
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as exc:
        if not isinstance(text, str):
            decode_text(text)  # tells of another encoding, and where bytes are no UTF-8
        raise ValueError(_place_of_number(raw) or _reason(str(exc))) from exc
    if _is_suspect(raw):
        fault = _fault(value, keeps_nul)
        if fault is not None:
            place, what = fault
            raise ValueError(f"{place.lstrip('.') or 'the value'} holds {what}")
    return value


class RepeatedKey(ValueError):
    """An object has a `key` twice: readers differ on which one counts."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key[:80]!r} comes twice")
        self.key = key


def each_key_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values, for Python's reader. Raises RepeatedKey."""
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedKey(next(name for name in names if names.count(name) > 1))
    return record


# Made once, because json.loads would make one for each text.
_EACH_KEY_ONCE = json.JSONDecoder(object_pairs_hook=each_key_once)


def _refuse_repeated(text: bytes | str) -> None:
    """Refuse a JSON text with a repeated key, since pydantic would silently take the last one."""
    _EACH_KEY_ONCE.decode(text if isinstance(text, str) else text.decode())


def read_quotation(text: bytes) -> Any:
    """Parse a JSON text that may quote a model: U+0000 is kept, and `?` replaces a lone surrogate.

    An agent sends back what the model wrote, and refusing that would lose the episodes in which the model
    errs. For the same reason the last value of a repeated key counts. Raises ValueError as `read_json` for
    everything else.
    """
    try:
        return _read(text, keeps_nul=True)
    except ValueError:
        if b"\\ud" in text.lower():
            with suppress(ValueError, RecursionError):
                return _read(json.dumps(encodable_json(json.loads(text))), keeps_nul=True)
        raise


def encodable_json(value: Any) -> Any:
    """A copy of JSON-able data, with `encodable` applied to every string, keys too."""
    with suppress(ValueError):  # of a lone surrogate, mostly; the text is the faster way to a copy
        return from_json(to_json(value, inf_nan_mode="constants"))
    return _encodable(value)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {_encodable(name): _encodable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(one) for one in value]
    return value


def plain_json(value: Any, place: str) -> Any:
    """Return a plug-in's data if JSON can hold it; numpy's arrays and scalars become lists and numbers.

    Raises TypeError, with the path below `place`, for anything that JSON cannot hold, and ValueError for NaN
    or infinity.
    """
    try:
        text = to_json(value, inf_nan_mode="constants")
    except PydanticSerializationError:  # also for a lone surrogate, which stays
        try:
            value = to_jsonable_python(value, inf_nan_mode="constants", fallback=_plain)
            text = b"NaN"
        except (TypeError, PydanticSerializationError) as exc:
            raise TypeError(f"{place}{_first(value, _is_no_json)}, which JSON cannot hold") from exc
    if (b"NaN" in text or b"Infinity" in text) and (
        fault := _first(value, lambda one: isinstance(one, float) and not math.isfinite(one))
    ):
        raise ValueError(f"{place}{fault}; a finite number is needed")
    return value


def plain_number(value: Any, place: str) -> int | float:
    """Return a plug-in's number, also a scalar of numpy or torch, as a finite number of Python.

    Raises TypeError, which begins with `place`, for anything else; ValueError for NaN or infinity.
    """
    number: Any = value
    if type(value) is not float and type(value) is not int:
        try:
            number = value.item() if hasattr(value, "item") else value
        except (ValueError, RuntimeError):  # an array of several
            number = None
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise TypeError(f"{place} is {shown(value)}; a number is needed")
    plain: int | float = int(number) if isinstance(number, int) else float(number)
    if not abs(plain) <= _LARGEST:  # `not`, for NaN
        raise ValueError(f"{place} is {plain}; a finite number is needed")
    return plain


def _plain(value: Any) -> Any:
    """Return a value of numpy or torch as lists and numbers."""
    if not hasattr(value, "tolist"):
        raise TypeError(shown(value))
    return value.tolist()


def _is_no_json(value: Any) -> bool:
    try:
        to_jsonable_python(value, fallback=_plain)
    except (TypeError, PydanticSerializationError):
        return True
    return False


def _first(value: Any, test: Callable[[Any], bool]) -> str:
    """Describe the first part of a value that passes the test, with its path; "" if none does."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        parts = enumerate(value)
    for name, part in parts:
        if found := _first(part, test):
            return f".{str(name)[:80]}{found}"
    return f" is {shown(value)}" if test(value) else ""


def _is_suspect(raw: bytes) -> bool:
    # Without a regular expression, because every request pays for this.
    if b"\\u0000" in raw or raw.count(b":") > MAX_MEMBERS:
        return True
    digits = raw.translate(_DIGITS)
    return _HUGE in digits or _HUGE_PLUS in digits or _LONG in digits


def _place_of_number(raw: bytes) -> str:
    """Describe where a text has NaN or infinity, which Python reads and JSON lacks; "" for other errors."""
    try:
        place = _first(from_json(raw), lambda one: isinstance(one, float) and not math.isfinite(one))
    except ValueError:
        return ""
    return f"no JSON: {place.lstrip('.') or 'the value'}, and JSON has finite numbers alone"


def _reason(message: str) -> str:
    reason, _, place = message.rpartition(" at ")
    if any(word in reason for word in _HALVES):
        reason = "half a character (a lone surrogate)"
    elif reason.startswith("recursion"):
        reason = f"more than {MAX_DEPTH} levels"
    return f"no JSON: {reason} at {place}"


def _fault(value: Any, keeps_nul: bool) -> tuple[str, str] | None:
    """Return the path and the kind of the first fault in a value."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, str):
        return ("", NUL) if "\0" in value and not keeps_nul else None
    if isinstance(value, int | float):
        return None if -_LARGEST <= value <= _LARGEST else ("", "a number beyond 1.8e308")
    if isinstance(value, list):
        parts = enumerate(value)
    elif isinstance(value, dict):
        if len(value) > MAX_MEMBERS:
            return "", f"{len(value)} keys; at most {MAX_MEMBERS} are read"
        if "\0" in "".join(value) and not keeps_nul:
            return "", f"a key with {NUL}"
        parts = value.items()
    for name, one in parts:
        fault = _fault(one, keeps_nul)
        if fault is not None:
            return f".{str(name)[:80]}{fault[0]}", fault[1]
    return None


def without_nulls(value: Any) -> Any:
    """Drop the keys, at any depth, whose value is None."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value
