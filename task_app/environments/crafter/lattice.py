"""The part of three-dimensional OpenSimplex noise that does not depend on the seed, for many points at once.

The noise at a point is a sum over the lattice points k around it,

    noise = sum_k  weight_k * (g_k . d_k) / 103,     weight_k = max(0, 2 - |d_k|^2)^4

where g_k is the gradient at lattice point k, and d_k is the offset of the point from lattice point k. Only
the gradients depend on the seed, so each process computes lattice points, offsets and weights once. The
operations and their order are those of the package `opensimplex` (`_noise3`), so that results are equal to
the last bit; tests compare them.

Names: N is the number of points. K = 8 is the number of slots for lattice points per point; no point needs
more. o is the offset of a lattice point from the origin of the lattice cell, in integers.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

STRETCH = -1.0 / 6
SQUISH = 1.0 / 3

Offset = tuple[int, int, int]

# Lattice offsets in the order of the sum, for the three regions of a lattice cell: the tetrahedra at (0,0,0)
# and (1,1,1), and the octahedron between them. The sum then continues with two extra lattice points, which
# depend on where in the region the point lies.
NEAR_CORNERS: tuple[Offset, ...] = ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))
FAR_CORNERS: tuple[Offset, ...] = ((1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1))
MIDDLE_CORNERS: tuple[Offset, ...] = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1))
SLOTS = 8

# Maps c, a set of axes as bits (x = 1, y = 2, z = 4), to the two extra points.
NEAR_EXTRAS: dict[int, tuple[Offset, Offset]] = {  # if (0,0,0) is one of the two closest, c is the other
    1: ((1, -1, 0), (1, 0, -1)),
    2: ((-1, 1, 0), (0, 1, -1)),
    4: ((-1, 0, 1), (0, -1, 1)),
    3: ((1, 1, 0), (1, 1, -1)),  # else c joins the two closest corners
    5: ((1, 0, 1), (1, -1, 1)),
    6: ((0, 1, 1), (-1, 1, 1)),
}
FAR_EXTRAS: dict[int, tuple[Offset, Offset]] = {
    3: ((2, 1, 0), (1, 2, 0)),  # likewise for (1,1,1)
    5: ((2, 0, 1), (1, 0, 2)),
    6: ((0, 2, 1), (0, 1, 2)),
    1: ((1, 0, 0), (2, 0, 0)),  # else the axis shared by the two closest corners
    2: ((0, 1, 0), (0, 2, 0)),
    4: ((0, 0, 1), (0, 0, 2)),
}
ALONG: dict[int, Offset] = {1: (2, 0, 0), 2: (0, 2, 0), 4: (0, 0, 2)}
ACROSS: dict[int, Offset] = {6: (-1, 1, 1), 5: (1, -1, 1), 3: (1, 1, -1)}


@dataclass(frozen=True, slots=True)
class Lattice:
    """The lattice points that N points sum over, without their gradients; unused slots have weight 0."""

    corners_KN3: Ints
    """[K, N, 3] coordinates of the lattice points, in the order of the sum."""
    offset_KN3: Floats
    """[K, N, 3] offset of the point from each lattice point."""
    weight_KN: Floats
    """[K, N] weight of each lattice point; 0.0 if the lattice point is too far away."""


def lattice_around(x_N: Floats, y_N: Floats, z_N: Floats) -> Lattice:
    """Find the lattice points that contribute to the noise at the points (x, y, z)."""
    stretch = (x_N + y_N + z_N) * STRETCH
    stretched = [axis + stretch for axis in (x_N, y_N, z_N)]
    base = [np.floor(axis) for axis in stretched]
    squish = (base[0] + base[1] + base[2]) * SQUISH
    d0_N3 = np.stack([p - (b + squish) for p, b in zip((x_N, y_N, z_N), base, strict=True)], axis=-1)
    inside = [axis - b for axis, b in zip(stretched, base, strict=True)]
    o_KN3, late_KN3, used_KN = _slots(*inside)
    # The package computes d0 - o - m * SQUISH, where m is the sum of o's coordinates. In a few cases it
    # subtracts a part of o last, which rounds differently.
    squishes_KN1 = (o_KN3.sum(-1, keepdims=True) * SQUISH).astype(np.float64)
    offset_KN3 = d0_N3 - (o_KN3 - late_KN3) - squishes_KN1 - late_KN3
    dx, dy, dz = offset_KN3[..., 0], offset_KN3[..., 1], offset_KN3[..., 2]
    reach_KN = 2 - dx * dx - dy * dy - dz * dz
    reach_KN = np.where(used_KN & (reach_KN > 0), reach_KN, 0.0)
    reach_KN *= reach_KN
    base_N3 = np.stack(base, axis=-1).astype(np.int64)
    return Lattice(base_N3 + o_KN3, offset_KN3, reach_KN * reach_KN)


def _slots(x_N: Floats, y_N: Floats, z_N: Floats) -> tuple[Ints, Ints, Bools]:
    """Return the slots of points that lie at (x, y, z) inside their lattice cell.

    Returns three arrays: the offset o of each lattice point [K, N, 3], the part of o that `lattice_around`
    subtracts last [K, N, 3], and whether the slot is used [K, N].
    """
    total = x_N + y_N + z_N
    near, far = total <= 1, total >= 2
    tetrahedra_N = np.where(near, _near_case(x_N, y_N, z_N, total), _far_case(x_N, y_N, z_N, total))
    case_N = np.where(near | far, tetrahedra_N, _middle_case(x_N, y_N, z_N))
    o_CK3, late_CK3, used_CK = _case_tables()
    return (
        np.moveaxis(o_CK3[case_N], 1, 0),
        np.moveaxis(late_CK3[case_N], 1, 0),
        np.moveaxis(used_CK[case_N], 1, 0),
    )


# A case number stands for a region and its two extra points. Near: c. Far: 8 + c. Middle: 16 + 8 * e0 + e1,
# where e0 and e1 are the indices of the extra points in MIDDLE_FIRST and MIDDLE_SECOND.
FAR_CASES, MIDDLE_CASES = 8, 16
MIDDLE_FIRST: tuple[Offset, ...] = ((0, 0, 0), (1, 1, 1), ACROSS[6], ACROSS[5], ACROSS[3])
MIDDLE_SECOND: tuple[Offset, ...] = (*ALONG.values(), *ACROSS.values())
BOTH_NEAR, BOTH_FAR, SPLIT = 0, 1, 2


def _case_tables() -> tuple[Ints, Ints, Bools]:
    cases = MIDDLE_CASES + 8 * len(MIDDLE_FIRST)
    o_CK3 = np.zeros((cases, SLOTS, 3), np.int64)
    late_CK3 = np.zeros_like(o_CK3)
    used_CK = np.zeros((cases, SLOTS), np.bool_)

    def fill(case: int, offsets: tuple[Offset, ...]) -> None:
        o_CK3[case, : len(offsets)] = offsets
        used_CK[case, : len(offsets)] = True

    for c, extras in NEAR_EXTRAS.items():
        fill(c, NEAR_CORNERS + extras)
    for c, extras in FAR_EXTRAS.items():
        fill(FAR_CASES + c, FAR_CORNERS + extras)
    late_CK3[FAR_CASES + 3, 5, 1] = 1  # the package first uses y = 1 for these two, then adds 1
    late_CK3[FAR_CASES + 6, 4, 1] = 1
    for e0, first in enumerate(MIDDLE_FIRST):
        for e1, second in enumerate(MIDDLE_SECOND):
            case = MIDDLE_CASES + 8 * e0 + e1
            fill(case, (*MIDDLE_CORNERS, first, second))
            if e0 >= SPLIT and e1 < len(ALONG):
                late_CK3[case, 7] = second
    return o_CK3, late_CK3, used_CK


def _near_case(x_N: Floats, y_N: Floats, z_N: Floats, total: Floats) -> Ints:
    """Compute the case number of each point, assuming that it lies in the tetrahedron at (0,0,0)."""
    z_for_b = (x_N >= y_N) & (z_N > y_N)
    z_for_a = (x_N < y_N) & (z_N > x_N)
    a_score, a_point = np.where(z_for_a, z_N, x_N), np.where(z_for_a, 4, 1)
    b_score, b_point = np.where(z_for_b, z_N, y_N), np.where(z_for_b, 4, 2)
    rest = 1 - total
    closest = np.where(b_score > a_score, b_point, a_point)
    return np.where((rest > a_score) | (rest > b_score), closest, a_point | b_point)


def _far_case(x_N: Floats, y_N: Floats, z_N: Floats, total: Floats) -> Ints:
    """Compute the case number of each point, assuming that it lies in the tetrahedron at (1,1,1)."""
    z_for_b = (x_N <= y_N) & (z_N < y_N)
    z_for_a = (x_N > y_N) & (z_N < x_N)
    a_score, a_point = np.where(z_for_a, z_N, x_N), np.where(z_for_a, 3, 6)
    b_score, b_point = np.where(z_for_b, z_N, y_N), np.where(z_for_b, 3, 5)
    rest = 3 - total
    closest = np.where(b_score < a_score, b_point, a_point)
    return FAR_CASES + np.where((rest < a_score) | (rest < b_score), closest, a_point & b_point)


def _middle_case(x_N: Floats, y_N: Floats, z_N: Floats) -> Ints:
    """Compute the case number of each point, assuming that it lies in the octahedron."""
    a_sum, b_sum, c_sum = x_N + y_N, x_N + z_N, y_N + z_N
    a_score, a_point, a_far = _side(a_sum, 3, 4)
    b_score, b_point, b_far = _side(b_sum, 5, 2)
    c_score, c_point, c_far = _side(c_sum, 6, 1)
    for_a = (a_score <= b_score) & (a_score < c_score)
    for_b = (a_score > b_score) & (b_score < c_score)
    a_point, a_far = np.where(for_a, c_point, a_point), np.where(for_a, c_far, a_far)
    b_point, b_far = np.where(for_b, c_point, b_point), np.where(for_b, c_far, b_far)
    far_point, near_point = np.where(a_far, a_point, b_point), np.where(a_far, b_point, a_point)
    across_e0 = np.array([0, 0, 0, 4, 0, 3, 2, 0])  # bit set -> index in MIDDLE_FIRST
    across_e1 = np.array([0, 0, 0, 5, 0, 4, 3, 0])  # bit set -> index in MIDDLE_SECOND
    along_e1 = np.array([2, 0, 1, 0, 2, 0, 0, 0])
    split = 8 * across_e0[far_point] + along_e1[near_point]
    both_far = 8 * BOTH_FAR + along_e1[a_point & b_point]
    both_near = 8 * BOTH_NEAR + across_e1[a_point | b_point]
    same_side = np.where(a_far, both_far, both_near)
    case_N: Ints = MIDDLE_CASES + np.where(a_far == b_far, same_side, split)
    return case_N


def _side(total: Floats, far_point: int, near_point: int) -> tuple[Floats, Ints, Bools]:
    """Find which of two opposite corners of the octahedron is nearer to each point.

    `total` is the sum of two coordinates of each point. Returns for each point the score |total - 1|, the
    nearer corner, and whether the nearer corner is `far_point`.
    """
    far = total > 1
    return np.where(far, total - 1, 1 - total), np.where(far, far_point, near_point), far
