"""Walks over a known part of the map: the shortest way to the nearest thing of every kind.

A *walk* is a list of moves after which the player faces the thing. Bumping into an obstacle turns the player,
so the walk to a tree that is two left and one up is left, left, up; then `do` works at once.
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
    """A straight part of a walk: `count` cells towards `direction`, through rock if `dig`."""

    direction: str
    count: int
    dig: bool = False


@dataclass(frozen=True, slots=True)
class Walk:
    """The first legs of the way to a thing; `more` if it goes on after them."""

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
        """Cheap first, then straight, then by place, so ties never depend on the order of the search."""
        return (self.cost, self.turns, cell)


Trails = dict[Cell, Trail]


def step(cell: Cell, direction: str) -> Cell:
    dx, dy = DIRECTIONS[direction]
    return (cell[0] + dx, cell[1] + dy)


def find_trails(ground: Ground, *, can_dig: bool) -> Trails:
    """The cheapest way to every known cell that can be entered or bumped into; a straight one among equals.

    Args:
        ground: everything but known grass, sand and path blocks the way.
        can_dig: the player can remove stone, so ways may lead through it (three env steps for each cell).
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
        # A dug cell costs more to pass than to bump into; walking on pays the surcharge.
        onward = cost + (_DIG_COST if dug else 1)
        for name, (dx, dy) in DIRECTIONS.items():
            neighbour = (cell[0] + dx, cell[1] + dy)
            if neighbour not in cells:
                continue
            turns_on = turns + (here.direction not in ("", name))
            known = trails.get(neighbour)
            if known is None or (onward, turns_on) < (known.cost, known.turns):
                trails[neighbour] = Trail(onward, turns_on, name, cell)
                heappush(queue, (onward, turns_on, neighbour))
    return trails


def nearest(ground: Ground, trails: Trails, kinds: Iterable[str]) -> dict[str, Cell]:
    """The cheapest cell of each kind to face, without the cell that the player faces already."""
    kind_set = frozenset(kinds)
    best: dict[str, tuple[int, int, Cell]] = {}
    for cell, trail in trails.items():
        kind = ground.at(cell)
        if kind in kind_set and cell != ground.ahead:
            rank = trail.rank(cell)
            if kind not in best or rank < best[kind]:
                best[kind] = rank
    return {kind: cell for kind, (_, _, cell) in best.items()}


def nearest_facing(ground: Ground, trails: Trails, names: frozenset[str]) -> Cell | None:
    """The cheapest free cell to reach with one of `names` ahead; None if the player faces one already."""
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
    ranks = [trail.rank(cell) for cell, trail in trails.items() if fits(cell, trail)]
    return min(ranks)[2] if ranks else None


def walk_to(ground: Ground, trails: Trails, cell: Cell, *, max_cells: int) -> Walk:
    """The walk to `cell`, cut after the leg that completes `max_cells` cells."""
    steps: list[tuple[str, bool]] = []
    at, trail = cell, trails[cell]
    while trail.before is not None:
        # The last step only has to face its cell, so it never digs.
        steps.append((trail.direction, at != cell and ground.at(at) in ROCK))
        at, trail = trail.before, trails[trail.before]
    legs = [Leg(name, len(list(run)), dig) for (name, dig), run in groupby(reversed(steps))]
    leg_count = next(
        (n for n in range(len(legs)) if sum(leg.count for leg in legs[:n]) >= max_cells), len(legs)
    )
    return Walk(tuple(legs[:leg_count]), more=leg_count < len(legs))
