"""The base classes of all wire data, and what refuses a number, shows a value, suggests a spelling."""

import math
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict

# Of what is compared with known names: the time for that grows with its square.
_LONGEST_NAME = 200


class Body(BaseModel):
    """A frozen body of ours: an unknown key is an error, never dropped in silence."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class OpenBody(BaseModel):
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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`"; known: a, b. Did you mean 'a'?"`, the tail of every message about an unknown name."""
    names = sorted(known)
    close = get_close_matches(name[:_LONGEST_NAME], names, n=1, cutoff=0.6)
    guess = f". Did you mean {close[0]!r}?" if close else ""
    return f"; known: {', '.join(names)}{guess}"
