"""Reads JSON and checks it for both services: valid characters, finite numbers and bounded depth.

Python's `json` accepts values that cannot be written to records, replies or databases: lone surrogates
("\\ud83d"), NaN, 1e999, hundreds of levels. Requests with such values are refused, so that the sender gets
the error. A model or an environment cannot correct its text, so `?` replaces lone surrogates in it.
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
# Limited because pydantic makes an error for each unknown key, and may compare the key with all known ones.
MAX_MEMBERS = 10_000
NUL = "U+0000, which no database holds"
# After all digits of a text are replaced by 0, a number that may be too large contains one of these patterns.
# Only texts with a pattern are searched for faults; most have none. A number with a two-digit exponent is too
# large only if it also has about 200 digits, which _LONG finds.
_DIGITS = bytes.maketrans(b"123456789E", b"000000000e")
_HUGE, _HUGE_PLUS, _LONG = b"0e000", b"0e+000", b"0" * 200
_LARGEST = sys.float_info.max
_HALVES = ("hex escape", "surrogate", "unicode code point")


def read_json(text: bytes | str, *, keeps_nul: bool = False) -> Any:
    """Parse a JSON text; a leading byte order mark is ignored, as RFC 8259 allows.

    Raises ValueError, with cause and place, for text that is not JSON in UTF-8, a lone surrogate, U+0000
    (unless `keeps_nul`), a number beyond the range of a float, more than MAX_DEPTH levels, an object with
    more than MAX_MEMBERS keys, or a repeated key (RepeatedKey).
    """
    value = _read(text, keeps_nul)
    _refuse_repeated(text if isinstance(text, str) else without_mark(text))
    return value


def read_typed(validate: Callable[[bytes], Value], text: bytes) -> Value:
    """Parse a JSON text with `validate`, a pydantic type's `validate_json`, and refuse repeated keys.

    Raises the errors of `validate`, RepeatedKey, or ValueError for text that Python's `json` cannot parse.
    """
    value = validate(text)
    _refuse_repeated(text)  # last, because pydantic's errors name the place
    return value


def _read(text: bytes | str, keeps_nul: bool) -> Any:
    # surrogatepass: from_json then refuses a lone surrogate and names its place.
    raw = text.encode(errors="surrogatepass") if isinstance(text, str) else without_mark(text)
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as exc:
        if not isinstance(text, str):
            decode_text(text)  # raises for another encoding, and names the place of invalid UTF-8
        raise ValueError(_describe_infinity(raw) or _describe_syntax_error(str(exc))) from exc
    # Without a regular expression, because this runs for every request.
    is_suspect = b"\\u0000" in raw or raw.count(b":") > MAX_MEMBERS
    if not is_suspect:
        digits = raw.translate(_DIGITS)
        is_suspect = _HUGE in digits or _HUGE_PLUS in digits or _LONG in digits
    if is_suspect and (fault := _find_fault(value, keeps_nul)) is not None:
        place, what = fault
        raise ValueError(f"{place.lstrip('.') or 'the value'} holds {what}")
    return value


class RepeatedKey(ValueError):
    """Raised if a JSON object has a `key` twice, because parsers differ on which value they keep."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key[:80]!r} comes twice")
        self.key = key


def each_key_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's pairs as a dict; an `object_pairs_hook` of `json`. Raises RepeatedKey."""
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedKey(next(name for name in names if names.count(name) > 1))
    return record


# Made once, because json.loads would make a decoder for each text.
_EACH_KEY_ONCE = json.JSONDecoder(object_pairs_hook=each_key_once)


def _refuse_repeated(text: bytes | str) -> None:
    """Raise RepeatedKey if an object repeats a key; pydantic alone would silently keep the last value."""
    _EACH_KEY_ONCE.decode(text if isinstance(text, str) else text.decode())


def read_quotation(text: bytes) -> Any:
    """Parse a JSON text that may quote text of a model, and tolerate faults in that text.

    An agent sends a model's text back with its next call. Refusing faulty text would lose the episodes in
    which the model errs. Therefore U+0000 is kept, `?` replaces a lone surrogate, and the last value of a
    repeated key counts. Raises ValueError for the other faults that `read_json` refuses.
    """
    try:
        return _read(text, keeps_nul=True)
    except ValueError:
        if b"\\ud" in text.lower():
            with suppress(ValueError, RecursionError):
                return _read(json.dumps(encodable_json(json.loads(text))), keeps_nul=True)
        raise


