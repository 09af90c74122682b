"""The facts of a view, which the compact text states and the scripted teacher uses.

All functions are pure and read only `Observation.data`, so they know no more than a player sees.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

from task_app.environments.crafter.grid import FACINGS, SIDES
from task_app.environments.crafter.view import CENTRE, COLUMNS, ROWS, nearest_offsets
from task_app.environments.crafter.walks import (
    GROUND,
    Cell,
    Ground,
    Leg,
    Trails,
    Walk,
    cell_at,
    find_trails,
    nearest,
    nearest_facing,
    step,
    walk_to,
)

# Things to walk up to, in the order of the compact text; a crowded view loses the last ones.
THINGS = (
    "zombie", "skeleton", "arrow", "cow", "water", "tree", "stone", "coal", "iron", "diamond", "table",
    "furnace", "ripe-plant", "plant",
)  # fmt: skip
# Free cells to face: grass for saplings, any ground to build on. `way` leads out of view.
PLACES: dict[str, frozenset[str]] = {"grass": frozenset({"grass"}), "ground": GROUND}
KINDS = ("way", *PLACES, *THINGS)
# A walk is shown up to the leg that completes this many cells; a short decision goes no further.
MAX_CELLS = 4
# A player with memory visits known things beyond these only if nothing nearer is worth it.
NEAR_CELLS = 6
_VIEW = tuple(cell_at(x, y) for y in range(ROWS) for x in range(COLUMNS))
# By a direction: the cells of the view's edge there.
_EDGES = {
    (dx, dy): frozenset(
        cell_at(x, y)
        for y in range(ROWS)
        for x in range(COLUMNS)
        if (x - CENTRE[0]) * dx + (y - CENTRE[1]) * dy == (CENTRE[0] if dx else CENTRE[1])
    )
    for dx, dy in FACINGS.values()
}


@dataclass(frozen=True, slots=True)
class Facts:
    """The statements of the compact text as values; the memoryless teacher reads nothing else."""

    inventory: Mapping[str, int]
    """All 16 item counts, among them health, food, drink and energy."""
    achievements: frozenset[str]
    """Unlocked so far."""
    facing: str
    """Name of the direction in which the player looks."""
    target: str
    """The name of the faced cell."""
    neighbours: Mapping[str, str]
    """The names of the cells left, right, up and down."""
    near: frozenset[str]
    """Whichever of table and furnace is in crafting range."""
    walks: Mapping[str, Walk]
    """The way to the nearest thing or place; none for a faced or unreachable one."""
    lava: tuple[Leg, ...]
    """Offset of the nearest visible lava, in cells across and then down; no walk."""
    sleeping: bool
    """Actions are ignored until the player wakes up."""
    dark: bool
    """It is night."""


def read_facts(data: Mapping[str, Any]) -> Facts:
    """The facts in an `Observation.data` of Crafter, from its view alone."""
    rows = tuple(map(tuple, data["rows"]))
    return make_facts(data, *view_walks(rows, facing_name(data), can_dig=can_dig(data)))


# The text and the teacher read each view once, and a view where nothing moves comes again.
@lru_cache(maxsize=1024)
def view_walks(
    rows: tuple[tuple[str, ...], ...], facing: str, *, can_dig: bool
) -> tuple[Ground, Mapping[str, Walk]]:
    """The cells of a view, [7][9] names, around the player, and its walks, which are cached."""
    cells = dict(zip(_VIEW, chain.from_iterable(rows), strict=True))
    ground = Ground(cells, player=cell_at(*CENTRE), facing=facing)
    trails = find_trails(ground, can_dig=can_dig)
    walks = landmark_walks(ground, trails, max_cells=MAX_CELLS)
    way = _way_on(ground, trails)
    if way is not None:
        walks["way"] = walk_to(ground, trails, way, max_cells=MAX_CELLS)
    return ground, walks


def make_facts(data: Mapping[str, Any], ground: Ground, walks: Mapping[str, Walk]) -> Facts:
    return Facts(
        inventory=data["inventory"],
        achievements=frozenset(data["achievements"]),
        facing=ground.facing,
        target=data["target"],
        neighbours={name: ground.at(step(ground.player, name)) for name in FACINGS},
        near=frozenset(data["near"]),
        walks=walks,
        lava=_nearest_lava(data["rows"]),
        sleeping=data["sleeping"],
        dark=data["dark"],
    )


def _nearest_lava(rows: Sequence[Sequence[str]]) -> tuple[Leg, ...]:
    """The offset of the nearest lava in view; among equally near ones the first row by row."""
    if not any("lava" in row for row in rows):  # as in most views
        return ()
    dx, dy = nearest_offsets(rows, without=())["lava"]
    across = (Leg("left" if dx < 0 else "right", abs(dx)),) if dx else ()
    along = (Leg("up" if dy < 0 else "down", abs(dy)),) if dy else ()
    return across + along


def facing_name(data: Mapping[str, Any]) -> str:
    dx, dy = data["facing"]
    return SIDES[dx, dy]


def can_dig(data: Mapping[str, Any]) -> bool:
    return bool(data["inventory"]["wood_pickaxe"])


def landmark_walks(ground: Ground, trails: Trails, *, max_cells: int) -> dict[str, Walk]:
    """The walk to the nearest reachable thing or place of every kind."""
    cells: dict[str, Cell] = nearest(ground, trails, THINGS)
    for kind, names in PLACES.items():
        if (cell := nearest_facing(ground, trails, names)) is not None:
            cells[kind] = cell
    return {kind: walk_to(ground, trails, cell, max_cells=max_cells) for kind, cell in cells.items()}


def _way_on(ground: Ground, trails: Trails) -> Cell | None:
    """The nearest free cell at the view's edge: preferably straight ahead, then to a side, then back."""
    free = [cell for cell in trails if ground.cells[cell] in GROUND]
    dx, dy = FACINGS[ground.facing]
    for vector in ((dx, dy), (-dy, dx), (dy, -dx), (-dx, -dy)):
        way = next(filter(_EDGES[vector].__contains__, free), None)
        if way is not None:
            return way
    return None
