"""Pure: what pydantic says about a body -> one sentence: the place, what was found, what is allowed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from shared_schemas.base import did_you_mean, shown
from task_app.errors import InvalidRequest, clipped

M = TypeVar("M", bound=BaseModel)


def most_telling(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The one to report: an unknown key before the missing one that it was meant to be."""
    return next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])


def invalid(error: Mapping[str, Any], *, where: str = "", known: Iterable[str] = ()) -> InvalidRequest:
    """Turn the first of pydantic's errors into one of ours.

    Args:
        error: an element of `ValidationError.errors()`.
        where: the body path that `error["loc"]` continues.
        known: field names, for the suggestion when a key is unknown.
    """
    place = ".".join([*filter(None, [where]), *(clipped(str(part)) for part in error["loc"])])
    if error["type"] == "extra_forbidden":
        name = clipped(str(error["loc"][-1]))
        return InvalidRequest(f"{place}: unknown key {name!r}{did_you_mean(name, known)}", where=place)
    told = error["msg"].removeprefix("Value error, ")
    if error["type"] == "tuple_type":
        told = "a list is needed"
    elif error["type"] == "too_short":
        found, least = error["ctx"]["actual_length"], error["ctx"]["min_length"]
        told = f"has {found} elements; at least {least} is needed"
    return InvalidRequest(f"{place}: {told}{_found(error, place)}", where=place)


def validated(model: type[M], value: Any, *, where: str) -> M:
    """What a part of a body holds, as the model of it."""
    try:
        return model.model_validate(value)
    except ValidationError as exc:
        error = most_telling(exc.errors(include_url=False))
        raise invalid(error, where=where, known=model.model_fields) from exc


def state_in(model: type[M], data: bytes) -> M:
    """The state that a snapshot of an environment holds.

    Raises:
        ValueError: it is no such state; with the place, as `RestorableEnvironment.restore` is to say it.
    """
    try:
        return model.model_validate_json(data)
    except ValidationError as exc:
        error = most_telling(exc.errors(include_url=False))
        place = ".".join(("snapshot", *map(str, error["loc"])))
        raise ValueError(f"{place}: {error['msg']}") from exc


def _found(error: Mapping[str, Any], place: str) -> str:
    """The beginning of the offending value, when it is a scalar and can be neither a key nor an answer."""
    value = error.get("input")
    secret = "key" in place or "ground_truth" in place
    if error["type"] == "missing" or secret or not isinstance(value, str | int | float | bool):
        return ""
    if shown(value) in error["msg"]:
        return ""  # a check of ours has said it
    return f"; found {value[:80]!r}" if isinstance(value, str) else f"; found {clipped(str(value))}"
