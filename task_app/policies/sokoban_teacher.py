"""A teacher of Sokoban: the shortest solution of the board that it sees, a push a decision."""

import asyncio
from collections.abc import Mapping
from typing import Any

from task_app.environments.sokoban.board import Board, cells, read_xsb
from task_app.environments.sokoban.environment import MAX_MOVES
from task_app.environments.sokoban.solver import Key, best_push, pushes_left
from task_app.policies.random_calls import DetourConfig, DetourTeacher, Tools, call_answer
from task_app.protocols import PolicyAnswer


class SokobanTeacher(DetourTeacher[DetourConfig]):
    """Reads the board alone, and remembers its solution."""

    name = "sokoban_teacher"
    config_type = DetourConfig

    def __init__(self, config: DetourConfig | None = None) -> None:
        self._board: Board | None = None
        self._left: Mapping[Key, int] = {}  # pushes_left of the board
        super().__init__(config)

    async def choose(self, observation: Any, tools: Tools) -> PolicyAnswer:
        board, state = read_xsb(observation.data["rows"])
        if board != self._board:  # the first decision on it: a search of up to a tenth of a second
            self._board, self._left = board, await asyncio.to_thread(pushes_left, board)
        detour = self.makes_detour()
        possible = list(board.pushes(state))
        push = self._random.choice(possible) if detour and possible else best_push(board, state, self._left)
        if "push" not in {tool["function"]["name"] for tool in tools}:
            # The way to the push, and the push; where there is none, a move up.
            moves = ("up",) if push is None else (*push.way, push.direction)
            return call_answer("move", {"moves": list(moves)[:MAX_MOVES]}, exploratory=detour)
        word = "1-up"  # where no push leads to a solution, one of the first box
        if push is not None:
            word = f"{list(cells(state.boxes)).index(push.box) + 1}-{push.direction}"
        return call_answer("push", {"pushes": [word]}, exploratory=detour)
