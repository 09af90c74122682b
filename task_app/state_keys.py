"""State keys: what makes two states the same, for estimators that compare decisions made in one state.

A key is a digest of a canonical form of what the policy could see: stable across processes and machines,
unlike `hash()`. Its text begins with the version of its function, so that keys of two versions never meet.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from task_app.errors import UnknownName
from task_app.protocols import Observation

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class StateKey:
    """A kind of state key.

    Attributes:
        of: what counts of an observation, as plain JSON-able values; equal values are the same state.
        version: raised whenever `of` gives other values for the same observation.
        past: earlier observations of the episode that count too; None: all of them.
    """

    of: Callable[[Observation], Any]
    version: int = 1
    past: int | None = 0


def _text(observation: Observation) -> str:
    return observation.text


# Of every environment; those of one environment stand beside it.
STATE_KEYS: Mapping[str, StateKey] = {
    "text": StateKey(_text),
    "text_last_2": StateKey(_text, past=1),
    "text_last_3": StateKey(_text, past=2),
    "text_history": StateKey(_text, past=None),
}


class EpisodeStateKeys:
    """The keys of one episode's observations, in order; each costs the same, however long the episode.

    Args:
        chosen: by the name under which a key is asked for.
    """

    def __init__(self, chosen: Mapping[str, StateKey]) -> None:
        self._chosen = chosen
        self._recent = {name: deque[bytes](maxlen=(key.past or 0) + 1) for name, key in chosen.items()}

    def next(self, observation: Observation) -> dict[str, str]:
        """The keys of the next observation, by name."""
        return {name: self._next(name, key, observation) for name, key in self._chosen.items()}

    def _next(self, name: str, key: StateKey, observation: Observation) -> str:
        recent, own = self._recent[name], _digest([_canonical(key.of(observation))])
        if key.past is None and recent:
            own = _digest([recent[-1], own])  # a running digest: the whole history in 16 bytes
        recent.append(own)
        whole = own if len(recent) == 1 else _digest(list(recent))
        return f"{key.version}:{whole.hex()}"


def chosen_keys(
    names: Sequence[str], of_environment: Mapping[str, StateKey], *, where: str
) -> dict[str, StateKey]:
    """The keys of those names: the environment's own, those of every environment, and "default".

    "default" is the first of the environment's own, or its text.

    Raises:
        UnknownName: a name that there is not.
    """
    known = {**STATE_KEYS, **of_environment}
    known[DEFAULT] = next(iter(of_environment.values()), STATE_KEYS["text"])
    for index, name in enumerate(names):
        if name not in known:
            raise UnknownName("state key", name, known, where=f"{where}.{index}")
    return {name: known[name] for name in names}


def _canonical(value: Any) -> bytes:
    """One text for equal values: sorted names, no spaces. 1, 1.0 and true stay three values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _digest(parts: Sequence[bytes]) -> bytes:
    """Of the parts, each behind its length: ["ab", "c"] and ["a", "bc"] differ."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
