"""What a player remembers of the map: every cell ever seen, so that walks reach beyond the view."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, ValidationError

from shared_schemas.base import Body
from task_app.environments.crafter.landmarks import Facts, can_dig, facing_name, landmark_walks, make_facts
from task_app.environments.crafter.view import COLUMNS, ROWS
from task_app.environments.crafter.walks import (
    DIRECTIONS,
    GROUND,
    Cell,
    Ground,
    Trail,
    Walk,
    find_trails,
    walk_to,
)
from task_app.policies.crafter_teacher import decide, purpose

# A creature moves on once it is out of sight; what it stood on is then taken to be free.
_LEFT_BEHIND = {"cow": "grass", "zombie": "grass", "skeleton": "path", "arrow": "path", "player": "grass"}
_WHOLE_WALK = 10_000
_TURN_BACK_COST = 4
# Known things farther away than this are looked for only when nothing nearer is worth doing.
NEAR_STEPS = 6


def decide_with_memory(facts: Facts, *, max_actions: int) -> list[str]:
    """The memoryless teacher's rules, first on what is near, then on all that is known, then exploring."""
    near = {kind: walk for kind, walk in facts.walks.items() if _steps(walk) <= NEAR_STEPS}
    return purpose(replace(facts, walks=near), max_actions=max_actions) or decide(
        facts, max_actions=max_actions
    )


def _steps(walk: Walk) -> int:
    return sum(leg.count for leg in walk.legs)


class _Remembered(Body):
    step: int = Field(ge=0)
    cells: list[tuple[int, int, Annotated[str, Field(max_length=100)]]] = Field(max_length=100_000)


class MapMemory:
    """Cells by absolute position, as last seen."""

    def __init__(self) -> None:
        self._cells: dict[Cell, str] = {}
        self._step = 0

    def facts(self, data: Mapping[str, Any]) -> Facts:
        """The facts of this view, with walks to the nearest known things, seen now or earlier."""
        player: Cell = (data["position"][0], data["position"][1])
        if data["step"] == 0 or data["step"] < self._step:
            self._cells = {}  # another episode
        self._step = data["step"]
        seen = _seen(data, player)
        ground = Ground(self._cells | seen, player=player, facing=facing_name(data))
        trails = find_trails(ground, can_dig=can_dig(data))
        walks = landmark_walks(ground, trails, told_cells=_WHOLE_WALK)
        way = _frontier(ground, trails)
        if way is not None:
            walks["way"] = walk_to(ground, trails, way, told_cells=_WHOLE_WALK)
        self._cells |= {cell: _LEFT_BEHIND.get(name, name) for cell, name in seen.items()}
        return make_facts(data, ground, walks)

    def snapshot(self) -> dict[str, Any]:
        """Return the memory as JSON-able data."""
        return {"step": self._step, "cells": [[x, y, name] for (x, y), name in self._cells.items()]}

    def restore(self, state: Any) -> None:
        """Remember that instead; ValueError when it is nothing that `snapshot` gave."""
        try:
            memory = _Remembered.model_validate(state)
        except ValidationError as exc:
            raise ValueError("'memory' is no map of cells") from exc
        self._step = memory.step
        self._cells = {(x, y): name for x, y, name in memory.cells}


def _seen(data: Mapping[str, Any], player: Cell) -> dict[Cell, str]:
    x0, y0 = player[0] - COLUMNS // 2, player[1] - ROWS // 2
    return {(x0 + x, y0 + y): name for y, row in enumerate(data["rows"]) for x, name in enumerate(row)}


def _frontier(ground: Ground, trails: Mapping[Cell, Trail]) -> Cell | None:
    """A free cell with unknown cells around it: near, and rather ahead than behind."""
    dx, dy = DIRECTIONS[ground.facing]
    px, py = ground.player

    def rank(cell: Cell) -> tuple[float, Cell]:
        ahead = (cell[0] - px) * dx + (cell[1] - py) * dy
        return trails[cell].cost + (0 if ahead > 0 else _TURN_BACK_COST), cell

    edge = [
        cell
        for cell in trails
        if ground.at(cell) in GROUND and _opens(ground, cell) and cell != ground.player
    ]
    return min(edge, key=rank) if edge else None


def _opens(ground: Ground, cell: Cell) -> bool:
    return any((cell[0] + dx, cell[1] + dy) not in ground.cells for dx, dy in DIRECTIONS.values())
