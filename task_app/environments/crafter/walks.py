"""Walks over the known part of the map: the cheapest way to the nearest thing of every kind.

A *walk* is a list of moves after which the player faces the thing. Bumping into an obstacle turns the player
towards it. So the walk to a tree two cells to the left and one up is left, left, up; the action `do` then
acts on the tree.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from task_app.environments.crafter.grid import FACINGS, VOID

# A cell is one number: numbers compare like (x, y), and a neighbour's number differs by a constant.
Cell = int
_MARGIN, _COLUMN = 8, 128
# The range of a cell's coordinates: the 64x64 world, and the part of a view beyond its edges.
LOWEST, HIGHEST = -_MARGIN, _COLUMN - _MARGIN - 1
_STEPS = {name: dx * _COLUMN + dy for name, (dx, dy) in FACINGS.items()}
_CELLS = _COLUMN * _COLUMN
# Maps the direction of the last step ("": no step yet) to the possible next steps: all but the step back.
_ONWARD = {
    before: tuple((name, offset) for name, offset in _STEPS.items() if offset != -_STEPS.get(before, 0))
    for before in ("", *_STEPS)
}
GROUND = frozenset({"grass", "sand", "path"})
ROCK = frozenset({"stone"})
_DIG_COST = 3  # turn, dig, enter


def cell_at(x: int, y: int) -> Cell:
    """Return the cell at (x, y); both coordinates lie in LOWEST .. HIGHEST."""
    return (x + _MARGIN) * _COLUMN + y + _MARGIN


def locate(cell: Cell) -> tuple[int, int]:
    return cell // _COLUMN - _MARGIN, cell % _COLUMN - _MARGIN


def step(cell: Cell, direction: str) -> Cell:
    return cell + _STEPS[direction]


@dataclass(frozen=True, slots=True)
class Leg:
    """A straight part of a walk: `count` cells towards `direction`, dug through rock if `dig`."""

    direction: str
    count: int
    dig: bool = False


@dataclass(frozen=True, slots=True)
class Walk:
    """The first legs of the way to a thing; `more` tells whether the way continues after them."""

    legs: tuple[Leg, ...]
    more: bool = False

    @property
    def cells(self) -> int:
        return sum(leg.count for leg in self.legs)

    def cut(self, max_cells: int) -> "Walk":
        """Return the first legs of the walk, up to and including the one that completes `max_cells` cells."""
        cells, shown = 0, 0
        while cells < max_cells and shown < len(self.legs):
            cells += self.legs[shown].count
            shown += 1
        return Walk(self.legs[:shown], more=self.more or shown < len(self.legs))


@dataclass(frozen=True, slots=True)
class Ground:
    """The known part of the map: the name of every known cell, and the player's cell and direction."""

    cells: Mapping[Cell, str]
    player: Cell
    facing: str

    def at(self, cell: Cell) -> str:
        return self.cells.get(cell, VOID)

    @property
    def ahead(self) -> Cell:
        return step(self.player, self.facing)


# The last step of the cheapest way to a cell: (cost, turns, direction, previous cell). The player's own cell
# has no direction, and is its own previous cell.
Trail = tuple[int, int, str, Cell]
# Ordered by cost, turns and cell, so that ties do not depend on the order of the search.
Trails = dict[Cell, Trail]


def find_trails(ground: Ground, *, can_dig: bool) -> Trails:
    """Find the cheapest way to every known cell that the player can enter or bump into.

    Of equally cheap ways, the straightest is chosen. Every known cell except grass, sand and path blocks the
    way. A player that `can_dig` can also walk through stone, which takes three env steps per cell.
    """
    cells, start = ground.cells, ground.player
    trails: Trails = {}
    best: Trails = {start: (0, 0, "", start)}
    # queue[i] lists the cells to visit at the current cost + i, each as the number turns * _CELLS + cell. A
    # step costs at least 1, so the list of a cost is complete when it is processed.
    queue: list[list[int]] = [[start], *([] for _ in range(_DIG_COST))]
    cost = 0
    while any(queue):
        for number in sorted(queue[0]):
            cell = number % _CELLS
            if cell in trails:
                continue
            trails[cell] = trail = best[cell]
            kind = cells[cell]
            # Passing a rock cell costs more than bumping into it, so the step out of the cell costs more.
            if kind in GROUND or cell == start:
                surcharge = 1
            elif can_dig and kind in ROCK:
                surcharge = _DIG_COST
            else:
                continue
            _, turns, direction, _ = trail
            onward, due = cost + surcharge, queue[surcharge]
            for name, offset in _ONWARD[direction]:
                neighbour = cell + offset
                turns_on = turns if name == direction or not direction else turns + 1
                if (known := best.get(neighbour)) is None:
                    if neighbour not in cells:
                        continue
                elif known[0] < onward or (known[0] == onward and known[1] <= turns_on):
                    continue
                best[neighbour] = (onward, turns_on, name, cell)
                due.append(turns_on * _CELLS + neighbour)
        queue = [*queue[1:], []]
        cost += 1
    return trails


def nearest(ground: Ground, trails: Trails, kinds: Iterable[str]) -> dict[str, Cell]:
    """Find for each kind the cell that is cheapest to reach, ignoring the cell that is faced already."""
    cells, ahead = ground.cells, ground.ahead
    kind_set = frozenset(kinds)
    best: dict[str, Cell] = {}
    for cell in trails:
        kind = cells[cell]
        if kind in kind_set and kind not in best and cell != ahead:
            best[kind] = cell
    return best


def nearest_facing(ground: Ground, trails: Trails, names: frozenset[str]) -> Cell | None:
    """Find the cheapest way after which the player stands on a free cell and faces one of `names`.

    Returns this free cell, or None if the player faces one of `names` already or if there is no such way.
    """
    cells = ground.cells
    if ground.at(ground.ahead) in names:
        return None
    for cell, (_, _, direction, _) in trails.items():
        if direction and cells[cell] in GROUND and cells.get(cell + _STEPS[direction]) in names:
            return cell
    return None


# Cached, because few different legs occur, and making a frozen object takes ten times as long as a look-up.
_leg = cache(Leg)


def walk_to(ground: Ground, trails: Trails, cell: Cell, *, max_cells: int) -> Walk:
    """Make the walk to `cell`, and return its first legs, as `Walk.cut(max_cells)` does."""
    legs: list[Leg] = []
    # The last step ends when the player faces `cell` or enters it, so it never digs.
    _, _, direction, at = trails[cell]
    dig, count = False, 1
    while at != ground.player:
        _, _, name, before = trails[at]
        digs = ground.cells[at] in ROCK
        if name == direction and digs == dig:
            count += 1
        else:
            legs.append(_leg(direction, count, dig))
            direction, dig, count = name, digs, 1
        at = before
    legs.append(_leg(direction, count, dig))
    legs.reverse()
    return Walk(tuple(legs)).cut(max_cells)
