"""Draws the game for people as stock crafter does: map, creatures, darkness and inventory.

Stock's own view classes draw the picture. They read a `_World`, which has the attributes of stock's world.
The noise of a dark picture comes from a copy of the random generator, so that drawing does not change the
game. In stock, drawing changes the game, because the noise comes from the game's own generator.
"""

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from crafter import constants
from crafter import engine as stock

from task_app.environments.crafter.grid import AREA, MATERIAL_NAMES, SIDES, cell_at
from task_app.environments.crafter.objects import Arrow
from task_app.environments.crafter.player import Player
from task_app.environments.crafter.state import bits_at
from task_app.environments.crafter.view import COLUMNS, ROWS
from task_app.environments.crafter.world import Thing, World

Picture = npt.NDArray[np.uint8]
ITEM_ROWS = 2  # rows of 9 cells for the 16 items, below the map


@functools.lru_cache(maxsize=1)
def _textures() -> Any:
    """Read stock's textures, once per process (30 ms)."""
    return stock.Textures(constants.root / "assets")


@functools.lru_cache(maxsize=8)
def _vignette(shape: tuple[int, ...], stddev: float) -> Any:
    """Make stock's mask for the noise of a dark picture, which makes the noise grow towards the rim.

    The mask is cached here, because stock's own cache would keep every view object alive.
    """
    return stock.LocalView._vignette.__wrapped__(None, shape, stddev)


class _MapView(stock.LocalView):  # type: ignore[misc]  # crafter has no types
    def _vignette(self, shape: tuple[int, ...], stddev: float) -> Any:
        return _vignette(tuple(shape), stddev)


class _World:
    """A world with the attributes of stock's world; `random` is a copy of the world's generator."""

    area = (AREA, AREA)

    def __init__(self, world: World) -> None:
        self._materials = world.materials
        self.objects = [
            SimpleNamespace(pos=np.array((thing.x, thing.y)), texture=_texture_name(thing))
            for thing in world.things
        ]
        self.daylight = world.daylight
        twister = world.bits.state["state"]
        self.random = np.random.RandomState(bits_at(twister["key"], twister["pos"]))

    def __getitem__(self, pos: tuple[int, int]) -> tuple[str, None]:
        return MATERIAL_NAMES[self._materials[cell_at(int(pos[0]), int(pos[1]))]], None


def _texture_name(thing: Thing) -> str:
    if isinstance(thing, Player):
        return "player-sleep" if thing.sleeping else f"player-{SIDES[thing.facing]}"
    if isinstance(thing, Arrow):
        return f"arrow-{SIDES[thing.facing]}"
    return {"ripe-plant": "plant-ripe"}.get(thing.name, thing.name)


def draw(world: World, player: Player, width: int, height: int) -> Picture:
    """Draw the game as stock's `render((width, height))` does, as an RGB picture [height, width, 3].

    The middle of the picture consists of 9x9 cells of equal size: 9x7 of the map above 9x2 of the inventory.
    The rest is black. Raises ValueError if a side is shorter than 9 pixels.
    """
    if min(width, height) < COLUMNS:
        raise ValueError(f"a picture needs at least {COLUMNS}x{COLUMNS} pixels, got {width}x{height}")
    grid = np.array((COLUMNS, ROWS + ITEM_ROWS))
    size = np.array((width, height))
    unit = size // grid
    map_view = _MapView(_World(world), _textures(), (COLUMNS, ROWS))
    item_view = stock.ItemView(_textures(), (COLUMNS, ITEM_ROWS))
    viewer = SimpleNamespace(pos=(player.x, player.y), sleeping=player.sleeping)
    picture = np.concatenate([map_view(viewer, unit), item_view(player.inventory, unit)], 1)
    canvas = np.zeros((width, height, 3), np.uint8)
    left, top = (size - unit * grid) // 2
    canvas[left : left + picture.shape[0], top : top + picture.shape[1]] = picture
    return canvas.transpose((1, 0, 2))
