"""The base classes of all wire data, and what refuses a number, shows a value, suggests a spelling."""

import math
import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema

# C0 but tab and line feed, DEL, C1, and what changes the direction of writing.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_LISTS = frozenset({"list", "tuple", "set", "frozenset"})
# Parts of a schema that are data, or how it is written.
_NO_SCHEMA = frozenset({"default", "metadata", "serialization"})

# Of what is compared with known names: the time for that grows with its square.
_LONGEST_NAME = 200


def _end_at_the_first_error(schema: Any) -> None:
    """Mark every schema of a list, however deep in a union or a definition it stands."""
    if isinstance(schema, dict):
        kind = schema.get("type")
        # A model's fields are such a dict too, and one of them may be named `type`.
        if isinstance(kind, str) and kind in _LISTS:
            schema["fail_fast"] = True
        for name, part in schema.items():
            if name not in _NO_SCHEMA:
                _end_at_the_first_error(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _end_at_the_first_error(part)


class _Read(BaseModel):
    """A list in it is read up to its first bad element.

    Pydantic would read on and keep an error for each: a megabyte of `{}` costs 10 s and 2 GB that way.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _end_at_the_first_error(schema)
        return schema


class Body(_Read):
    """A frozen body of ours: an unknown key is an error, never dropped in silence."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class OpenBody(_Read):
    """A frozen body whose shape others own (OpenAI's, or a legacy route): unknown keys are kept."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())


def finite(reward: float) -> float:
    """The reward; NaN and infinity are refused: JSON would lose them, and somebody would read a 0."""
    if not math.isfinite(reward):
        raise ValueError(f"a reward is {reward}; it must be a finite number")
    return reward


def shown(value: Any) -> str:
    """A value with its type, short enough for a sentence."""
    text = repr(value)
    return f"{text[:60]}{'…' if len(text) > 60 else ''} ({type(value).__name__})"


def visible(text: str) -> str:
    """The text with every control character as an escape (`\\x1b`): stored text moves no cursor, sets no
    title and turns no line around where a person reads it. Tabs and line breaks stay."""
    return _CONTROL.sub(lambda one: one[0].encode("unicode_escape").decode(), text)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`"; known: a, b. Did you mean 'a'?"`, the tail of every message about an unknown name."""
    names = sorted(known)
    close = get_close_matches(name[:_LONGEST_NAME], names, n=1, cutoff=0.6)
    guess = f". Did you mean {close[0]!r}?" if close else ""
    return f"; known: {', '.join(names)}{guess}"
