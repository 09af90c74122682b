"""Extracts from a view the facts that the compact text and the scripted teacher use.

All functions are pure and read only `Observation.data`, so they use only what a player sees.
"""

from collections.abc import Mapping
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

# Kinds of things to walk to, in the order of the compact text. If there are too many, the text omits the
# last ones.
THINGS = (
    "zombie", "skeleton", "arrow", "cow", "water", "tree", "stone", "coal", "iron", "diamond", "table",
    "furnace", "ripe-plant", "plant",
)  # fmt: skip
# Kinds of free cells to face: grass for saplings, any ground for building. The kind `way` leads out of view.
PLACES: dict[str, frozenset[str]] = {"grass": frozenset({"grass"}), "ground": GROUND}
KINDS = ("way", *PLACES, *THINGS)
# A shown walk ends with the leg that completes this many cells, because one decision does not walk further.
MAX_CELLS = 4
# A player with memory visits known things beyond this distance only if no nearer thing is useful.
NEAR_CELLS = 6
_VIEW = tuple(cell_at(x, y) for y in range(ROWS) for x in range(COLUMNS))
# By direction: the cells at that edge of the view.
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
    """The values that the compact text shows. A scripted teacher without memory decides from them alone."""

    inventory: Mapping[str, int]
    """All 16 item counts, including health, food, drink and energy."""
    achievements: frozenset[str]
    """Names of the unlocked achievements."""
    facing: str
    """Name of the direction in which the player looks."""
    target: str
    """Name of the thing in front of the player; if no thing is there, the name of the cell's material."""
    neighbours: Mapping[str, str]
    """By direction (left, right, up, down): the name of the neighbouring cell."""
    near: frozenset[str]
    """Those of `table` and `furnace` that are in crafting range."""
    walks: Mapping[str, Walk]
    """By kind: the walk to the nearest reachable thing or place that the player does not face already."""
    lava: tuple[Leg, ...]
    """Offset from the player to the nearest visible lava: the columns, then the rows. It is not a walk."""
    sleeping: bool
    """Whether actions are ignored until the player wakes up."""
    dark: bool


def read_facts(data: Mapping[str, Any]) -> Facts:
    """Return the facts of the view that an `Observation.data` of Crafter contains."""
    rows = tuple(map(tuple, data["rows"]))
    return make_facts(data, *view_walks(rows, facing_name(data), can_dig=can_dig(data)))


# Cached, because the text and the teacher both read each view, and a view repeats if nothing moves.
@lru_cache(maxsize=1024)
def view_walks(
    rows: tuple[tuple[str, ...], ...], facing: str, *, can_dig: bool
) -> tuple[Ground, Mapping[str, Walk]]:
    """Return the part of the map that a view shows, and the walk to the nearest cell of each kind.

    `rows` is [7][9] names of cells, as in `LocalView.rows`.
    """
    cells = dict(zip(_VIEW, chain.from_iterable(rows), strict=True))
    ground = Ground(cells, player=cell_at(*CENTRE), facing=facing)
    trails = find_trails(ground, can_dig=can_dig)
    walks = landmark_walks(ground, trails, max_cells=MAX_CELLS)
    way = _find_exit(ground, trails)
    if way is not None:
        walks["way"] = walk_to(ground, trails, way, max_cells=MAX_CELLS)
    return ground, walks


def make_facts(data: Mapping[str, Any], ground: Ground, walks: Mapping[str, Walk]) -> Facts:
    lava: tuple[Leg, ...] = ()
    if any("lava" in row for row in data["rows"]):
        dx, dy = nearest_offsets(data["rows"], without=())["lava"]
        across = (Leg("left" if dx < 0 else "right", abs(dx)),) if dx else ()
        lava = (*across, *((Leg("up" if dy < 0 else "down", abs(dy)),) if dy else ()))
    return Facts(
        inventory=data["inventory"],
        achievements=frozenset(data["achievements"]),
        facing=ground.facing,
        target=data["target"],
        neighbours={name: ground.at(step(ground.player, name)) for name in FACINGS},
        near=frozenset(data["near"]),
        walks=walks,
        lava=lava,
        sleeping=data["sleeping"],
        dark=data["dark"],
    )


def facing_name(data: Mapping[str, Any]) -> str:
    dx, dy = data["facing"]
    return SIDES[dx, dy]


def can_dig(data: Mapping[str, Any]) -> bool:
    return bool(data["inventory"]["wood_pickaxe"])


def landmark_walks(ground: Ground, trails: Trails, *, max_cells: int) -> dict[str, Walk]:
    """Find the walk to the nearest reachable thing or place of every kind; keys are the kinds."""
    cells: dict[str, Cell] = nearest(ground, trails, THINGS)
    for kind, names in PLACES.items():
        if (cell := nearest_facing(ground, trails, names)) is not None:
            cells[kind] = cell
    return {kind: walk_to(ground, trails, cell, max_cells=max_cells) for kind, cell in cells.items()}


def _find_exit(ground: Ground, trails: Trails) -> Cell | None:
    """Find the nearest free cell at the view's edge: preferably ahead, then to a side, then behind."""
    free = [cell for cell in trails if ground.cells[cell] in GROUND]
    dx, dy = FACINGS[ground.facing]
    for vector in ((dx, dy), (-dy, dx), (dy, -dx), (-dx, -dy)):
        way = next(filter(_EDGES[vector].__contains__, free), None)
        if way is not None:
            return way
    return None
