"""The thirteen noise layers of a Crafter world, for any seed.

A layer equals `opensimplex.OpenSimplex(seed).noise3` to the last bit at every cell, and is computed about 300
times faster. Each process computes the geometry of the 64x64 points once (`geometry`), because the seed only
changes which gradient each lattice point has.

Names: N = 4096 cells, ordered by x, then y, as in stock. P is the number of distinct lattice points. K is the
number of slots of the sum that lattice.py defines.
"""

import functools
import threading
from dataclasses import dataclass

import numpy as np

from task_app.environments.crafter.grid import AREA
from task_app.environments.crafter.lattice import Floats, Ints, lattice_around

# The z coordinate and the size of each layer, as in stock; _layer_points computes x and y.
LAYERS: dict[str, tuple[float, float]] = {
    "start": (8, 3),
    "water_15": (3, 15),
    "water_5": (3, 5),
    "mountain_15": (0, 15),
    "mountain_5": (0, 5),
    "cave": (6, 7),
    "tunnel_x": (7, 3),
    "tunnel_y": (7, 3),
    "coal": (1, 8),
    "iron": (2, 6),
    "lava": (6, 5),
    "sand": (4, 9),
    "tree": (5, 7),
}
NORM = 103
# Without this lock, each thread that makes one of a process's first worlds would compute the geometry.
_ONE_AT_A_TIME = threading.Lock()
MULTIPLIER, INCREMENT = 6364136223846793005, 1442695040888963407
WORD = 1 << 64

# Gradients of opensimplex 0.4: permutations of (11, 4, 4) with all signs, in the package's order.
_SIGNS = [(-1, 1, 1), (1, 1, 1), (-1, -1, 1), (1, -1, 1), (-1, 1, -1), (1, 1, -1), (-1, -1, -1), (1, -1, -1)]
_SHAPES = [(11, 4, 4), (4, 11, 4), (4, 4, 11)]
GRADIENTS = np.array(
    [[s * g for s, g in zip(signs, shape, strict=True)] for signs in _SIGNS for shape in _SHAPES], np.float64
)


@dataclass(frozen=True, slots=True)
class Layer:
    """The slots of a layer: index, offset and weight of each lattice point that its noise sums over.

    Unused slots have weight 0. `point_KN` are indices into the P lattice points of `Geometry`.
    """

    point_KN: Ints
    dx_KN: Floats
    dy_KN: Floats
    dz_KN: Floats
    weight_KN: Floats


@dataclass(frozen=True, slots=True)
class Geometry:
    """All layers, and the coordinates x, y, z [P] of their distinct lattice points, modulo 256."""

    x_P: Ints
    y_P: Ints
    z_P: Ints
    layers: dict[str, Layer]


def noise_layers(seed: int) -> dict[str, Floats]:
    """Compute the noise [N] of every layer at every cell.

    Values lie in about -0.9 .. 0.9; the caller weights and adds the layers. The seed is the one that stock
    passes to OpenSimplex, in 0 .. 2**31 - 2.
    """
    with _ONE_AT_A_TIME:
        shape = geometry()
    perm = permutation(seed)
    point_P = perm[(perm[(perm[shape.x_P] + shape.y_P) & 255] + shape.z_P) & 255] % len(GRADIENTS)
    gx_P, gy_P, gz_P = (np.ascontiguousarray(GRADIENTS[point_P, axis]) for axis in range(3))
    slots = max(layer.weight_KN.shape[0] for layer in shape.layers.values())
    sums, part = np.empty((slots, AREA * AREA)), np.empty((slots, AREA * AREA))
    return {name: _layer_noise(layer, (gx_P, gy_P, gz_P), sums, part) for name, layer in shape.layers.items()}


