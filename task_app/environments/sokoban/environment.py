"""Sokoban as an `Environment`.

Boxes on goals are achievements. The episode ends when the board is solved or can no longer be solved.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from shared_schemas.base import Body
from shared_schemas.messages import Message
from task_app.complaints import state_in
from task_app.environments.sokoban.board import Board, State, cells, picture, read_xsb, xsb_rows
from task_app.environments.sokoban.solver import Key, is_solvable, make_key, pushes_left
from task_app.environments.sokoban.text import SYSTEM, compact_text, full_text
from task_app.episode.state_keys import StateKey
from task_app.errors import started
from task_app.past import state_alone
from task_app.plugins import EnvironmentPlugin
from task_app.protocols import Observation, PastDecision
from task_app.tools import OneCallEnvironment

MAX_MOVES = 8
MAX_STEPS = 10_000
MAX_PUSHES = 4
Direction = Literal["up", "down", "left", "right"]
PushName = Literal[
    "1-up", "1-down", "1-left", "1-right", "2-up", "2-down", "2-left", "2-right",
    "3-up", "3-down", "3-left", "3-right",
]  # fmt: skip
# Rewards of gym-sokoban (Schrader, 2018): for each step; for pushing a box onto a goal, negated for pushing
# a box off a goal; for solving the board.
STEP_REWARD, BOX_REWARD, SOLVED_REWARD = -0.1, 1.0, 10.0
WALL_SHARE = 0.2  # of a drawn board's cells
# With every allowed config, a board is found within some dozens of draws.
MOST_DRAWS = 10_000


class SokobanConfig(Body):
    """Settings of a `sokoban` environment."""

    text: Literal["full", "compact"] = Field(
        default="full",
        description="full: the board, and a call of moves; compact: some 45 words, and a call of pushes",
    )
    size: int = Field(default=5, ge=4, le=7, description="cells of a side, without the wall around them")
    boxes: int = Field(default=2, ge=1, le=3)
    min_pushes: int = Field(default=3, ge=1, le=6, description="of a shortest solution")
    max_pushes: int = Field(default=10, ge=1, le=100, description="of a shortest solution")
    length: int = Field(default=100, ge=1, le=MAX_STEPS, description="env steps before truncation")

    @model_validator(mode="after")
    def _refuse_no_board(self) -> "SokobanConfig":
        if self.max_pushes < max(self.min_pushes, self.boxes):
            raise ValueError(
                f"max_pushes is {self.max_pushes}; min_pushes is {self.min_pushes}, and each of "
                f"{self.boxes} boxes needs a push"
            )
        return self


class SokobanMoment(Body, allow_inf_nan=False):
    """A snapshot of an episode. `rows` is the board in XSB.

    `best` is the largest number of boxes that stood on goals at one time while the board was solvable.
    """

    rows: list[Annotated[str, Field(max_length=9)]] = Field(min_length=6, max_length=9)
    step: int = Field(ge=0, le=MAX_STEPS)
    best: int = Field(ge=0, le=3)
    reward: float
    no_effect: bool
    invalid: bool


class SokobanEnvironment(OneCallEnvironment):
    """Plays Sokoban; equal seeds and calls give equal episodes in every process. Steps use no randomness."""

    name = "sokoban"
    outcome_definition = "solved: 1 when every box stands on a goal"
    _called = "the tool"  # recorded episodes contain these words, so replays need them

    def __init__(self, config: SokobanConfig | None = None) -> None:
        self.config = config or SokobanConfig()
        super().__init__([self.push if self.config.text == "compact" else self.move])
        self._board: Board | None = None
        self._left: Mapping[Key, int] = {}  # pushes_left of the board
        self._state = State(0, 0)
        self._step, self._best, self._stuck = 0, 0, False

    @property
    def quick_step(self) -> bool:
        """Whether steps are fast, because `reset` or `restore` has already found all solvable states."""
        return self._board is not None

    def move(self, moves: Annotated[list[Direction], Field(min_length=1, max_length=MAX_MOVES)]) -> str:
        """Move in order; a move against a box pushes it."""
        self._walk(moves)
        return self._progress()

    def push(self, pushes: Annotated[list[PushName], Field(min_length=1, max_length=MAX_PUSHES)]) -> str:
        """Walk behind a box and push it one cell, in order. Boxes keep their numbers during a call."""
        board, boxes = started(self._board), list(cells(self._state.boxes))
        for name in pushes:
            number, _, direction = name.partition("-")
            index = int(number) - 1
            possible = {(push.box, push.direction): push for push in board.pushes(self._state)}
            push = possible.get((boxes[index], direction)) if index < len(boxes) else None
            if push is None:
                self._run("noop", STEP_REWARD)
                return f"{name} is not possible; {self._progress()}"
            if not self._walk((*push.way, push.direction)):
                break
            boxes[index] += board.strides[direction]
        return self._progress()

    def reset(self, seed: int) -> Observation:
        config = self.config
        self._board, self._state = generate(
            seed, size=config.size, boxes=config.boxes, pushes=(config.min_pushes, config.max_pushes)
        )
        self._left = pushes_left(self._board)
        self._step, self._best, self._stuck = 0, 0, False
        return self._observe(0.0)

    def over(self) -> bool:
        return self._is_solved() or self._stuck

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        return state_alone(observation, past, system=None if self.config.text == "compact" else SYSTEM)

    def outcome_reward(self) -> float:
        return float(self._board is not None and self._is_solved())

    def frame(self, width: int, height: int) -> npt.NDArray[np.uint8]:
        """Draw a picture of the board, [height, width, 3]. Raises EpisodeOver before the first reset."""
        return picture(xsb_rows(started(self._board), self._state), width, height)

    def snapshot(self) -> bytes:
        """Return the board and the progress of the episode as JSON.

        Raises EpisodeOver before the first reset.
        """
        rows = xsb_rows(started(self._board), self._state)
        moment = SokobanMoment(rows=rows, step=self._step, best=self._best, **self._last)
        return moment.model_dump_json().encode()

    def restore(self, state: bytes) -> Observation:
        moment, config = state_in(SokobanMoment, state), self.config
        board, restored = read_xsb(moment.rows)
        if (board.width, restored.boxes.bit_count()) != (config.size + 2, config.boxes):
            raise ValueError(
                f"the snapshot's board has size {board.width - 2} and {restored.boxes.bit_count()} boxes; "
                f"this environment's config has size {config.size} and {config.boxes} boxes"
            )
        self._board, self._state, self._step, self._best = board, restored, moment.step, moment.best
        self._left = pushes_left(board)
        self._stuck = not is_solvable(board, restored, self._left)
        return self._observe(moment.reward, no_effect=moment.no_effect, invalid=moment.invalid)

    def _walk(self, moves: Sequence[str]) -> bool:
        """Make the moves in order until the episode ends; return whether the episode continues."""
        for direction in moves:
            if self.over() or self._is_cut():
                break
            self._move(direction)
        return not (self.over() or self._is_cut())

    def _move(self, direction: str) -> None:
        board, before, on_goals = started(self._board), self._state, self._on_goals
        self._state = board.move(before, direction)
        if self._state.boxes != before.boxes:
            self._stuck = not is_solvable(board, self._state, self._left)
        if not self._stuck:  # on an unsolvable board, boxes on goals do not count as achievements
            self._best = max(self._best, self._on_goals)
        reward = STEP_REWARD + BOX_REWARD * (self._on_goals - on_goals)
        self._run(direction, reward + SOLVED_REWARD * self._is_solved())

    def _run(self, move: str, reward: float) -> None:
        self._step += 1
        self._ran.append((move, reward))

    def _progress(self) -> str:
        return f"{self._on_goals} of {self.config.boxes} boxes on goals"

    @property
    def _on_goals(self) -> int:
        return (self._state.boxes & started(self._board).goals).bit_count()

    def _is_solved(self) -> bool:
        return self._on_goals == self.config.boxes

    def _is_cut(self) -> bool:
        return self._step >= self.config.length

    def _state_before(self) -> State:
        started(self._board)
        return self._state

    def _run_nothing(self, action: str, before: State) -> None:
        self._run(action, STEP_REWARD)

    def _observe_after(self, before: State, *, is_refused: bool) -> Observation:
        return self._observe(self._ran[-1][1], no_effect=self._state == before, invalid=is_refused)

    def _observe(self, reward: float, *, no_effect: bool = False, invalid: bool = False) -> Observation:
        config = self.config
        self._last: dict[str, Any] = {"reward": reward, "no_effect": no_effect, "invalid": invalid}
        data = {
            "rows": xsb_rows(started(self._board), self._state),
            "on_goals": self._on_goals,
            "boxes": config.boxes,
            "step": self._step,
            "max_steps": config.length,
            "stuck": self._stuck,
            "no_effect": no_effect,
            "invalid": invalid,
        }
        counts = {f"box_{k}": int(self._best >= k) for k in range(1, config.boxes + 1)}
        counts["solved"] = int(self._best == config.boxes)
        text = compact_text(data) if config.text == "compact" else full_text(data)
        return Observation(text, data, counts, reward)


def generate(seed: int, *, size: int, boxes: int, pushes: tuple[int, int]) -> tuple[Board, State]:
    """Draw a board with sides of `size` cells, and a start state in which no box stands on a goal.

    `pushes` is the smallest and the largest allowed number of pushes in a shortest solution. All numbers of
    this range that are possible on the drawn board are equally likely.
    """
    source = random.Random(seed)
    for _ in range(MOST_DRAWS):
        board = _draw_board(source, size, boxes)
        if board is not None and (state := _draw_state(source, board, pushes)) is not None:
            return board, state
    raise AssertionError("the config allows no settings without boards")


def _draw_board(source: random.Random, size: int, boxes: int) -> Board | None:
    """Draw walls, and draw goals in the largest connected area; return None if that area is too small."""
    width = size + 2
    inside = [y * width + x for y in range(1, size + 1) for x in range(1, size + 1)]
    rest = sum(1 << cell for cell in inside if source.random() >= WALL_SHARE)
    rooms = []
    while rest:
        room = Board(width, rest, 0).region(State(0, next(cells(rest))))
        rooms.append(room)
        rest &= ~room
    floor = max(rooms, key=int.bit_count, default=0)
    if floor.bit_count() < 2 * boxes + 2:
        return None
    goals = source.sample(list(cells(floor)), boxes)
    return Board(width, floor, sum(1 << cell for cell in goals))


def _draw_state(source: random.Random, board: Board, pushes: tuple[int, int]) -> State | None:
    low, high = pushes
    by_count: dict[int, list[tuple[int, int]]] = {}
    for key, count in pushes_left(board).items():
        if low <= count <= high and not key[0] & board.goals:
            by_count.setdefault(count, []).append(key)
    if not by_count:
        return None
    boxes, region = source.choice(by_count[source.choice(sorted(by_count))])
    return State(boxes, source.choice(list(cells(region))))


def board_key(observation: Observation) -> Any:
    """Return a state key that contains everything on which the rest of the episode depends.

    It contains walls, goals, boxes, the player's cell, and the number of achievements, because an achievement
    is rewarded only once. It does not contain the number of steps left.
    """
    return [observation.data["rows"], sum(observation.achievements_counts.values())]


def push_key(observation: Observation) -> Any:
    """Return the same as `board_key`, except for the player: its cell is replaced by all reachable cells."""
    board, state = read_xsb(observation.data["rows"])
    achieved = sum(observation.achievements_counts.values())
    return [board.width, board.floor, board.goals, *make_key(board, state), achieved]


SOKOBAN_STATE_KEYS: Mapping[str, StateKey] = {
    "board": StateKey(board_key, version=2),
    "pushes": StateKey(push_key, version=2),
}
PLUGIN = EnvironmentPlugin(SokobanConfig, SokobanEnvironment, SOKOBAN_STATE_KEYS)
