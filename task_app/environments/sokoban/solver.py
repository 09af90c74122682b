"""Which states of a board can be solved, and in how many pushes: one search backwards from the solved ones.

The search pulls boxes off their goals, breadth first. So a state that it meets can be solved, in as few
pushes as the search was deep there, and a state that it never meets cannot be solved. Boards must be small:
20 free cells and two boxes have some 300 states.
"""

from collections.abc import Mapping
from functools import lru_cache

from task_app.environments.sokoban.board import Board, Push, State, cells

# The boxes, and the cells that the player reaches: from all of them the same pushes are possible.
Key = tuple[int, int]


def make_key(board: Board, state: State) -> Key:
    return state.boxes, board.region(state)


@lru_cache(maxsize=128)
def pushes_left(board: Board) -> Mapping[Key, int]:
    """The fewest pushes that solve each state that can be solved."""
    left: dict[Key, int] = {}
    for cell in cells(board.floor & ~board.goals):
        left[make_key(board, State(board.goals, cell))] = 0
    frontier = list(left)
    for key in frontier:  # grows while it is read: breadth first
        for before in _pulled(board, key):
            if before not in left:
                left[before] = left[key] + 1
                frontier.append(before)
    return left


def is_solvable(board: Board, state: State, left: Mapping[Key, int]) -> bool:
    """`left` are the `pushes_left` of the board, which may take a tenth of a second."""
    return state.boxes == board.goals or make_key(board, state) in left


def best_push(board: Board, state: State, left: Mapping[Key, int]) -> Push | None:
    """The push of a shortest solution, of several the one with the shortest way; None if there is none."""
    fewest = left.get(make_key(board, state))
    if not fewest:
        return None
    good = [push for push in board.pushes(state) if left.get(make_key(board, push.state)) == fewest - 1]
    return min(good, key=lambda push: len(push.way))


def _pulled(board: Board, key: Key) -> list[Key]:
    """The states from which one push leads here."""
    boxes, region = key
    before = []
    for box in cells(boxes):
        for stride in board.strides.values():
            cell, beyond = box + stride, box + 2 * stride
            # The player stands next to the box, steps back, and takes the box along.
            if region >> cell & 1 and (board.floor & ~boxes) >> beyond & 1:
                before.append(make_key(board, State(boxes ^ (1 << box | 1 << cell), beyond)))
    return before
