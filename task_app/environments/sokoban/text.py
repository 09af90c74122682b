"""Writes an observation as one of two texts, each a pure function of `Observation.data`.

`full` shows the board; the model answers with moves. `compact` is for models with under a million parameters.
It consists of about 45 words (5 by 5 cells, 2 boxes) from a small closed vocabulary. It lists all possible
pushes, good and bad, and the model answers with pushes.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from task_app.environments.sokoban.board import Board, Push, State, cells, read_xsb

LEG_LETTERS = {"up": "U", "down": "D", "left": "L", "right": "R"}

SYSTEM = """\
You play Sokoban. Push every box onto a goal. You push a box by moving against it, if the cell behind it is
free. Boxes cannot be pulled, and two cannot be pushed at once. A box in a corner never leaves it. The episode
ends when the board cannot be solved any more.

# wall, _ floor, . goal, $ box, * box on a goal, @ you, + you on a goal

Always answer with one `move` call of 1 to 8 moves (up, down, left, right), carried out in order."""


def full_text(data: Mapping[str, Any]) -> str:
    boxes, step = f"{data['on_goals']} of {data['boxes']}", f"{data['step']} of {data['max_steps']}"
    news = [sentence for word, sentence in _NEWS.items() if data[word]]
    return "\n".join([f"Boxes on goals: {boxes}. Step {step}.", *data["rows"], *news])


def compact_text(data: Mapping[str, Any]) -> str:
    """Write the state in words of a closed vocabulary.

        on0 _ _ # 1 ... box1 to R2 D1 to L1 1-up U2 1-left L1 box2 ...

    First come the cells without the rim, row by row, in XSB. But a box is written as its number, and a dot
    follows the number if the box stands on a goal. After the cells, each box has a part with two lists. The
    first gives the offset from the box to each goal, such as `to R2 D1`. The second gives each possible push
    and how far the box can be pushed, such as `1-up U2`.
    """
    board, state = read_xsb(data["rows"])
    words, box_number = [f"on{data['on_goals']}"], 0
    for letter in "".join(row[1:-1] for row in data["rows"][1:-1]):
        box_number += letter in "$*"
        words.append(f"{box_number}{'.' * (letter == '*')}" if letter in "$*" else letter)
    names = {box: number for number, box in enumerate(cells(state.boxes), start=1)}
    pushes = {box: list(group) for box, group in groupby(board.pushes(state), key=lambda push: push.box)}
    for box, number in names.items():
        words += [f"box{number}", *_goal_words(board, box)]
        for push in pushes.get(box, ()):
            room = f"{LEG_LETTERS[push.direction]}{_count_free(board, state, push)}"
            words += [f"{number}-{push.direction}", room]
    return " ".join([*words, *(word for word in _NEWS if data[word])])


def _count_free(board: Board, state: State, push: Push) -> int:
    """Return by how many cells the box can be pushed in the direction of `push`."""
    free, stride, count = board.floor & ~state.boxes, board.strides[push.direction], 1
    while free >> (push.box + (count + 1) * stride) & 1:
        count += 1
    return count


_NEWS = {
    "stuck": "The board cannot be solved any more.",
    "no_effect": "The last moves changed nothing.",
    "invalid": "The last call was not carried out; it cost one step.",
}


def _goal_words(board: Board, box: int) -> Iterator[str]:
    for goal in cells(board.goals):
        right, down = goal % board.width - box % board.width, goal // board.width - box // board.width
        yield "to"
        if right:
            yield f"{'R' if right > 0 else 'L'}{abs(right)}"
        if down:
            yield f"{'D' if down > 0 else 'U'}{abs(down)}"
