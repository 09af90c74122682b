"""Definitions of equal states of Crafter, as pure functions of `Observation.data`.

A key is useful if states meet neither rarely nor always. In 8 worlds x 8 rollouts x 50 steps of random play,
20 % of the steps are alone in their state with the whole view, 10 % with `nearest`, and none with `coarse`,
which groups unlike situations. The vitals change by themselves and are in `exact` only.
"""

from collections.abc import Mapping
from typing import Any

from task_app.environments.crafter.view import COLUMNS, ROWS
from task_app.episode.state_keys import StateKey
from task_app.protocols import Observation

_VITALS = frozenset({"health", "food", "drink", "energy"})
# The history of BALROG's text is past news, and its answers are the same everywhere.
_TIME_AND_NEWS = frozenset({"step", "max_steps", "news", "history", "answer_names"})
# Kinds to walk on: they are everywhere, so the nearest one says nothing.
_FLOOR = frozenset({"grass", "sand", "path", "void", "player"})
_CENTRE = (COLUMNS // 2, ROWS // 2)
# Health of 1 to 3, 4 to 6, 7 to 9: in danger, hurt, well.
_HEALTH_BAND = 3


def nearest(observation: Observation) -> Any:
    """The nearest of each kind in view, the faced cell, the items, a band of health, and whether it is
    dark."""
    data = observation.data
    return [
        _nearest_of_each_kind(data["rows"]),
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
    return {name: count for name, count in data["inventory"].items() if count and name not in _VITALS}


def _nearest_of_each_kind(rows: list[list[str]]) -> dict[str, list[int]]:
    """[dx, dy] of the nearest cell of each kind, in steps; among equals the first in reading order."""
    nearest_by_name: dict[str, tuple[int, int, int]] = {}
    for y, row in enumerate(rows):
        for x, name in enumerate(row):
            if name in _FLOOR:
                continue
            dx, dy = x - _CENTRE[0], y - _CENTRE[1]
            distance = abs(dx) + abs(dy)
            if name not in nearest_by_name or distance < nearest_by_name[name][0]:
                nearest_by_name[name] = (distance, dx, dy)
    return {name: [dx, dy] for name, (_, dx, dy) in nearest_by_name.items()}
