"""Policies that draw: the state of a source of chance as JSON-able data, and back."""

import random
from collections.abc import Mapping
from typing import Any


class ByChance:
    """A policy whose whole state is a source of chance: a `RestorablePolicy`, less its decisions."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def snapshot(self) -> dict[str, Any]:
        return {"random": chance_state(self._random)}

    def restore(self, state: Mapping[str, Any]) -> None:
        set_chance(self._random, state.get("random"))


def chance_state(source: random.Random) -> list[Any]:
    """[version, [625 numbers], next Gaussian or None]."""
    version, numbers, gauss = source.getstate()
    return [version, list(numbers), gauss]


def set_chance(source: random.Random, state: Any) -> None:
    """Let `source` draw on as the one that `chance_state` was given; ValueError when it is no such state."""
    try:
        version, numbers, gauss = state
        source.setstate((version, tuple(numbers), gauss))
    except (TypeError, ValueError, OverflowError) as exc:
        raise ValueError(f"'random' is no state of a generator: {exc}") from exc
