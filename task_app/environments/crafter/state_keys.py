"""State keys of Crafter, as pure functions of `Observation.data`. States with equal keys count as equal.

A key is useful if some states are equal by it, but not most. In random play (8 worlds x 8 rollouts x 50
steps), 20 % of the steps have a key by `view` that no other step has. By `nearest` it is 10 %. By `coarse` it
is none, because `coarse` treats different situations as equal. Health, food, drink and energy change by
themselves, so only `exact` contains their values; `nearest` contains health in three bands.
"""

from collections.abc import Mapping
from typing import Any

from task_app.environments.crafter.rules import VITALS
from task_app.environments.crafter.view import nearest_offsets
from task_app.episode.state_keys import StateKey
from task_app.protocols import Observation

# `exact` leaves these fields out. BALROG's history shows only earlier steps, and its answer names never
# change.
_TIME_AND_NEWS = frozenset({"step", "max_steps", "news", "history", "answer_names"})
# Kinds that are everywhere, so that the nearest cell of such a kind tells nothing.
_FLOOR = frozenset({"grass", "sand", "path", "void", "player"})
# Bands of health: 1 to 3, 4 to 6, 7 to 9.
_HEALTH_BAND = 3


def nearest(observation: Observation) -> Any:
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
    data = observation.data
    return [data["rows"], data["facing"], _items(data)]


def exact(observation: Observation) -> Any:
    return {name: value for name, value in observation.data.items() if name not in _TIME_AND_NEWS}


def coarse(observation: Observation) -> Any:
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
