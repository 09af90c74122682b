"""Definitions of equal states of Crafter, as pure functions of `Observation.data`.

A key is useful if states meet neither rarely nor always. In 8 worlds x 8 rollouts x 50 steps of random play,
20 % of the steps are alone in their state with the whole view, 10 % with `nearest`, and none with `coarse`,
which groups unlike situations. The vitals change by themselves and are in `exact` only.
"""

from collections.abc import Mapping
from typing import Any

from task_app.environments.crafter.rules import VITALS
from task_app.environments.crafter.view import nearest_offsets
from task_app.episode.state_keys import StateKey
from task_app.protocols import Observation

# The history of BALROG's text is past news, and its answers are the same everywhere.
_TIME_AND_NEWS = frozenset({"step", "max_steps", "news", "history", "answer_names"})
# Kinds to walk on: they are everywhere, so the nearest one says nothing.
_FLOOR = frozenset({"grass", "sand", "path", "void", "player"})
# Health of 1 to 3, 4 to 6, 7 to 9: in danger, hurt, well.
_HEALTH_BAND = 3


def nearest(observation: Observation) -> Any:
    """The nearest of each kind in view, the faced cell, the items, a band of health, night and sleep."""
    data = observation.data
    return [
        {name: list(offset) for name, offset in nearest_offsets(data["rows"], without=_FLOOR).items()},
        data["target"],
        _items(data),
        -(-data["inventory"]["health"] // _HEALTH_BAND),
        data["dark"],
        data["sleeping"],
    ]


def view(observation: Observation) -> Any:
    """All cells in view, the player's direction, and the items."""
    data = observation.data
    return [data["rows"], data["facing"], _items(data)]


def exact(observation: Observation) -> Any:
    """All of the observation's data except the time and the news."""
    return {name: value for name, value in observation.data.items() if name not in _TIME_AND_NEWS}


def coarse(observation: Observation) -> Any:
    """The faced cell, the items, and which of table and furnace are near: an ablation."""
    data = observation.data
    return [data["target"], _items(data), data["near"]]


CRAFTER_STATE_KEYS: Mapping[str, StateKey] = {
    "nearest": StateKey(nearest),
    "view": StateKey(view),
    "exact": StateKey(exact),
    "coarse": StateKey(coarse),
}


def _items(data: Mapping[str, Any]) -> dict[str, int]:
    return {name: count for name, count in data["inventory"].items() if count and name not in VITALS}
