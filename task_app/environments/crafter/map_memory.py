"""A player's memory of the map: it stores all seen cells, so that walks can lead beyond the view."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError

from shared_schemas.base import Body
from task_app.environments.crafter.grid import FACINGS
from task_app.environments.crafter.landmarks import Facts, can_dig, facing_name, landmark_walks, make_facts
from task_app.environments.crafter.view import COLUMNS, ROWS
from task_app.environments.crafter.walks import (
    GROUND,
    HIGHEST,
    LOWEST,
    Cell,
    Ground,
    Trails,
    cell_at,
    find_trails,
    locate,
    step,
    walk_to,
)

# The ground to remember for the cell of a creature, because the creature walks away when it is out of sight.
_GROUND_UNDER = {"cow": "grass", "zombie": "grass", "skeleton": "path", "arrow": "path", "player": "grass"}
_WHOLE_WALK = 10_000
_TURN_BACK_COST = 4


_Coordinate = Annotated[int, Field(ge=LOWEST, le=HIGHEST)]


class SeenCells(Body):
    """The JSON form of a `MapMemory`: the env step of the last view, and (x, y, name) of each seen cell."""

    step: int = Field(ge=0)
    cells: list[tuple[_Coordinate, _Coordinate, Annotated[str, Field(max_length=100)]]] = Field(
        max_length=100_000
    )


class MapMemory:
    """Remembers the last seen name of each cell of the map."""

    def __init__(self) -> None:
        self._cells: dict[Cell, str] = {}
        self._step = 0

    def facts(self, data: Mapping[str, Any]) -> Facts:
        """Add a view to the memory, and return its facts.

        The facts contain walks to the nearest visible or remembered things. The memory is emptied first if
        `data` begins a new episode.
        """
        x, y = data["position"]
        if data["step"] == 0 or data["step"] < self._step:
            self._cells = {}  # a new episode
        self._step = data["step"]
        left, top = x - COLUMNS // 2, y - ROWS // 2
        view = {
            cell_at(left + column, top + row): name
            for row, names in enumerate(data["rows"])
            for column, name in enumerate(names)
        }
        ground = Ground(self._cells | view, player=cell_at(x, y), facing=facing_name(data))
        trails = find_trails(ground, can_dig=can_dig(data))
        walks = landmark_walks(ground, trails, max_cells=_WHOLE_WALK)
        way = _find_frontier(ground, trails)
        if way is not None:
            walks["way"] = walk_to(ground, trails, way, max_cells=_WHOLE_WALK)
        self._cells |= {cell: _GROUND_UNDER.get(name, name) for cell, name in view.items()}
        return make_facts(data, ground, walks)

    def snapshot(self) -> dict[str, Any]:
        return {"step": self._step, "cells": [[*locate(cell), name] for cell, name in self._cells.items()]}

    def restore(self, state: Any) -> None:
        """Replace the memory by a state that `snapshot` returned. Raises ValueError for any other state."""
        try:
            memory = SeenCells.model_validate(state)
        except ValidationError as exc:
            raise ValueError("'memory' is no map of cells") from exc
        self._step = memory.step
        self._cells = {cell_at(x, y): name for x, y, name in memory.cells}


def _find_frontier(ground: Ground, trails: Trails) -> Cell | None:
    """Return the cell that is cheapest to reach among the free cells with an unknown neighbour.

    Cells ahead of the player are preferred: any other cell costs _TURN_BACK_COST more.
    """
    dx, dy = FACINGS[ground.facing]
    px, py = locate(ground.player)

    def rank(cell: Cell) -> tuple[float, Cell]:
        x, y = locate(cell)
        ahead = (x - px) * dx + (y - py) * dy
        cost, *_ = trails[cell]
        return cost + (0 if ahead > 0 else _TURN_BACK_COST), cell

    edge = [
        cell
        for cell in trails
        if ground.at(cell) in GROUND
        and cell != ground.player
        and any(step(cell, name) not in ground.cells for name in FACINGS)
    ]
    return min(edge, key=rank, default=None)
