"""Converts tool arguments to actions of gymnasium, and gymnasium's observations to JSON values.

| space | as an action | as an observation |
|---|---|---|
| Discrete | an integer, or a given name | the number |
| MultiDiscrete, MultiBinary | a list of integers | a list |
| Box | a list of up to MAX_ACTION numbers | up to MAX_NUMBERS numbers; text shows 4 significant digits |
| Text | a text of an allowed length | the text |
| Dict, Tuple | an object | a line for each member |
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

MAX_NUMBERS = 256
MAX_ACTION = 32
# Bounds beyond this are left out of a JSON Schema, because they do not help a model.
_FAR = 1e9


class Wordless(ValueError):
    """Raised for a space whose actions or observations cannot be expressed as JSON values."""


def action_schema(space: Space[Any], names: Sequence[str] = ()) -> dict[str, Any]:
    """Return the JSON Schema of an action; `names` are words for the values of a Discrete space, in order."""
    match space:
        case spaces.Discrete():
            if names:
                return {"type": "string", "enum": list(names)}
            first = int(space.start)
            return {"type": "integer", "minimum": first, "maximum": first + int(space.n) - 1}
        case spaces.MultiDiscrete() if len(space.shape) == 1 and space.nvec.size <= MAX_ACTION:
            lowest, highest = space.start, space.start + space.nvec - 1
            bounds = {"minimum": int(lowest.min()), "maximum": int(highest.max())}
            return _list_schema(space.nvec.size, {"type": "integer", **bounds})
        case spaces.MultiBinary() if len(space.shape) == 1 and space.shape[0] <= MAX_ACTION:
            return _list_schema(space.shape[0], {"type": "integer", "minimum": 0, "maximum": 1})
        case spaces.Box() if len(space.shape) == 1 and space.shape[0] <= MAX_ACTION:
            kind = "integer" if np.issubdtype(space.dtype, np.integer) else "number"
            # The lowest and the highest bound of all numbers; `space.contains` checks each number later.
            low, high = float(space.low.min()), float(space.high.max())
            limits = {"minimum": low} if low > -_FAR else {}
            limits |= {"maximum": high} if high < _FAR else {}
            return _list_schema(space.shape[0], {"type": kind, **limits})
        case spaces.Text():
            return {"type": "string", "minLength": space.min_length, "maxLength": space.max_length}
        case spaces.Dict():
            return _object_schema({name: action_schema(part) for name, part in space.spaces.items()})
        case spaces.Tuple():
            return _object_schema({f"part_{i}": action_schema(part) for i, part in enumerate(space.spaces)})
    raise Wordless(f"actions of {_describe(space)} cannot be arguments of a tool")


def parse_action(space: Space[Any], value: Any, names: Sequence[str] = ()) -> Any:
    """Convert a tool argument to an action. Raises ValueError if the action is outside of the space."""
    action = _convert_action(space, value, names)
    if not space.contains(action):
        raise ValueError(f"{value!r} is no action of {space}"[:300])
    return action


def observation_data(space: Space[Any], value: Any) -> Any:
    """Convert an observation to plain JSON values."""
    match space:
        case spaces.Discrete():
            return int(value)
        case spaces.MultiDiscrete() | spaces.MultiBinary() | spaces.Box():
            array = np.asarray(value)
            if array.size > MAX_NUMBERS:
                raise Wordless(f"observations of {_describe(space)} have more than {MAX_NUMBERS} numbers")
            return array.tolist()
        case spaces.Dict():
            return {name: observation_data(part, value[name]) for name, part in space.spaces.items()}
        case spaces.Tuple():
            return [observation_data(part, one) for part, one in zip(space.spaces, value, strict=True)]
        case spaces.Sequence():
            return [observation_data(space.feature_space, one) for one in value]
    if isinstance(value, str):  # spaces.Text, and the missions of minigrid
        return value
    raise Wordless(f"observations of {_describe(space)} cannot be told as text")


def _convert_action(space: Space[Any], value: Any, names: Sequence[str]) -> Any:
    match space:
        case spaces.Discrete():
            index = int(space.start) + list(names).index(value) if names else int(value)
            return space.dtype.type(index)
        case spaces.MultiDiscrete() | spaces.MultiBinary() | spaces.Box():
            return np.asarray(value, dtype=space.dtype)
        case spaces.Dict():
            return {name: _convert_action(part, value[name], ()) for name, part in space.spaces.items()}
        case spaces.Tuple():
            parts = enumerate(space.spaces)
            return tuple(_convert_action(part, value[f"part_{i}"], ()) for i, part in parts)
    return value


def _list_schema(length: int, items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": length, "maxItems": length, "items": dict(items)}


def _object_schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def _describe(space: Space[Any]) -> str:
    return f"{type(space).__name__}{space.shape or ''}"