def encodable_json(value: Any) -> Any:
    """Return a copy of JSON data in which `?` replaces lone surrogates in all strings, including keys."""
    with suppress(ValueError):  # mostly a lone surrogate; without one, this is the faster way to copy
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
    """Return a plug-in's data in types of JSON: numpy's arrays and scalars become lists and numbers.

    Raises TypeError for other types that JSON cannot hold, and ValueError for NaN or infinity. Both messages
    begin with `place` and the path to the fault.
    """
    try:
        text = to_json(value, inf_nan_mode="constants")
    except PydanticSerializationError:  # also raised for a lone surrogate, which is kept
        try:
            value = to_jsonable_python(value, inf_nan_mode="constants", fallback=_to_list)
            text = b"NaN"
        except (TypeError, PydanticSerializationError) as exc:
            raise TypeError(f"{place}{_describe_first(value, _is_no_json)}, which JSON cannot hold") from exc
    if (b"NaN" in text or b"Infinity" in text) and (fault := _describe_first(value, _is_infinite)):
        raise ValueError(f"{place}{fault}; a finite number is needed")
    return value


def plain_number(value: Any, place: str) -> int | float:
    """Convert a plug-in's number, such as a scalar of numpy or torch, to a finite int or float.

    Raises TypeError if it is no number, and ValueError for NaN or infinity. Messages begin with `place`.
    """
    number: Any = value
    if type(value) is not float and type(value) is not int:
        try:
            number = value.item() if hasattr(value, "item") else value
        except (ValueError, RuntimeError):  # an array of several elements
            number = None
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise TypeError(f"{place} is {shown(value)}; a number is needed")
    plain: int | float = int(number) if isinstance(number, int) else float(number)
    if not abs(plain) <= _LARGEST:  # `not`, for NaN
        raise ValueError(f"{place} is {plain}; a finite number is needed")
    return plain


def _to_list(value: Any) -> Any:
    """Convert an array or scalar of numpy or torch to lists and numbers. Raises TypeError for others."""
    if not hasattr(value, "tolist"):
        raise TypeError(shown(value))
    return value.tolist()


def _is_no_json(value: Any) -> bool:
    try:
        to_jsonable_python(value, fallback=_to_list)
    except (TypeError, PydanticSerializationError):
        return True
    return False


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _describe_first(value: Any, test: Callable[[Any], bool]) -> str:
    """Return path and description of the first part of `value` for which `test` is true, or ""."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        parts = enumerate(value)
    for name, part in parts:
        if description := _describe_first(part, test):
            return f".{str(name)[:80]}{description}"
    return f" is {shown(value)}" if test(value) else ""


def _describe_infinity(raw: bytes) -> str:
    """Describe the first NaN or infinity in a text that failed to parse; "" if the cause is another one."""
    try:
        place = _describe_first(from_json(raw), _is_infinite)
    except ValueError:
        return ""
    return f"no JSON: {place.lstrip('.') or 'the value'}, and JSON has finite numbers alone"


def _describe_syntax_error(message: str) -> str:
    """Return our description of a syntax error, given the message of pydantic's parser."""
    reason, _, place = message.rpartition(" at ")
    if any(word in reason for word in _HALVES):
        reason = "half a character (a lone surrogate)"
    elif reason.startswith("recursion"):
        reason = f"more than {MAX_DEPTH} levels"
    return f"no JSON: {reason} at {place}"


def _find_fault(value: Any, keeps_nul: bool) -> tuple[str, str] | None:
    """Return path and description of the first part of a value that `read_json` refuses, or None."""
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
        if (fault := _find_fault(one, keeps_nul)) is not None:
            return f".{str(name)[:80]}{fault[0]}", fault[1]
    return None


def without_nulls(value: Any) -> Any:
    """Return a copy of a value without the keys, at any depth, whose value is None."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value
