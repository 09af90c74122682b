"""Boards of Sokoban, and the effect of moves.

A cell is the number y * width + x. A set of cells is an int: bit number c is set if the set contains cell c.
Boards are written in XSB, the usual notation of Sokoban programs, with `_` for floor:

    #######      # wall   @ player   + player on a goal
    #_@$._#      $ box    * box on a goal   . goal
    #######
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

WALL, FLOOR, GOAL, BOX, BOX_ON_GOAL, PLAYER, PLAYER_ON_GOAL = "#_.$*@+"
# Directions are tried in this order, so the order decides which of several equally short paths is found.
DIRECTIONS = ("up", "down", "left", "right")


@dataclass(frozen=True, slots=True)
class Push:
    box: int
    direction: str
    way: tuple[str, ...]
    """Moves that bring the player behind the box, without the move that pushes the box."""
    state: "State"
    """The state after the push."""


@dataclass(frozen=True, slots=True)
class State:
    """The set of cells with a box, and the player's cell."""

    boxes: int
    player: int


@dataclass(frozen=True)
class Board:
    """The fixed parts of a square board. The rim consists of walls, so that no move can leave the board.

    `floor` and `goals` are sets of cells; `floor` includes the goals.
    """

    width: int
    floor: int
    goals: int

    @cached_property
    def strides(self) -> dict[str, int]:
        """Map each direction to the number that a move in this direction adds to a cell number."""
        return {"up": -self.width, "down": self.width, "left": -1, "right": 1}

    def move(self, state: State, direction: str) -> State:
        """Return the state after the player moves one cell, and pushes the box that stands there, if any.

        A move that is blocked returns `state` itself.
        """
        stride = self.strides[direction]
        cell = state.player + stride
        if not self.floor >> cell & 1:
            return state
        if not state.boxes >> cell & 1:
            return State(state.boxes, cell)
        beyond = cell + stride
        if not (self.floor & ~state.boxes) >> beyond & 1:
            return state
        return State(state.boxes ^ (1 << cell | 1 << beyond), cell)

    def region(self, state: State) -> int:
        """Return the set of cells that the player can reach without pushing a box."""
        free, width = self.floor & ~state.boxes, self.width
        region, before = 1 << state.player, 0
        while region != before:
            before = region
            region = (region | region << 1 | region >> 1 | region << width | region >> width) & free
        return region

    def pushes(self, state: State) -> Iterator[Push]:
        """Yield all possible pushes, sorted by box in reading order, then by direction as in DIRECTIONS."""
        ways = self._find_ways(state)
        for box in cells(state.boxes):
            for direction in DIRECTIONS:
                behind = box - self.strides[direction]
                if behind not in ways:
                    continue
                after = self.move(State(state.boxes, behind), direction)
                if after.boxes != state.boxes:
                    yield Push(box, direction, ways[behind], after)

    def _find_ways(self, state: State) -> dict[int, tuple[str, ...]]:
        """Map each cell that the player can reach without a push to the moves of a shortest path to it."""
        free = self.floor & ~state.boxes
        ways: dict[int, tuple[str, ...]] = {state.player: ()}
        frontier = [state.player]
        for cell in frontier:  # breadth-first: the list grows during the loop
            for direction in DIRECTIONS:
                neighbour = cell + self.strides[direction]
                if free >> neighbour & 1 and neighbour not in ways:
                    ways[neighbour] = (*ways[cell], direction)
                    frontier.append(neighbour)
        return ways


def cells(bits: int) -> Iterator[int]:
    """Yield the numbers of the cells in the set `bits`, in reading order."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def xsb_rows(board: Board, state: State) -> list[str]:
    """Write the board in XSB, one string per row."""
    letters = []
    for cell in range(board.width**2):
        goal = board.goals >> cell & 1
        if cell == state.player:
            letters.append(PLAYER_ON_GOAL if goal else PLAYER)
        elif state.boxes >> cell & 1:
            letters.append(BOX_ON_GOAL if goal else BOX)
        else:
            letters.append(GOAL if goal else FLOOR if board.floor >> cell & 1 else WALL)
    return ["".join(letters[start : start + board.width]) for start in range(0, len(letters), board.width)]


def read_xsb(rows: Sequence[str]) -> tuple[Board, State]:
    """Read a board and its state from rows in XSB.

    Raises ValueError for an unknown letter, a board that is not a square with a rim of walls, more or fewer
    than one player, no box, and unequal numbers of goals and boxes.
    """
    text, width = "".join(rows), len(rows)
    if not width or any(len(row) != width for row in rows):
        raise ValueError("a board has as many rows as columns")
    unknown = sorted(set(text) - set("#_.$*@+"))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no letter of a board; known: #_.$*@+")
    rim = rows[0] + rows[-1] + "".join(row[0] + row[-1] for row in rows)
    if set(rim) != {WALL}:
        raise ValueError("the rim of a board is wall")

    def find_cells(letters: str) -> int:
        return sum(1 << cell for cell, letter in enumerate(text) if letter in letters)

    player, boxes, goals = find_cells("@+"), find_cells("$*"), find_cells(".*+")
    if player.bit_count() != 1 or boxes.bit_count() != goals.bit_count() or not boxes:
        raise ValueError(
            f"a board has one player and as many boxes as goals; found {player.bit_count()}, "
            f"{boxes.bit_count()} and {goals.bit_count()}"
        )
    return Board(width, find_cells("_.$*@+"), goals), State(boxes, player.bit_length() - 1)


Colour = tuple[int, int, int]
_FLOOR: Colour = (225, 220, 205)
# For each letter, the colour of its square in pictures, and half the square's side as a share of the cell's
# side. The rest of the cell has the colour of floor.
_LOOKS: dict[str, tuple[Colour, float]] = {
    WALL: ((70, 70, 80), 0.5),
    FLOOR: (_FLOOR, 0.5),
    GOAL: ((90, 170, 90), 0.15),
    BOX: ((170, 110, 50), 0.42),
    BOX_ON_GOAL: ((60, 140, 60), 0.42),
    PLAYER: ((60, 90, 190), 0.3),
    PLAYER_ON_GOAL: ((60, 150, 190), 0.3),
}


def picture(rows: Sequence[str], width: int, height: int) -> npt.NDArray[np.uint8]:
    """Draw the board that `rows` describes in XSB, with one coloured square per cell, [height, width, 3]."""
    y = np.arange(height) * len(rows) / height
    x = np.arange(width) * len(rows[0]) / width
    letters = np.array([list(row) for row in rows])[y.astype(int)[:, None], x.astype(int)]
    from_centre = np.maximum(abs(y % 1 - 0.5)[:, None], abs(x % 1 - 0.5))
    pixels = np.full((height, width, 3), _FLOOR, np.uint8)
    for letter, (colour, half_side) in _LOOKS.items():
        pixels[(letters == letter) & (from_centre <= half_side)] = colour
    return pixels
