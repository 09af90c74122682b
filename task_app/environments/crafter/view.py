"""The player's view: the 9x7 cells around the player, row by row as on the screen."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from task_app.environments.crafter.grid import MATERIAL_NAMES, STRIDE
from task_app.environments.crafter.player import Player
from task_app.environments.crafter.world import World

COLUMNS, ROWS = 9, 7
CENTRE = (COLUMNS // 2, ROWS // 2)
# Offset from the player's cell to the top left cell of the view.
_TOP_LEFT = -(ROWS // 2) * STRIDE - COLUMNS // 2
_name_of = MATERIAL_NAMES.__getitem__
_ROW_STARTS = tuple(_TOP_LEFT + row * STRIDE for row in range(ROWS))


class LocalView(NamedTuple):
    """The visible cells as names, with no more information than the screen shows."""

    rows: tuple[tuple[str, ...], ...]
    """[7][9] names; row 0 is the top of the screen (smallest y), column 0 its left. A name is the kind of the
    thing on the cell ('cow', 'zombie', 'skeleton', 'arrow', 'plant', 'ripe-plant', 'player') or, without a
    thing, the material of the cell; 'void' is outside the world."""
    materials: tuple[tuple[str, ...], ...]
    """[7][9] names of the materials, also under things; 'void' is outside the world."""
    target: str
    """Name of the faced cell, as in `rows`."""


def nearest_offsets(rows: Sequence[Sequence[str]], *, without: Collection[str]) -> dict[str, tuple[int, int]]:
    """Return for each name the offset (dx, dy) from the middle of `rows` to the nearest cell of that name.

    The names in `without` are left out. Of equally near cells, the first one in `rows` is chosen.
    """
    nearest: dict[str, tuple[int, int]] = {}
    for dy, row in enumerate(rows, start=-(len(rows) // 2)):
        for dx, name in enumerate(row, start=-(len(row) // 2)):
            x, y = nearest.get(name, (len(row), len(rows)))
            if name not in without and abs(dx) + abs(dy) < abs(x) + abs(y):
                nearest[name] = (dx, dy)
    return nearest


def local_view(world: World, player: Player) -> LocalView:
    # The world's border is half as wide as the view, so this code need not test for the edge of the world.
    rows, materials = [], []
    cell, cells, at = player.cell, world.materials, world.at
    for offset in _ROW_STARTS:
        start = cell + offset
        end = start + COLUMNS
        ground = tuple(map(_name_of, cells[start:end]))
        things = at[start:end]
        materials.append(ground)
        if any(things):
            row = [*ground]
            for column, thing in enumerate(things):
                if thing is not None:
                    row[column] = thing.name
            ground = tuple(row)
        rows.append(ground)
    target = player.target_cell()
    thing_ahead = at[target]
    name = thing_ahead.name if thing_ahead else MATERIAL_NAMES[cells[target]]
    return LocalView(tuple(rows), tuple(materials), name)
