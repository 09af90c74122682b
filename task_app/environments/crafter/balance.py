"""Spawns and despawns creatures every tenth step, chunk by chunk (a chunk is 12x12 cells of the world).

The published package crafter ("stock") examines the cells and creatures of every chunk. This module reads
counters instead, which show the few chunks where a creature can spawn or despawn. Stock draws the creature to
despawn from a set. The order of a set depends on memory addresses, so it differs between processes. This
engine and the reference implementation in the tests draw from a list, which is in *order of creation*.
"""

from collections.abc import Callable
from dataclasses import dataclass

from task_app.environments.crafter.grid import (
    CHUNK_CELLS,
    CHUNK_OF,
    MATERIAL_COUNT,
    MATERIAL_IDS,
    PAD,
    STRIDE,
)
from task_app.environments.crafter.objects import Cow, Skeleton, Zombie
from task_app.environments.crafter.player import Player
from task_app.environments.crafter.world import COW, KIND_COUNT, SKELETON, ZOMBIE, Thing, World

GRASS, PATH = MATERIAL_IDS["grass"], MATERIAL_IDS["path"]


@dataclass(frozen=True, slots=True)
class Habitat:
    """The rules by which one kind of creature spawns and despawns.

    A creature spawns only if it is at least `spawn_distance` cells away from the player, and despawns only if
    it is at least `despawn_distance` cells away. `spawn_chance` and `despawn_chance` are probabilities per
    chunk and call of `balance`.
    """

    kind: int
    make: Callable[[int, int], Thing]
    material: int
    spawn_distance: int
    despawn_distance: int
    spawn_chance: float
    despawn_chance: float


ZOMBIES = Habitat(ZOMBIE, Zombie, GRASS, 6, 0, 0.3, 0.4)
SKELETONS = Habitat(SKELETON, Skeleton, PATH, 7, 7, 0.1, 0.1)
COWS = Habitat(COW, Cow, GRASS, 5, 5, 0.01, 0.1)


def balance(world: World, player: Player) -> None:
    """Spawn and despawn creatures in every chunk that has ever contained an object.

    Chunks are processed in the order in which they first contained an object.
    """
    most_zombies = int(3.5 - 3 * world.daylight)
    most_cows = int(1.5 + world.daylight)
    population, counts = world.population, world.material_counts
    for chunk in list(world.chunk_order):
        kinds, ground = chunk * KIND_COUNT, chunk * MATERIAL_COUNT
        grass = counts[ground + GRASS]
        fewest = most_zombies if grass >= 50 else 0
        if not fewest <= population[kinds + ZOMBIE] <= most_zombies:
            _adjust(world, player, chunk, ZOMBIES, fewest)
        fewest = 1 if counts[ground + PATH] >= 6 else 0
        if not fewest <= population[kinds + SKELETON] <= 2:
            _adjust(world, player, chunk, SKELETONS, fewest)
        fewest = 1 if grass >= 30 else 0
        if not fewest <= population[kinds + COW] <= most_cows:
            _adjust(world, player, chunk, COWS, fewest)


def _adjust(world: World, player: Player, chunk: int, habitat: Habitat, fewest: int) -> None:
    """Spawn a creature if the chunk has fewer than `fewest`; otherwise it has too many, so despawn one.

    `habitat` states with which probability, and how far from the player, a creature spawns or despawns.
    """
    kind = habitat.kind
    if world.population[chunk * KIND_COUNT + kind] < fewest:
        if world.uniform() < habitat.spawn_chance:
            cells = [cell for cell in CHUNK_CELLS[chunk] if world.materials[cell] == habitat.material]
            cell = cells[world.random.randint(0, len(cells))]
            y, x = divmod(cell, STRIDE)
            x, y = x - PAD, y - PAD
            if world.at[cell] is None and abs(x - player.x) + abs(y - player.y) >= habitat.spawn_distance:
                world.add(habitat.make(x, y))
    elif world.uniform() < habitat.despawn_chance:
        creatures = [thing for thing in world.things if thing.kind == kind and CHUNK_OF[thing.cell] == chunk]
        creature = creatures[world.random.randint(0, len(creatures))]
        if abs(creature.x - player.x) + abs(creature.y - player.y) >= habitat.despawn_distance:
            world.remove(creature)
