"""Walks over a known piece of the map: the shortest way to the nearest thing of every kind.

A *walk* is the moves after which the player faces the thing. Bumping into what blocks turns the player, so
for a tree that is two left and one up the walk is left, left, up; no further move is needed before `do`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import groupby

DIRECTIONS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
GROUND = frozenset({"grass", "sand", "path"})
ROCK = frozenset({"stone"})
VOID = "void"
_DIG_COST = 3  # turn, dig, enter
Cell = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Leg:
    """A straight part of a walk: `count` cells towards `direction`, through rock when `dig`."""

    direction: str
    count: int
    dig: bool = False


@dataclass(frozen=True, slots=True)
class Walk:
    """The first legs of the way to a thing; `more` when it goes on after them."""

    legs: tuple[Leg, ...]
    more: bool = False


@dataclass(frozen=True, slots=True)
class Ground:
    """The known part of the map: a name for every known cell, and the player's place and direction."""

    cells: Mapping[Cell, str]
    player: Cell
    facing: str

    def at(self, cell: Cell) -> str:
        return self.cells.get(cell, VOID)

    @property
    def ahead(self) -> Cell:
        return step(self.player, self.facing)


@dataclass(frozen=True, slots=True)
class Trail:
    """The last step of the cheapest way to a cell."""

    cost: int
    turns: int
    direction: str = ""
    before: Cell | None = None

    def rank(self, cell: Cell) -> tuple[int, int, Cell]:
        """Cheap first, then straight, then by place: ties never depend on the order of a search."""
        return (self.cost, self.turns, cell)


Trails = dict[Cell, Trail]


def step(cell: Cell, direction: str) -> Cell:
    dx, dy = DIRECTIONS[direction]
    return (cell[0] + dx, cell[1] + dy)


def find_trails(ground: Ground, *, can_dig: bool) -> Trails:
    """The cheapest way to every known cell that can be entered or bumped into; among equals a straight one.

    Args:
        ground: what is known; unknown cells and everything but grass, sand and path block.
        can_dig: the player can remove stone, so ways may lead through it (three env steps a cell).
    """
    cells = ground.cells
    trails: Trails = {ground.player: Trail(0, 0)}
    queue: list[tuple[int, int, Cell]] = [(0, 0, ground.player)]
    while queue:
        cost, turns, cell = heappop(queue)
        here = trails[cell]
        kind = cells[cell]
        dug = can_dig and kind in ROCK
        if (cost, turns) != (here.cost, here.turns) or not (dug or kind in GROUND or cell == ground.player):
            continue
        # A dug cell costs more to pass than to bump into; the surcharge is paid when walking on.
        onward = cost + (_DIG_COST if dug else 1)
        for name, (dx, dy) in DIRECTIONS.items():
            neighbour = (cell[0] + dx, cell[1] + dy)
            if neighbour not in cells:
                continue
            turned = turns + (here.direction not in ("", name))
            known = trails.get(neighbour)
            if known is None or (onward, turned) < (known.cost, known.turns):
                trails[neighbour] = Trail(onward, turned, name, cell)
                heappush(queue, (onward, turned, neighbour))
    return trails


def nearest(ground: Ground, trails: Trails, kinds: Iterable[str]) -> dict[str, Cell]:
    """The cheapest cell of each kind to face, but for the cell that the player faces already."""
    wanted = frozenset(kinds)
    best: dict[str, tuple[int, int, Cell]] = {}
    for cell, trail in trails.items():
        kind = ground.at(cell)
        if kind in wanted and cell != ground.ahead:
            rank = trail.rank(cell)
            if kind not in best or rank < best[kind]:
                best[kind] = rank
    return {kind: cell for kind, (_, _, cell) in best.items()}


def nearest_facing(ground: Ground, trails: Trails, names: frozenset[str]) -> Cell | None:
    """The cheapest free cell to arrive at with one of `names` ahead; None if the player faces one now."""
    if ground.at(ground.ahead) in names:
        return None
    return cheapest(
        trails,
        lambda cell, trail: (
            trail.before is not None
            and ground.at(cell) in GROUND
            and ground.at(step(cell, trail.direction)) in names
        ),
    )


def cheapest(trails: Trails, fits: Callable[[Cell, Trail], bool]) -> Cell | None:
    found = [trail.rank(cell) for cell, trail in trails.items() if fits(cell, trail)]
    return min(found)[2] if found else None


def walk_to(ground: Ground, trails: Trails, cell: Cell, *, told_cells: int) -> Walk:
    """The walk to `cell`, cut after the leg that completes `told_cells` cells."""
    steps: list[tuple[str, bool]] = []
    at, trail = cell, trails[cell]
    while trail.before is not None:
        # The last step only has to face its cell, so it never digs.
        steps.append((trail.direction, at != cell and ground.at(at) in ROCK))
        at, trail = trail.before, trails[trail.before]
    legs = [Leg(name, len(list(run)), dig) for (name, dig), run in groupby(reversed(steps))]
    told = next((n for n in range(len(legs)) if sum(leg.count for leg in legs[:n]) >= told_cells), len(legs))
    return Walk(tuple(legs[:told]), more=told < len(legs))
