"""The base classes of all wire data, and helpers for error messages."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema

_LISTS = frozenset({"list", "tuple", "set", "frozenset"})
# Keys of a schema whose values are no schemas.
_NO_SCHEMA = frozenset({"default", "metadata", "serialization"})

# Longest name that is compared with known ones: the time grows with its square.
_LONGEST_NAME = 200


def _fail_fast(schema: Any) -> None:
    """Mark the schema of every list, at any depth, to stop at its first error."""
    if isinstance(schema, dict):
        kind = schema.get("type")
        # The fields of a model are a dict too, and one of them may be named `type`.
        if isinstance(kind, str) and kind in _LISTS:
            schema["fail_fast"] = True
        for name, part in schema.items():
            if name not in _NO_SCHEMA:
                _fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class _FirstErrorOnly:
    """Annotates a type whose lists are read only up to their first bad element.

    Pydantic would otherwise keep an error for each: a megabyte of `{}` would cost 10 s and 2 GB.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema


FIRST_ERROR_ONLY = _FirstErrorOnly()


class _FailFast(_FirstErrorOnly, BaseModel):
    """A model that reads a list only up to its first bad element."""


class Body(_FailFast):
    """A frozen body of our own; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class OpenBody(_FailFast):
    """A frozen body in a given shape (OpenAI's, or a legacy route); unknown keys are kept."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())


class StrictReply(_FailFast):
    """What we read of a reply that a server of others writes: strict types, finite numbers.

    Keys that no field names are dropped. An optional field may also be null, as many servers write it.
    """

    model_config = ConfigDict(
        frozen=True, extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


# Whole numbers that every file and database holds; a larger one is a mistake.
Whole = Annotated[int, Field(gt=-(2**53), lt=2**53)]
Count = Annotated[Whole, Field(ge=0)]

Model = TypeVar("Model", bound=BaseModel)


def with_optional(source: type[BaseModel], absent: str = "") -> Callable[[type[Model]], type[Model]]:
    """A decorator that gives a class the fields of `source` that it does not declare itself, None by default.

    `absent` says what None means, and is added to the sentence of each field.
    """

    def extend(model: type[Model]) -> type[Model]:
        fields: dict[str, Any] = {}
        for name, field in source.model_fields.items():
            annotation: Any = field.annotation
            told = Field(description=field.description and field.description + absent)
            if name not in model.model_fields:
                fields[name] = Annotated[annotation | None, *field.metadata, told], None
        return create_model(
            model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **fields
        )

    return extend


class Reply(Body):
    """A frozen body that a service alone writes.

    Its validator is built at its first use. Most replies have none: FastAPI only declares them.
    """

    model_config = ConfigDict(defer_build=True)


class OpenReply(OpenBody):
    """A reply in a given shape, with further keys."""

    model_config = ConfigDict(defer_build=True)


def finite(reward: float) -> float:
    """Return the reward; NaN and infinity are refused, because JSON cannot hold them."""
    if not math.isfinite(reward):
        raise ValueError(f"a reward is {reward}; it must be a finite number")
    return reward


def shown(value: Any) -> str:
    """A value with its type, short enough for a sentence."""
    text = repr(value)
    return f"{text[:60]}{'…' if len(text) > 60 else ''} ({type(value).__name__})"


def say_needed(item: Mapping[str, Any], name: str, needed: str) -> str:
    """`NAME is 3 (int); a text is needed`: what an item has under a key, and what it should have."""
    value = item.get(name)
    return f"{name} {'is missing or null' if value is None else f'is {shown(value)}'}; {needed} is needed"


def is_among(value: Any, allowed: Iterable[Any]) -> bool:
    """Whether JSON has the value among these: Python takes true for 1 and false for 0, JSON does not."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like an unknown one, or None if none is like it."""
    close = get_close_matches(name[:_LONGEST_NAME], sorted(known), n=1, cutoff=0.6)
    return close[0] if close else None


def did_you_mean(name: str, known: Collection[str]) -> str:
    """`". Did you mean 'a'? Known: a, b"`, the tail of every message to people about an unknown name.

    The likely name comes first, since the list may be long, and may be cut. Without one: `"; known: a, b"`.
    """
    close = closest(name, known)
    start = "; known" if close is None else f". Did you mean {close!r}? Known"
    return f"{start}: {', '.join(sorted(known))}"


def suggest_to_policy(name: str, known: Collection[str]) -> str:
    """`"; known: a, b. Did you mean 'a'?"`, the same for a text that a policy reads in an environment.

    Other words there would be another environment: its results could not be compared with earlier ones.
    """
    close = closest(name, known)
    guess = "" if close is None else f". Did you mean {close!r}?"
    return f"; known: {', '.join(sorted(known))}{guess}"
