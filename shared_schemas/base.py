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
    """Mark the schema of every list, at any depth, to stop at its first error."""
    if isinstance(schema, dict):
        kind = schema.get("type")
        # A model's fields are a dict too, and a field may be named `type`.
        if isinstance(kind, str) and kind in _LISTS:
            schema["fail_fast"] = True
        for name, part in schema.items():
            if name not in _NO_SCHEMA:
                _fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class _FirstErrorOnly:
    """Annotates a type whose lists are read only up to their first invalid element.

    Otherwise pydantic keeps an error for each element: a megabyte of `{}` costs 10 s and 2 GB.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema


FIRST_ERROR_ONLY = _FirstErrorOnly()


class _FailFast(_FirstErrorOnly, BaseModel):
    """A model whose lists are read only up to their first invalid element."""


class Body(_FailFast):
    """A frozen body of our own; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class OpenBody(_FailFast):
    """A frozen body in the format of another API (OpenAI's, or a legacy route's); unknown keys are kept."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())


class StrictReply(_FailFast):
    """The fields that we read in the reply of a server that is not ours: strict types, finite numbers.

    Unknown keys are dropped. An optional field may also be null, as many servers write it.
    """

    model_config = ConfigDict(
        frozen=True, extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


# Whole numbers that every file and database can store; a larger number is a mistake.
Whole = Annotated[int, Field(gt=-(2**53), lt=2**53)]
Count = Annotated[Whole, Field(ge=0)]

Model = TypeVar("Model", bound=BaseModel)


def with_optional(source: type[BaseModel], absent: str = "") -> Callable[[type[Model]], type[Model]]:
    """Return a class decorator that adds the fields of `source` that the class lacks, with default None.

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
    """A frozen body that only a service writes.

    Its validator is built at first use; most replies never need it, because FastAPI only declares them.
    """

    model_config = ConfigDict(defer_build=True)


class OpenReply(OpenBody):
    """A reply in the format of another API; it may have further keys."""

    model_config = ConfigDict(defer_build=True)


def finite(reward: float) -> float:
    """Return the reward. Raises ValueError for NaN and infinity, which JSON cannot hold."""
    if not math.isfinite(reward):
        raise ValueError(f"a reward is {reward}; it must be a finite number")
    return reward


def shown(value: Any) -> str:
    """Return the text of a value, clipped to 60 characters, and its type."""
    text = repr(value)
    return f"{text[:60]}{'…' if len(text) > 60 else ''} ({type(value).__name__})"


def say_needed(item: Mapping[str, Any], name: str, needed: str) -> str:
    """Return `NAME is 3 (int); a text is needed` about the value that `item` has under the key `name`."""
    value = item.get(name)
    return f"{name} {'is missing or null' if value is None else f'is {shown(value)}'}; {needed} is needed"


def is_among(value: Any, allowed: Iterable[Any]) -> bool:
    """Whether the value is among the allowed ones in JSON, where true is not 1 and false is not 0."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most similar to an unknown one; None if none is similar."""
    close = get_close_matches(name[:_LONGEST_NAME], sorted(known), n=1, cutoff=0.6)
    return close[0] if close else None


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the end of a message about an unknown name: `". Did you mean 'a'? Known: a, b"`.

    The likely name comes first, because a long list may be cut. Without a likely name: `"; known: a, b"`.
    """
    close = closest(name, known)
    start = "; known" if close is None else f". Did you mean {close!r}? Known"
    return f"{start}: {', '.join(sorted(known))}"


def suggest_to_policy(name: str, known: Collection[str]) -> str:
    """Return the end of a message to a policy about an unknown name: `"; known: a, b. Did you mean 'a'?"`.

    Do not change these words: the text is part of environments, whose results must stay comparable.
    """
    close = closest(name, known)
    guess = "" if close is None else f". Did you mean {close!r}?"
    return f"; known: {', '.join(sorted(known))}{guess}"
