"""The state of a source of chance as JSON-able data, and back: what snapshots of policies share."""

import random
from typing import Any


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
