"""The facts of a view: what the compact text says and what the scripted teacher plays from.

Pure functions of `Observation.data`, so nothing here can know more than a player sees.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from task_app.environments.crafter.view import COLUMNS, ROWS
from task_app.environments.crafter.walks import (
    DIRECTIONS,
    GROUND,
    Cell,
    Ground,
    Leg,
    Trails,
    Walk,
    cheapest,
    find_trails,
    nearest,
    nearest_facing,
    step,
    walk_to,
)

# Things to bump into, in the order of the compact text; a crowded view loses the last ones.
THINGS = (
    "zombie", "skeleton", "arrow", "cow", "water", "tree", "stone", "coal", "iron", "diamond", "table",
    "furnace", "ripe-plant", "plant",
)  # fmt: skip
# Free cells to face: grass for saplings, any ground to build on. `way` leads on, out of view.
PLACES: dict[str, frozenset[str]] = {"grass": frozenset({"grass"}), "ground": GROUND}
KINDS = ("way", *PLACES, *THINGS)
# What is told of a walk: enough legs for this many cells, which nobody passes in one short decision.
TOLD_CELLS = 4
_CENTRE = (COLUMNS // 2, ROWS // 2)
_NAME_OF_DIRECTION = {vector: name for name, vector in DIRECTIONS.items()}


@dataclass(frozen=True, slots=True)
class Facts:
    """What the compact text says, as values. The memoryless teacher is a function of this alone.

    Attributes:
        inventory: all 16 item counts, among them health, food, drink and energy.
        achievements: unlocked so far.
        facing: name of the direction in which the player looks.
        target: what stands on the faced cell.
        neighbours: what stands left, right, up and down.
        near: which of table and furnace are in crafting range.
        walks: by kind, the way to the nearest thing or place; what is faced or out of reach has none.
        lava: where the nearest visible lava lies, as cells across and then down: an offset, not a walk.
        sleeping: actions are ignored until the player wakes up.
        dark: it is night.
    """

    inventory: Mapping[str, int]
    achievements: frozenset[str]
    facing: str
    target: str
    neighbours: Mapping[str, str]
    near: frozenset[str]
    walks: Mapping[str, Walk]
    lava: tuple[Leg, ...]
    sleeping: bool
    dark: bool


def read_facts(data: Mapping[str, Any]) -> Facts:
    """The facts of an `Observation.data` of Crafter, from its view alone."""
    cells = {(x, y): name for y, row in enumerate(data["rows"]) for x, name in enumerate(row)}
    ground = Ground(cells, player=_CENTRE, facing=facing_name(data))
    trails = find_trails(ground, can_dig=can_dig(data))
    walks = landmark_walks(ground, trails, told_cells=TOLD_CELLS)
    way = _way_on(ground, trails)
    if way is not None:
        walks["way"] = walk_to(ground, trails, way, told_cells=TOLD_CELLS)
    return make_facts(data, ground, walks)


def make_facts(data: Mapping[str, Any], ground: Ground, walks: Mapping[str, Walk]) -> Facts:
    return Facts(
        inventory=data["inventory"],
        achievements=frozenset(data["achievements"]),
        facing=ground.facing,
        target=data["target"],
        neighbours={name: ground.at(step(ground.player, name)) for name in DIRECTIONS},
        near=frozenset(data["near"]),
        walks=walks,
        lava=_nearest_lava(data["rows"]),
        sleeping=data["sleeping"],
        dark=data["dark"],
    )


def _nearest_lava(rows: Sequence[Sequence[str]]) -> tuple[Leg, ...]:
    """The offset of the nearest lava of the view, of equally near ones the first row by row."""
    offsets = [
        (x - _CENTRE[0], y - _CENTRE[1])
        for y, row in enumerate(rows)
        if "lava" in row
        for x, name in enumerate(row)
        if name == "lava"
    ]
    if not offsets:
        return ()
    dx, dy = min(offsets, key=lambda offset: abs(offset[0]) + abs(offset[1]))
    across = (Leg("left" if dx < 0 else "right", abs(dx)),) if dx else ()
    along = (Leg("up" if dy < 0 else "down", abs(dy)),) if dy else ()
    return across + along


def facing_name(data: Mapping[str, Any]) -> str:
    dx, dy = data["facing"]
    return _NAME_OF_DIRECTION[dx, dy]


def can_dig(data: Mapping[str, Any]) -> bool:
    return bool(data["inventory"]["wood_pickaxe"])


def landmark_walks(ground: Ground, trails: Trails, *, told_cells: int) -> dict[str, Walk]:
    """The walk to the nearest thing or place of every kind that can be reached."""
    cells: dict[str, Cell] = nearest(ground, trails, THINGS)
    for kind, names in PLACES.items():
        if (cell := nearest_facing(ground, trails, names)) is not None:
            cells[kind] = cell
    return {kind: walk_to(ground, trails, cell, told_cells=told_cells) for kind, cell in cells.items()}


def _way_on(ground: Ground, trails: Trails) -> Cell | None:
    """The nearest free cell of the view's edge: straight ahead if there is any, else to a side, else back."""
    dx, dy = DIRECTIONS[ground.facing]
    for vector in ((dx, dy), (-dy, dx), (dy, -dx), (-dx, -dy)):
        edge = {cell: trail for cell, trail in trails.items() if _on_edge(cell, vector)}
        if (way := cheapest(edge, lambda cell, _: ground.at(cell) in GROUND)) is not None:
            return way
    return None


def _on_edge(cell: Cell, vector: tuple[int, int]) -> bool:
    reach = _CENTRE[0] if vector[0] else _CENTRE[1]
    return (cell[0] - _CENTRE[0]) * vector[0] + (cell[1] - _CENTRE[1]) * vector[1] == reach
