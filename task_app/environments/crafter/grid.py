"""The 64x64 world as flat indices: cells with a border, chunks, materials by number.

A cell is one integer, `(y + PAD) * STRIDE + x + PAD`. The border of PAD cells on each side holds the material
0 ('void') and no creature, so that looking around needs no test for the edge of the world; PAD is half the
width of a player's view.
"""

from task_app.environments.crafter.rules import MATERIALS, RULES

AREA = 64
PAD = 4
STRIDE = AREA + 2 * PAD
CELLS = STRIDE * STRIDE
CENTER = AREA // 2

# In the order of stock's `all_dirs`, which a random number indexes.
FACINGS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (+1, 0), "up": (0, -1), "down": (0, +1)}
DIRECTIONS = tuple(FACINGS.values())
SIDES = {vector: name for name, vector in FACINGS.items()}

VOID = "void"
MATERIAL_NAMES: tuple[str, ...] = (VOID, *MATERIALS)
MATERIAL_IDS: dict[str, int] = {name: number for number, name in enumerate(MATERIAL_NAMES)}
MATERIAL_COUNT = len(MATERIAL_NAMES)

CHUNK_SIZE = 12
CHUNKS_PER_SIDE = -(-AREA // CHUNK_SIZE)  # 6; the last one of a row is only 4 cells wide
CHUNK_COUNT = CHUNKS_PER_SIDE**2


def cell_at(x: int, y: int) -> int:
    """Index of the cell at column x, row y, which may lie up to PAD cells outside the world."""
    return (y + PAD) * STRIDE + x + PAD


def material_flags(*names: str) -> bytes:
    """[MATERIAL_COUNT] 1 for the named materials, else 0: the fastest membership test."""
    return bytes(name in names for name in MATERIAL_NAMES)


def chunk_bounds(chunk: int) -> tuple[int, int, int, int]:
    """(xmin, xmax, ymin, ymax) of a chunk in stock's form; the upper ends are exclusive."""
    column, row = divmod(chunk, CHUNKS_PER_SIDE)
    xmin, ymin = column * CHUNK_SIZE, row * CHUNK_SIZE
    return xmin, min(xmin + CHUNK_SIZE, AREA), ymin, min(ymin + CHUNK_SIZE, AREA)


# Cells of each chunk, x before y: the order in which stock numbers free cells to draw one for a spawn.
CHUNK_CELLS: tuple[tuple[int, ...], ...] = tuple(
    tuple(cell_at(x, y) for x in range(xmin, xmax) for y in range(ymin, ymax))
    for xmin, xmax, ymin, ymax in map(chunk_bounds, range(CHUNK_COUNT))
)
_chunk_by_cell = {cell: chunk for chunk, cells in enumerate(CHUNK_CELLS) for cell in cells}
CHUNK_OF: bytes = bytes(_chunk_by_cell.get(cell, 0) for cell in range(CELLS))

WALKABLE = material_flags(*RULES.walkable)
PLAYER_WALKABLE = material_flags(*RULES.walkable, "lava")
ARROW_WALKABLE = material_flags(*RULES.walkable, "water", "lava")