def _layer_noise(
    layer: Layer, gradients: tuple[Floats, Floats, Floats], sums: Floats, part: Floats
) -> Floats:
    """Compute the noise of one layer, sum_k weight_k * ((gx dx + gy dy) + gz dz) / 103, in this order.

    (gx, gy, gz) is the gradient at lattice point k and (dx, dy, dz) the offset from lattice point k. `sums`
    and `part` are buffers for intermediate results.
    """
    gx_P, gy_P, gz_P = gradients
    slots = layer.weight_KN.shape[0]
    sums_KN, part_KN = sums[:slots], part[:slots]
    np.take(gx_P, layer.point_KN, out=sums_KN, mode="clip")  # no index is clipped; "raise" would copy
    sums_KN *= layer.dx_KN
    for gradient_P, offset_KN in ((gy_P, layer.dy_KN), (gz_P, layer.dz_KN)):
        np.take(gradient_P, layer.point_KN, out=part_KN, mode="clip")
        part_KN *= offset_KN
        sums_KN += part_KN
    sums_KN *= layer.weight_KN
    value_N: Floats = sums_KN[0].copy()
    for addend_N in sums_KN[1:]:
        value_N += addend_N
    value_N /= NORM
    return value_N


def permutation(seed: int) -> Ints:
    """Return the numbers 0 .. 255 in an order that depends on the seed, as an array [256].

    They are shuffled by OpenSimplex's own 64-bit linear congruential generator.
    """
    for _ in range(3):
        seed = (seed * MULTIPLIER + INCREMENT) % WORD
    source = list(range(256))
    perm = [0] * 256
    for i in range(255, -1, -1):
        seed = (seed * MULTIPLIER + INCREMENT) % WORD
        signed = seed - WORD if seed >= WORD // 2 else seed
        r = (signed + 31) % (i + 1)
        perm[i] = source[r]
        source[r] = source[i]
    return np.array(perm, np.int64)


@functools.lru_cache(maxsize=1)
def geometry() -> Geometry:
    """Compute the part of all layers that does not depend on the seed, once per process (0.15 s)."""
    points = [_layer_points(name) for name in LAYERS]
    x_LN, y_LN, z_LN = (np.concatenate([p[axis] for p in points]) for axis in range(3))
    lattice = lattice_around(x_LN, y_LN, z_LN)
    # Move slots of weight 0 to the end; most points need fewer than 8.
    order_K = np.argsort(lattice.weight_KN == 0, axis=0, kind="stable")
    weight_K = np.take_along_axis(lattice.weight_KN, order_K, 0)
    offset_K3 = np.take_along_axis(lattice.offset_KN3, order_K[..., None], 0)
    corner_K3 = np.take_along_axis(lattice.corners_KN3, order_K[..., None], 0) & 255
    key_K = corner_K3[..., 0] | corner_K3[..., 1] << 8 | corner_K3[..., 2] << 16
    keys_P, point_K = np.unique(key_K, return_inverse=True)
    point_K = point_K.reshape(key_K.shape)
    layers = {}
    for number, name in enumerate(LAYERS):
        cells = slice(number * AREA * AREA, (number + 1) * AREA * AREA)
        layers[name] = _make_layer(point_K[:, cells], offset_K3[:, cells], weight_K[:, cells])
    return Geometry(keys_P & 255, keys_P >> 8 & 255, keys_P >> 16, layers)


def _make_layer(point_KN: Ints, offset_KN3: Floats, weight_KN: Floats) -> Layer:
    """Make a layer with contiguous arrays, without the slots that no point of the layer uses."""
    slots = int((weight_KN > 0).sum(0).max())
    dx_KN, dy_KN, dz_KN = (np.ascontiguousarray(offset_KN3[:slots, :, axis]) for axis in range(3))
    point_KN = np.ascontiguousarray(point_KN[:slots], np.int64)
    return Layer(point_KN, dx_KN, dy_KN, dz_KN, np.ascontiguousarray(weight_KN[:slots]))


def _layer_points(name: str) -> tuple[Floats, Floats, Floats]:
    """Return the coordinates x, y, z [N] at which the noise of a layer is evaluated.

    Divisions follow stock's order, so that they round as in stock: for a tunnel layer, this function first
    computes 2 * x and y / 5 (or x / 5 and 2 * y), and then divides both by the layer's size.
    """
    z, size = LAYERS[name]
    x_N = np.repeat(np.arange(AREA, dtype=np.float64), AREA)
    y_N = np.tile(np.arange(AREA, dtype=np.float64), AREA)
    if name == "tunnel_x":
        x_N, y_N = 2 * x_N, y_N / 5
    elif name == "tunnel_y":
        x_N, y_N = x_N / 5, 2 * y_N
    return x_N / size, y_N / size, np.full(AREA * AREA, float(z))
