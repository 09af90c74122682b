"""Converts pydantic's validation errors into one sentence: the place, the value and what is allowed."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from shared_schemas.base import did_you_mean, shown
from task_app.errors import InvalidRequest, clipped

M = TypeVar("M", bound=BaseModel)


def most_specific(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the first error about an unknown key (maybe a required key, misspelt), else the first error."""
    return next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])


def invalid(
    error: Mapping[str, Any], *, where: str = "", known: Collection[str] = (), meant: str | None = None
) -> InvalidRequest:
    """Convert an element of pydantic's `ValidationError.errors()` into an InvalidRequest.

    `where` is the path from the request's body to the validated part. If the error is an unknown key, the
    message suggests `meant`, or without `meant` the most similar name in `known`.
    """
    place = ".".join([*filter(None, [where]), *(clipped(str(part)) for part in error["loc"])])
    if error["type"] == "extra_forbidden":
        name = clipped(str(error["loc"][-1]))
        guess = f". Did you mean {meant!r}? Known: {', '.join(sorted(known))}"
        guess = did_you_mean(name, known) if meant is None else guess
        return InvalidRequest(f"{place}: unknown key {name!r}{guess}", where=place)
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "tuple_type":
        message = "a list is needed"
    elif error["type"] == "too_short":
        count, least = error["ctx"]["actual_length"], error["ctx"]["min_length"]
        message = f"has {count} elements; at least {least} is needed"
    return InvalidRequest(f"{place}: {message}{_quote_value(error, place)}", where=place)


def validated(model: type[M], value: Any, *, where: str) -> M:
    """Return a part of a request's body as an instance of `model`. Raises InvalidRequest if it is invalid."""
    try:
        return model.model_validate(value)
    except ValidationError as exc:
        error = most_specific(exc.errors(include_url=False))
        raise invalid(error, where=where, known=list_keys(model)) from exc


def list_keys(model: type[BaseModel]) -> list[str]:
    """Return the keys that JSON for this model may contain."""
    return [field.alias or name for name, field in model.model_fields.items()]


def state_in(model: type[M], data: bytes) -> M:
    """Parse the JSON bytes of an environment's snapshot.

    Raises:
        ValueError: the bytes are no valid JSON for the model. `restore` need not catch this error.
    """
    try:
        return model.model_validate_json(data)
    except ValidationError as exc:
        error = most_specific(exc.errors(include_url=False))
        place = ".".join(("snapshot", *map(str, error["loc"])))
        raise ValueError(f"{place}: {error['msg']}") from exc


def _quote_value(error: Mapping[str, Any], place: str) -> str:
    """Return "; found ..." with the beginning of the invalid value, or "" if it is no scalar or a secret."""
    value = error.get("input")
    secret = "key" in place or "ground_truth" in place
    if error["type"] == "missing" or secret or not isinstance(value, str | int | float | bool):
        return ""
    if shown(value) in error["msg"]:
        return ""  # the message contains it already
    return f"; found {value[:80]!r}" if isinstance(value, str) else f"; found {clipped(str(value))}"
