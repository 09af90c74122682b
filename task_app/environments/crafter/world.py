"""The state of a world in integers: materials, live things, chunks, and the random generator.

A `World` has the same state as stock crafter's `engine.World`, and makes the same random draws. It is faster,
because it calls no numpy function per cell.
"""

import numpy as np

from task_app.environments.crafter.grid import CELLS, CHUNK_COUNT, CHUNK_OF, MATERIAL_COUNT, STRIDE, cell_at

KINDS: tuple[str, ...] = ("player", "cow", "zombie", "skeleton", "arrow", "plant")
PLAYER, COW, ZOMBIE, SKELETON, ARROW, PLANT = range(len(KINDS))
KIND_COUNT = len(KINDS)


class Thing:
    """Anything that stands on a cell: the player, a creature, an arrow or a plant.

    Attributes:
        x, y: column and row, 0 .. 63, y growing downwards; `cell` is the index of the same cell.
        removed: whether the thing was removed from the world; this can happen during the thing's own update.
    """

    __slots__ = ("cell", "removed", "x", "y")
    kind: int

    def __init__(self, x: int, y: int) -> None:
        self.x, self.y = x, y
        self.cell = cell_at(x, y)
        self.removed = False

    @property
    def name(self) -> str:
        return KINDS[self.kind]

    def hurt(self, damage: int) -> None:
        """Reduce the thing's health by `damage` points, but not below 0."""
        raise NotImplementedError

    def try_move(self, world: "World", direction: tuple[int, int], walkable: bytes) -> bool:
        """Step to the neighbouring cell in `direction` if it is free; return whether it was free.

        A removed thing does not move. For a free cell the result is still True, as in stock, because the
        next random draws of a skeleton depend on the result.
        """
        dx, dy = direction
        target = self.cell + dx + dy * STRIDE
        if world.at[target] is not None or not walkable[world.materials[target]]:
            return False
        if not self.removed:
            world.move(self, target)
            self.x += dx
            self.y += dy
        return True


class World:
    """The state of one world.

    Attributes:
        random: the generator; its 624 words and position are part of the state.
        uniform: draws a double in [0, 1), like `random.uniform()`, but twelve times as fast.
        word: draws a raw 32-bit word; `word() & 3` equals `random.randint(0, 4)`.
        materials: [CELLS] material numbers; change them with `set_material` only.
        at: [CELLS] the thing on each cell, or None.
        things: live things in order of creation; the player is the first.
        chunk_order: chunks that have ever contained a thing, in the order of their first thing. Creatures
            spawn and despawn only in these chunks.
        material_counts: [CHUNK_COUNT * MATERIAL_COUNT] number of cells of each material in each chunk.
        population: [CHUNK_COUNT * KIND_COUNT] number of things of each kind in each chunk.
        daylight: 1 at noon, 0 at midnight; below 0.5 the picture is dark and noisy.
    """

    def __init__(self, materials: bytearray, bits: np.random.MT19937) -> None:
        """Make a world without things; `materials` is [CELLS], with material 0 in the border."""
        self.draw_from(bits)
        self.materials = materials
        # The cells of the border are counted as void of chunk 0; this count is not used.
        keys = np.frombuffer(CHUNK_OF, np.uint8).astype(np.int64) * MATERIAL_COUNT
        keys += np.frombuffer(materials, np.uint8)
        counts: list[int] = np.bincount(keys, minlength=CHUNK_COUNT * MATERIAL_COUNT).tolist()
        self.material_counts = counts
        self.at: list[Thing | None] = [None] * CELLS
        self.things: list[Thing] = []
        self.chunk_order: dict[int, None] = {}
        self.population = [0] * (CHUNK_COUNT * KIND_COUNT)
        self.daylight = 0.0

    def draw_from(self, bits: np.random.MT19937) -> None:
        """Draw all further random numbers from this bit generator."""
        self.bits = bits
        self.random = np.random.RandomState(bits)
        self.uniform = self.random.random_sample
        self.word = bits.random_raw

    def set_material(self, cell: int, material: int) -> None:
        """Change the ground of a cell inside the world."""
        base = CHUNK_OF[cell] * MATERIAL_COUNT
        self.material_counts[base + self.materials[cell]] -= 1
        self.material_counts[base + material] += 1
        self.materials[cell] = material

    def add(self, thing: Thing) -> None:
        """Put a new thing on its cell, which must be empty."""
        assert self.at[thing.cell] is None
        self.at[thing.cell] = thing
        self.things.append(thing)
        chunk = CHUNK_OF[thing.cell]
        self.chunk_order.setdefault(chunk)
        self.population[chunk * KIND_COUNT + thing.kind] += 1

    def remove(self, thing: Thing) -> None:
        """Remove a thing from the world; a second call does nothing."""
        if thing.removed:
            return
        self.at[thing.cell] = None
        self.things.remove(thing)
        self.population[CHUNK_OF[thing.cell] * KIND_COUNT + thing.kind] -= 1
        thing.removed = True

    def move(self, thing: Thing, target: int) -> None:
        """Move a live thing to the empty cell `target`; the caller must update the thing's x and y."""
        source = thing.cell
        self.at[target] = thing
        self.at[source] = None
        thing.cell = target
        old, new = CHUNK_OF[source], CHUNK_OF[target]
        if old != new:
            self.population[old * KIND_COUNT + thing.kind] -= 1
            self.population[new * KIND_COUNT + thing.kind] += 1
            self.chunk_order.setdefault(new)


def seeded_bits(seed: int) -> np.random.MT19937:
    """Make the bit generator of `numpy.random.RandomState(seed)`, using only public functions of numpy."""
    bits = np.random.MT19937(0)
    np.random.RandomState(bits).seed(seed)
    return bits
