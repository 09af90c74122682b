"""An operator's file with a corridor of 30 cells: one of two ways is right in each, the other is a trap.

The key lies in cell 10, the door is in cell 20, and the treasure in cell 30. Who chooses at random is trapped
after two decisions, and has the key in one game of 1,024.
"""

import random
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from shared_schemas.base import Body
from shared_schemas.messages import Message
from task_app.complaints import state_in
from task_app.plugins import EnvironmentPlugin
from task_app.protocols import Observation, PastDecision
from task_app.tools import OneCallEnvironment


class CorridorConfig(Body):
    cells: int = Field(default=30, ge=3, le=300, description="a multiple of 3")


class Moment(Body):
    cell: int = Field(ge=0)
    trapped: bool


class Corridor(OneCallEnvironment):
    """Every world is the same one, and nothing is drawn but what a reseed asks for, which changes nothing."""

    name, outcome_definition = "corridor", "success: the treasure is found"

    def __init__(self, config: CorridorConfig) -> None:
        super().__init__([self.go])
        self._cells = config.cells
        self._marks = {"key": config.cells // 3, "door": config.cells * 2 // 3, "treasure": config.cells}
        self._ways = [random.Random(f"cell {cell}").choice(["left", "right"]) for cell in range(config.cells)]
        self._at = Moment(cell=0, trapped=False)

    def go(self, way: Literal["left", "right"]) -> str:
        """Go on from this cell."""
        right = way == self._ways[self._at.cell]
        self._at = Moment(cell=self._at.cell + right, trapped=not right)
        self._ran.append((way, float(self._at.cell in self._marks.values() and right)))
        return "on" if right else "trapped"

    def reset(self, seed: int) -> Observation:
        self._at = Moment(cell=0, trapped=False)
        return self._observe(0.0)

    def over(self) -> bool:
        return self._at.trapped or self._at.cell == self._cells

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        return (Message(role="user", content=observation.text),)

    def outcome_reward(self) -> float:
        return float(self._at.cell == self._cells)

    def snapshot(self) -> bytes:
        return self._at.model_dump_json().encode()

    def restore(self, state: bytes) -> Observation:
        self._at = state_in(Moment, state)
        return self._observe(0.0)

    def reseed(self, seed: int) -> None:
        pass

    def _state_before(self) -> Moment:
        return self._at

    def _run_nothing(self, action: str, before: Moment) -> None:
        self._ran.append((action, 0.0))

    def _observe_after(self, before: Moment, *, is_refused: bool) -> Observation:
        return self._observe(self._ran[-1][1])

    def _observe(self, reward: float) -> Observation:
        counts = {name: int(self._at.cell >= cell) for name, cell in self._marks.items()}
        return Observation(f"cell {self._at.cell}", {"cell": self._at.cell}, counts, reward)


ENVIRONMENTS = {"corridor": EnvironmentPlugin(CorridorConfig, Corridor)}
