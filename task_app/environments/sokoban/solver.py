"""Finds all solvable states of a board, and the smallest number of pushes that solve each state.

The search runs backwards and breadth-first from the solved states, and pulls boxes off their goals. The depth
at which it finds a state is the smallest number of pushes that solve the state. A state that it does not find
is unsolvable. Boards must be small; a board with 20 free cells and two boxes has about 300 states.
"""

from collections.abc import Mapping
from functools import lru_cache

from task_app.environments.sokoban.board import Board, Push, State, cells

# (set of boxes, set of cells that the player can reach without a push). States with equal keys allow the same
# pushes.
Key = tuple[int, int]


def make_key(board: Board, state: State) -> Key:
    return state.boxes, board.region(state)


@lru_cache(maxsize=128)
def pushes_left(board: Board) -> Mapping[Key, int]:
    """Map the `Key` of each solvable state of the board to the smallest number of pushes that solve it.

    The search takes up to 0.1 s.
    """
    left: dict[Key, int] = {}
    for cell in cells(board.floor & ~board.goals):
        left[make_key(board, State(board.goals, cell))] = 0
    frontier = list(left)
    for key in frontier:  # breadth-first: the list grows during the loop
        for before in _pull_boxes(board, key):
            if before not in left:
                left[before] = left[key] + 1
                frontier.append(before)
    return left


def is_solvable(board: Board, state: State, left: Mapping[Key, int]) -> bool:
    """Return whether the state is solvable. `left` is the result of `pushes_left(board)`."""
    return state.boxes == board.goals or make_key(board, state) in left


def best_push(board: Board, state: State, left: Mapping[Key, int]) -> Push | None:
    """Return the first push of a shortest solution; None if the state is solved or unsolvable.

    Of several such pushes, return the push that needs the fewest moves to get behind the box.
    """
    fewest = left.get(make_key(board, state))
    if not fewest:
        return None
    good = [push for push in board.pushes(state) if left.get(make_key(board, push.state)) == fewest - 1]
    return min(good, key=lambda push: len(push.way))


def _pull_boxes(board: Board, key: Key) -> list[Key]:
    """Return the keys of the states from which one push leads to a state with this key."""
    boxes, region = key
    before = []
    for box in cells(boxes):
        for stride in board.strides.values():
            cell, beyond = box + stride, box + 2 * stride
            # The player stands next to the box and steps back, which pulls the box along.
            if region >> cell & 1 and (board.floor & ~boxes) >> beyond & 1:
                before.append(make_key(board, State(boxes ^ (1 << box | 1 << cell), beyond)))
    return before
