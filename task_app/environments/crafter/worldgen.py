"""Generates the same world as stock crafter's `worldgen`, with the same random draws, in milliseconds.

Everything that needs no random number is computed for all cells at once. Then the cells that need random
numbers are visited in stock's order (by x, then y). Their numbers are drawn in one block. At the end the
generator is set back, as if only the numbers that were used had been drawn.

Names: N = 4096 cells, ordered by x, then y.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from task_app.environments.crafter.grid import AREA, CENTER, MATERIAL_IDS, PAD, STRIDE, material_flags
from task_app.environments.crafter.lattice import Bools, Floats
from task_app.environments.crafter.noise import noise_layers
from task_app.environments.crafter.objects import Cow, Skeleton, Zombie
from task_app.environments.crafter.player import Player
from task_app.environments.crafter.rules import RULES
from task_app.environments.crafter.world import Thing, World, seeded_bits

Materials = npt.NDArray[np.uint8]

GRASS, PATH, TREE = MATERIAL_IDS["grass"], MATERIAL_IDS["path"], MATERIAL_IDS["tree"]
COAL, IRON, DIAMOND = MATERIAL_IDS["coal"], MATERIAL_IDS["iron"], MATERIAL_IDS["diamond"]
# One bit for each thing that a random draw may put on a cell. The draws for a cell follow this order, until
# one succeeds.
MAY_BE_COAL, MAY_BE_IRON, MAY_BE_DIAMOND, MAY_BE_TREE = 1, 2, 4, 8
MAY_HOLD_COW, MAY_HOLD_ZOMBIE, MAY_HOLD_SKELETON = 1, 2, 4
BIT_COUNT = np.array([bin(bits).count("1") for bits in range(16)])


@dataclass(frozen=True, slots=True)
class Terrain:
    """The terrain of all cells before random numbers are drawn.

    `material_N` is the material of each cell, and `tunnel_N` whether the cell is a tunnel. `chances_N`
    combines bits MAY_BE_...: the materials that a random draw may still give to the cell.
    """

    material_N: Materials
    chances_N: Materials
    tunnel_N: Bools


def generate_world(seed: int, player: Player) -> World:
    """Generate the world that stock generates after `world.reset(seed)`.

    The first thing in the world is the player, who stands at the centre. Stock derives this seed from the
    environment's seed and the episode number.
    """
    bits = seeded_bits(seed)
    random = np.random.RandomState(bits)
    terrain = _make_terrain(random.randint(0, 2**31 - 1))
    _draw_materials(random, terrain)
    padded = np.zeros((STRIDE, STRIDE), np.uint8)
    padded[PAD : PAD + AREA, PAD : PAD + AREA] = terrain.material_N.reshape(AREA, AREA).T
    world = World(bytearray(padded.tobytes()), bits)
    world.add(player)
    for thing in _draw_creatures(random, terrain):
        world.add(thing)
    return world


@functools.lru_cache(maxsize=1)
def _distance_to_start() -> Floats:
    x_N = np.repeat(np.arange(AREA), AREA)
    y_N = np.tile(np.arange(AREA), AREA)
    distance_N: Floats = np.sqrt((x_N - CENTER) ** 2 + (y_N - CENTER) ** 2)
    return distance_N


def _make_terrain(seed: int) -> Terrain:
    """Compute the part of stock's `_set_material` that needs no random numbers, for all cells.

    The order of operations is stock's, so that results are equal to the last bit.
    """
    noise = noise_layers(seed)
    start_N = 4 - _distance_to_start()
    start_N += 2 * noise["start"]
    start_N = 1 / (1 + np.exp(-start_N))
    water_N = noise["water_15"] + 0.15 * noise["water_5"] + 0.1
    water_N -= 2 * start_N
    mountain_N = (noise["mountain_15"] + 0.3 * noise["mountain_5"]) / (1 + 0.3)
    mountain_N -= 4 * start_N + 0.3 * water_N

    wild_N = ~(start_N > 0.5)
    rock_N = wild_N & (mountain_N > 0.15)
    cave_N = (noise["cave"] > 0.15) & (mountain_N > 0.3)
    tunnel_N = rock_N & ~cave_N & ((noise["tunnel_x"] > 0.4) | (noise["tunnel_y"] > 0.4))
    solid_N = rock_N & ~cave_N & ~tunnel_N
    low_N = wild_N & ~rock_N
    sand_N = low_N & (water_N > 0.25) & (water_N <= 0.35) & (noise["sand"] > -0.2)
    lake_N = low_N & ~sand_N & (water_N > 0.3)

    material_N = np.full(AREA * AREA, GRASS, np.uint8)
    material_N[sand_N] = MATERIAL_IDS["sand"]
    material_N[lake_N] = MATERIAL_IDS["water"]
    material_N[rock_N] = PATH
    material_N[solid_N] = MATERIAL_IDS["stone"]
    material_N[solid_N & (mountain_N > 0.3) & (noise["lava"] > 0.35)] = MATERIAL_IDS["lava"]
    chances_N = MAY_BE_COAL * (noise["coal"] > 0) + MAY_BE_IRON * (noise["iron"] > 0.4)
    chances_N = solid_N * (chances_N + MAY_BE_DIAMOND * (mountain_N > 0.18))
    chances_N += MAY_BE_TREE * (low_N & ~sand_N & ~lake_N & (noise["tree"] > 0))
    return Terrain(material_N, chances_N.astype(np.uint8), tunnel_N)


@contextmanager
def _draws(random: np.random.RandomState, most: int) -> Iterator[Callable[[], float]]:
    """Yield a function that draws a number in [0, 1) at each call, at most `most` times.

    Afterwards the generator is set as if only the numbers that were used had been drawn.
    """
    before = random.get_state()
    rest: Iterator[float] = iter(random.random_sample(most).tolist())
    yield rest.__next__
    random.set_state(before)
    random.random_sample(most - sum(1 for _ in rest))


def _draw_materials(random: np.random.RandomState, terrain: Terrain) -> None:
    cells_N = np.flatnonzero(terrain.chances_N)
    chances = terrain.chances_N[cells_N]
    material_N = terrain.material_N
    with _draws(random, int(BIT_COUNT[chances].sum())) as draw:
        for cell, chance in zip(cells_N.tolist(), chances.tolist(), strict=True):
            if chance == MAY_BE_TREE:
                if draw() > 0.8:
                    material_N[cell] = TREE
            elif chance & MAY_BE_COAL and draw() > 0.85:
                material_N[cell] = COAL
            elif chance & MAY_BE_IRON and draw() > 0.75:
                material_N[cell] = IRON
            elif chance & MAY_BE_DIAMOND and draw() > 0.994:
                material_N[cell] = DIAMOND


def _draw_creatures(random: np.random.RandomState, terrain: Terrain) -> list[Thing]:
    """Draw where cows, zombies and skeletons stand; return them in order of creation."""
    material_N, distance_N = terrain.material_N, _distance_to_start()
    walkable_N = np.frombuffer(material_flags(*RULES.walkable), np.uint8)[material_N]
    chances_N = MAY_HOLD_COW * ((distance_N > 3) & (material_N == GRASS))
    chances_N += MAY_HOLD_ZOMBIE * (distance_N > 10)
    chances_N += MAY_HOLD_SKELETON * (terrain.tunnel_N & (material_N == PATH))
    chances_N *= walkable_N
    cells_N = np.flatnonzero(chances_N)
    chances = chances_N[cells_N]
    things: list[Thing] = []
    with _draws(random, int(BIT_COUNT[chances].sum())) as draw:
        for cell, chance in zip(cells_N.tolist(), chances.tolist(), strict=True):
            if chance & MAY_HOLD_COW and draw() > 0.985:
                things.append(Cow(*divmod(cell, AREA)))
            elif chance & MAY_HOLD_ZOMBIE and draw() > 0.993:
                things.append(Zombie(*divmod(cell, AREA)))
            elif chance & MAY_HOLD_SKELETON and draw() > 0.95:
                things.append(Skeleton(*divmod(cell, AREA)))
    return things
