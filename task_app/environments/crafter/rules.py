"""The rules of the installed crafter package, read from its data.yaml.

Papers and other implementations have other costs (for example, a table for 1 wood), so prompts and checks use
the rules of this package.
"""

from collections.abc import Mapping
from typing import Annotated

from crafter import constants
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CollectRule:
    """What the player needs to collect a material, and what collecting it gives.

    The inventory must contain the items of `requires`, which are not used up. The player gains the items of
    `receives` with the given `probability`. The cell's material becomes `leaves` even if the player gains
    nothing.
    """

    requires: Annotated[Mapping[str, int], Field(validation_alias="require")]
    receives: Annotated[Mapping[str, int], Field(validation_alias="receive")]
    leaves: str
    probability: float = 1


@dataclass(frozen=True, slots=True)
class PlaceRule:
    """What it costs to place something, and on which ground it can be placed.

    The items of `uses` are taken from the inventory. The faced cell must have a material of `where`, and must
    contain no creature or other thing. `kind` is 'material' if the cell gets a new material, or 'object' if a
    thing is put on the cell.
    """

    uses: Mapping[str, int]
    where: tuple[str, ...]
    kind: Annotated[str, Field(validation_alias="type")]


@dataclass(frozen=True, slots=True)
class MakeRule:
    """What it costs to craft an item, and what must be near.

    The items of `uses` are taken from the inventory. Each material of `nearby` must occur in the 3x3 cells
    around the player.
    """

    uses: Mapping[str, int]
    nearby: tuple[str, ...]
    gives: int


@dataclass(frozen=True, slots=True)
class Rules:
    """All rules: `collect` by the name of the material, `place` and `make` by the name of the result."""

    collect: Mapping[str, CollectRule]
    place: Mapping[str, PlaceRule]
    make: Mapping[str, MakeRule]
    item_max: Mapping[str, int]
    item_start: Mapping[str, int]
    walkable: tuple[str, ...]


ACTIONS: tuple[str, ...] = tuple(constants.actions)
ACHIEVEMENTS: tuple[str, ...] = tuple(constants.achievements)
MATERIALS: tuple[str, ...] = tuple(constants.materials)
RULES: Rules = TypeAdapter(Rules).validate_python(
    {
        **{name: getattr(constants, name) for name in ("collect", "place", "make", "walkable")},
        "item_max": {name: info["max"] for name, info in constants.items.items()},
        "item_start": {name: info["initial"] for name, info in constants.items.items()},
    }
)
VITALS = ("health", "food", "drink", "energy")
