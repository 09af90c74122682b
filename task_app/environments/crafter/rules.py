"""The rules of the installed crafter package, read from its data.yaml.

Papers and other implementations have other costs (for example a table for 1 wood), so prompts and checks use
these.
"""

from collections.abc import Mapping
from typing import Annotated

from crafter import constants
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CollectRule:
    """Collecting a material gains `receives`; `requires` must be in the inventory and is not used up.

    `probability` applies to the gain only; the material always becomes `leaves`.
    """

    requires: Annotated[Mapping[str, int], Field(validation_alias="require")]
    receives: Annotated[Mapping[str, int], Field(validation_alias="receive")]
    leaves: str
    probability: float = 1


@dataclass(frozen=True, slots=True)
class PlaceRule:
    """Placing something uses up `uses`; the faced cell must be a material of `where` and have no creature.

    `kind` is 'material' (the cell's new material) or 'object' (a thing on the cell).
    """

    uses: Mapping[str, int]
    where: tuple[str, ...]
    kind: Annotated[str, Field(validation_alias="type")]


@dataclass(frozen=True, slots=True)
class MakeRule:
    """Crafting uses up `uses`; the 3x3 cells around the player must have each material of `nearby`."""

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
