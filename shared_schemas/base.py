"""The base classes of all wire data, and helpers for error messages."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema

_LISTS = frozenset({"list", "tuple", "set", "frozenset"})
# Keys of a schema whose values are not schemas.
_NO_SCHEMA = frozenset({"default", "metadata", "serialization"})

# Longest name that is compared with known names, because the time grows with the square of the length.
_LONGEST_NAME = 200


def _fail_fast(schema: Any) -> None:
    """Change a core schema so that validation of each list in it, at any depth, stops at the first error."""
    if isinstance(schema, dict):
        kind = schema.get("type")
        # In the dict of a model's fields, `type` may be the name of a field; its value is then no text.
        if isinstance(kind, str) and kind in _LISTS:
            schema["fail_fast"] = True
        for name, part in schema.items():
            if name not in _NO_SCHEMA:
                _fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class _FirstErrorOnly:
    """Annotation with which pydantic stops validating each list in a type at the first invalid element.

    Otherwise pydantic keeps an error for every element, and a megabyte of `{}` costs 10 s and 2 GB.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema


FIRST_ERROR_ONLY = _FirstErrorOnly()


class _FailFast(_FirstErrorOnly, BaseModel):
    """A pydantic model; validation of each list in it stops at the first invalid element."""


class Body(_FailFast):
    """Base class of data in formats that Turnwise defines. Objects are frozen; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class OpenBody(_FailFast):
    """Base class of frozen data in the format of another API, such as OpenAI's. Unknown keys are kept."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())


class StrictReply(_FailFast):
    """Base class for replies of other parties' servers: types are strict, and numbers must be finite.

    Unknown keys are dropped. Subclasses let optional fields be null, because many servers send null.
    """

    model_config = ConfigDict(
        frozen=True, extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


# Whole numbers that every file and database can store; a larger number is a mistake.
Whole = Annotated[int, Field(gt=-(2**53), lt=2**53)]
Count = Annotated[Whole, Field(ge=0)]

Model = TypeVar("Model", bound=BaseModel)


def with_optional(source: type[BaseModel], absent: str = "") -> Callable[[type[Model]], type[Model]]:
    """Return a decorator that adds those fields of `source` that a class lacks, with default None.

    `absent` says what None means; it is appended to the description of each field.
    """

    def extend(model: type[Model]) -> type[Model]:
        fields: dict[str, Any] = {}
        for name, field in source.model_fields.items():
            annotation: Any = field.annotation
            description = Field(description=field.description and field.description + absent)
            if name not in model.model_fields:
                fields[name] = Annotated[annotation | None, *field.metadata, description], None
        return create_model(
            model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **fields
        )

    return extend


class Reply(Body):
    """Base class of replies that a service writes and does not read.

    Validators are built at first use, because most of these types only serve the OpenAPI document.
    """

    model_config = ConfigDict(defer_build=True)


class OpenReply(OpenBody):
    """Base class of replies in another API's format; further keys are allowed."""

    model_config = ConfigDict(defer_build=True)


def finite(reward: float) -> float:
    """Return the reward. Raises ValueError for NaN and infinity, which JSON cannot hold."""
    if not math.isfinite(reward):
        raise ValueError(f"a reward is {reward}; it must be a finite number")
    return reward


def shown(value: Any) -> str:
    """Return `repr(value)`, clipped to 60 characters, with the type in parentheses."""
    text = repr(value)
    return f"{text[:60]}{'…' if len(text) > 60 else ''} ({type(value).__name__})"


def say_needed(item: Mapping[str, Any], name: str, needed: str) -> str:
    """Return an error text about `item[name]`, such as `seed is '7' (str); a number is needed`."""
    value = item.get(name)
    return f"{name} {'is missing or null' if value is None else f'is {shown(value)}'}; {needed} is needed"


def is_among(value: Any, allowed: Iterable[Any]) -> bool:
    """Whether `value` equals an allowed value as in JSON, where true differs from 1 and false from 0."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most similar to an unknown one; None if none is similar."""
    close = get_close_matches(name[:_LONGEST_NAME], sorted(known), n=1, cutoff=0.6)
    return close[0] if close else None


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the end of a message about an unknown name: `". Did you mean 'a'? Known: a, b"`.

    The suggestion comes first, because a long list may be cut. If no name is similar: `"; known: a, b"`.
    """
    close = closest(name, known)
    start = "; known" if close is None else f". Did you mean {close!r}? Known"
    return f"{start}: {', '.join(sorted(known))}"


def suggest_to_policy(name: str, known: Collection[str]) -> str:
    """Return the end of a message to a policy about an unknown name: `"; known: a, b. Did you mean 'a'?"`.

    Do not change this wording: policies read it, and a new wording would change their results.
    """
    close = closest(name, known)
    guess = "" if close is None else f". Did you mean {close!r}?"
    return f"; known: {', '.join(sorted(known))}{guess}"
