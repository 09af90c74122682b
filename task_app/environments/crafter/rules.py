"""The rules of the installed crafter package, read from its data.yaml.

Papers and other implementations state other costs (for example a table for 1 wood), so prompts and checks
read them here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crafter import constants


@dataclass(frozen=True, slots=True)
class CollectRule:
    """Collecting a material: `requires` must be in the inventory and is not used up, `receives` is gained.

    `probability` applies to the gain; the material turns into `leaves` either way.
    """

    requires: Mapping[str, int]
    receives: Mapping[str, int]
    leaves: str
    probability: float


@dataclass(frozen=True, slots=True)
class PlaceRule:
    """Placing something on the faced cell, which must be one of `where` and hold no creature; `uses` is used
    up.

    `kind` is 'material' (the cell becomes it) or 'object' (a thing stands on the cell).
    """

    uses: Mapping[str, int]
    where: tuple[str, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class MakeRule:
    """Crafting: `uses` is used up; each of `nearby` must be in the 3x3 cells around the player."""

    uses: Mapping[str, int]
    nearby: tuple[str, ...]
    gives: int


@dataclass(frozen=True, slots=True)
class Rules:
    """All rules by name: `collect` by material, `place` and `make` by result."""

    collect: Mapping[str, CollectRule]
    place: Mapping[str, PlaceRule]
    make: Mapping[str, MakeRule]
    item_max: Mapping[str, int]
    item_start: Mapping[str, int]
    walkable: tuple[str, ...]


def _collect_rule(info: Mapping[str, Any]) -> CollectRule:  # Any: foreign YAML
    return CollectRule(
        requires=dict(info["require"]),
        receives=dict(info["receive"]),
        leaves=info["leaves"],
        probability=info.get("probability", 1),
    )


def _read_rules() -> Rules:
    return Rules(
        collect={name: _collect_rule(info) for name, info in constants.collect.items()},
        place={
            name: PlaceRule(uses=dict(info["uses"]), where=tuple(info["where"]), kind=info["type"])
            for name, info in constants.place.items()
        },
        make={
            name: MakeRule(uses=dict(info["uses"]), nearby=tuple(info["nearby"]), gives=info["gives"])
            for name, info in constants.make.items()
        },
        item_max={name: info["max"] for name, info in constants.items.items()},
        item_start={name: info["initial"] for name, info in constants.items.items()},
        walkable=tuple(constants.walkable),
    )


ACTIONS: tuple[str, ...] = tuple(constants.actions)
ACHIEVEMENTS: tuple[str, ...] = tuple(constants.achievements)
MATERIALS: tuple[str, ...] = tuple(constants.materials)
RULES: Rules = _read_rules()
