"""Numbers for the cells, chunks and materials of the 64x64 world.

A cell is the integer `(y + PAD) * STRIDE + x + PAD`. A border of PAD cells surrounds the world. It has the
material 0 ('void') and contains no creature, so code that looks at neighbouring cells need not test for the
edge of the world. PAD is half the width of the view, rounded down.
"""

from task_app.environments.crafter.rules import MATERIALS, RULES

AREA = 64
PAD = 4
STRIDE = AREA + 2 * PAD
CELLS = STRIDE * STRIDE
CENTER = AREA // 2

# In the order of stock crafter's `all_dirs`, because random numbers are indices of this list.
FACINGS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (+1, 0), "up": (0, -1), "down": (0, +1)}
DIRECTIONS = tuple(FACINGS.values())
SIDES = {vector: name for name, vector in FACINGS.items()}

VOID = "void"
MATERIAL_NAMES: tuple[str, ...] = (VOID, *MATERIALS)
MATERIAL_IDS: dict[str, int] = {name: number for number, name in enumerate(MATERIAL_NAMES)}
MATERIAL_COUNT = len(MATERIAL_NAMES)

CHUNK_SIZE = 12
CHUNKS_PER_SIDE = -(-AREA // CHUNK_SIZE)  # 6; the last chunk of a row is only 4 cells wide
CHUNK_COUNT = CHUNKS_PER_SIDE**2


def cell_at(x: int, y: int) -> int:
    """Return the index of the cell at column x and row y, which may lie up to PAD cells outside the world."""
    return (y + PAD) * STRIDE + x + PAD


def material_flags(*names: str) -> bytes:
    """Return [MATERIAL_COUNT] bytes: 1 for each named material, 0 for the others.

    Indexing these bytes is the fastest test whether a material is among the named ones.
    """
    return bytes(name in names for name in MATERIAL_NAMES)


def chunk_bounds(chunk: int) -> tuple[int, int, int, int]:
    """Return (xmin, xmax, ymin, ymax) of a chunk; the upper ends are exclusive, as in stock."""
    column, row = divmod(chunk, CHUNKS_PER_SIDE)
    xmin, ymin = column * CHUNK_SIZE, row * CHUNK_SIZE
    return xmin, min(xmin + CHUNK_SIZE, AREA), ymin, min(ymin + CHUNK_SIZE, AREA)


# Cells of each chunk, ordered by x, then y. To spawn a creature, stock draws a random index into the chunk's
# cells of the right material, in this order.
CHUNK_CELLS: tuple[tuple[int, ...], ...] = tuple(
    tuple(cell_at(x, y) for x in range(xmin, xmax) for y in range(ymin, ymax))
    for xmin, xmax, ymin, ymax in map(chunk_bounds, range(CHUNK_COUNT))
)
_chunk_by_cell = {cell: chunk for chunk, cells in enumerate(CHUNK_CELLS) for cell in cells}
CHUNK_OF: bytes = bytes(_chunk_by_cell.get(cell, 0) for cell in range(CELLS))

WALKABLE = material_flags(*RULES.walkable)
PLAYER_WALKABLE = material_flags(*RULES.walkable, "lava")
ARROW_WALKABLE = material_flags(*RULES.walkable, "water", "lava")
