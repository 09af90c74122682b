"""Define the Triton kernels of the paged cache: they store keys and values, and compute attention.

A decode step uses Flash-Decoding. The keys of a row are divided into splits. For each split, one program
computes an online softmax in float32 for all query heads that share the keys; a second kernel joins the
splits. Kernels read lengths and page tables on the device, so a launch does not depend on their values, and a
CUDA graph can contain it. The splits of a row depend only on its own length, so the other rows of a batch do
not change its result. Rows that begin with the same pages are an exception (`page_tiles`): separate splits
read these pages once for a tile of rows. The pages after them are read row by row, and the second kernel
joins both kinds of splits.

Pages lie in slabs (`page_memory`) of the shape [2, layers, pages, PAGE, kv_heads, head_dim], keys first. The
addresses of the slabs are read from the device too, so slabs may be added or replaced after a graph is
captured.

A prefill uses FlashAttention; each program computes a block of queries of one row.

Import this module only if `triton` is installed. Sources: Dao, FlashAttention-2, arXiv:2307.08691, algorithm
1; Dao et al., Flash-Decoding for long-context inference, 2023; addresses as in Triton's tutorial 08, grouped
GEMM.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code=misc

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer_backend.inference.page_memory import PageMemory
from trainer_backend.inference.page_tiles import Tiles
from trainer_backend.inference.pages import PAGE

# The largest number of splits of a row, and the smallest number of keys of a split for which joining pays.
SPLITS, LEAST = 16, 256
# The same for shared pages: it is smaller, because fewer programs run, each with more queries.
LEAST_SHARED = 64
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
LOG2_E = 1.4426950408889634
# The smallest number of rows that tl.dot supports.
_LEAST_ROWS = 16
# Bytes of a GPU's shared memory for keys and values, which are loaded for two iterations at a time, and for
# the queries of a block. The sum is below 99 KB, the smallest shared memory of a GPU. A decode step has few
# queries, so that keys and values for three iterations fit.
_TILE_BYTES, _QUERY_BYTES, _STAGES = 64 * 1024, 16 * 1024, 2


@triton.jit
def _page_starts(bases_ptr, pages, SLAB: tl.constexpr, PAGE_SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the address of the first key of each page in layer 0."""
    slab = tl.load(bases_ptr + pages // SLAB).to(tl.pointer_type(DTYPE))
    # Without this hint, addresses from memory count as unaligned, and keys are loaded one by one.
    return tl.multiple_of(slab, 16) + (pages % SLAB) * PAGE_SIZE


@triton.jit
def _share(length, SPLITS: tl.constexpr, LEAST: tl.constexpr, TILE: tl.constexpr):
    """Return the number of keys in each split, if `length` keys are divided into splits."""
    return tl.maximum(LEAST, tl.cdiv(tl.cdiv(length, SPLITS), TILE) * TILE)


@triton.jit
def _attend_keys(
    q, last, start, end, bases_ptr, table_ptr, head, keys, values, scale, DTYPE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, SLAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute the online softmax of queries [ROWS, WIDTH] over the keys from `start` to `end` of one row.

    Each query attends to keys up to its own position in `last`. All these positions are >= `start`, so every
    query has a key. Return, for each query, the maximum of the scores and, relative to this maximum, the sum
    of the exponentials and the weighted sum of the values.
    """
    d, n = tl.arange(0, WIDTH), tl.arange(0, TILE)
    in_head = d < DIM
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(start, end, TILE):
        position = first + n
        is_key = position < end
        page = tl.load(table_ptr + position // PAGE, mask=is_key, other=0)
        starts = _page_starts(bases_ptr, page, SLAB, PAGE * HEADS * DIM, DTYPE)
        starts += (position % PAGE) * (HEADS * DIM) + head * DIM
        mask = is_key[:, None] & in_head[None, :]
        k = tl.load(starts[:, None] + keys + d[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(position[None, :] <= last[:, None], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp2(best - higher)
        p = tl.exp2(scores - higher[:, None])
        # Do not read keys and values after the end: masked numbers that are not finite would make sums NaN.
        v = tl.load(starts[:, None] + values + d[None, :], mask=mask, other=0.0)
        sums = sums * shrink[:, None] + tl.dot(p.to(DTYPE), v, input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        best = higher
    return best, total, sums


@triton.jit
def _attend_split(
    q_ptr, bases_ptr, table_ptr, lengths_ptr, shared_ptr, parts_ptr, weights_ptr,
    q_row, q_head, table_row, keys, values, scale, DTYPE: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, SLAB: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    begin = 0
    if PARTS > SPLITS:
        begin = tl.load(shared_ptr + row)
    share = _share(length - begin, SPLITS, LEAST, TILE)
    start = begin + split * share
    if start >= length:
        return
    end = tl.minimum(start + share, length)
    g, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    in_group, in_head = g < GROUP, d < DIM
    q_places = row.to(tl.int64) * q_row + (head * GROUP + g[:, None]) * q_head + d[None, :]
    q = tl.load(q_ptr + q_places, mask=in_group[:, None] & in_head[None, :], other=0.0).to(DTYPE)
    best, total, sums = _attend_keys(
        q, tl.zeros([ROWS], tl.int32) + (end - 1), start, end,
        bases_ptr, table_ptr + row.to(tl.int64) * table_row, head, keys, values, scale, DTYPE,
        HEADS, DIM, ROWS, WIDTH, PAGE, SLAB, TILE,
    )  # fmt: skip
    places = ((row.to(tl.int64) * HEADS + head) * GROUP + g) * PARTS + split
    tl.store(weights_ptr + places, best + tl.log2(total), mask=in_group)
    mask = in_group[:, None] & in_head[None, :]
    tl.store(parts_ptr + places[:, None] * DIM + d[None, :], sums / total[:, None], mask=mask)


@triton.jit
def _attend_shared(
    q_ptr, bases_ptr, table_ptr, tiles_ptr, shared_ptr, parts_ptr, weights_ptr,
    q_row, q_head, table_row, keys, values, scale, DTYPE: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, SLAB: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    PARTS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Compute the attention of all rows of a tile to one split of the pages that they share."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    one = tl.load(tiles_ptr + tile * MEMBERS)
    if one < 0:
        return
    length = tl.load(shared_ptr + one)
    share = _share(length, SPLITS, LEAST, TILE)
    start = split * share
    if start >= length:
        return
    end = tl.minimum(start + share, length)
    m, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    member, in_head = m // GROUP, d < DIM
    row = tl.load(tiles_ptr + tile * MEMBERS + member, mask=member < MEMBERS, other=-1).to(tl.int64)
    is_query, query_head = row >= 0, head * GROUP + m % GROUP
    mask = is_query[:, None] & in_head[None, :]
    q = tl.load(q_ptr + (row * q_row + query_head * q_head)[:, None] + d[None, :], mask=mask, other=0.0)
    best, total, sums = _attend_keys(
        q.to(DTYPE), tl.zeros([ROWS], tl.int32) + (end - 1), start, end,
        bases_ptr, table_ptr + one.to(tl.int64) * table_row, head, keys, values, scale, DTYPE,
        HEADS, DIM, ROWS, WIDTH, PAGE, SLAB, TILE,
    )  # fmt: skip
    # In the scratch memory, the shared splits follow the splits of the row's own keys.
    places = (row * (HEADS * GROUP) + query_head) * PARTS + (PARTS - SPLITS) + split
    tl.store(weights_ptr + places, best + tl.log2(total), mask=is_query)
    tl.store(parts_ptr + places[:, None] * DIM + d[None, :], sums / total[:, None], mask=mask)


@triton.jit
def _join_splits(
    parts_ptr, weights_ptr, lengths_ptr, shared_ptr, out_ptr,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, LEAST_SHARED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    s, d = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    if PARTS > SPLITS:
        shared = tl.load(shared_ptr + row)
        own = length - shared
        is_split = s < tl.cdiv(own, _share(own, SPLITS, LEAST, TILE))
        end = SPLITS + tl.cdiv(shared, _share(shared, SPLITS, LEAST_SHARED, TILE))
        is_split |= (s >= SPLITS) & (s < end)
    else:
        is_split = s < tl.cdiv(length, _share(length, SPLITS, LEAST, TILE))
    in_head = d < DIM
    place = row.to(tl.int64) * HEADS + head
    logs = tl.load(weights_ptr + place * PARTS + s, mask=is_split, other=float("-inf"))
    # A row without keys has the maximum -inf; -1e30 in its place avoids NaN.
    weights = tl.exp2(logs - tl.maximum(tl.max(logs, 0), -1e30))
    mask = is_split[:, None] & in_head[None, :]
    parts = tl.load(parts_ptr + (place * PARTS + s[:, None]) * DIM + d[None, :], mask=mask, other=0.0)
    # A padding row has no keys: 1e-30 in place of its sum 0 makes the result 0.
    joined = tl.sum(parts * weights[:, None], 0) / tl.maximum(tl.sum(weights, 0), 1e-30)
    tl.store(out_ptr + place * DIM + d, joined.to(out_ptr.dtype.element_ty), mask=in_head)


@triton.jit
def _store_token(
    k_ptr, v_ptr, slots_ptr, bases_ptr, k_row, k_head, v_row, v_head, keys, values, DTYPE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, SLAB: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    h, d = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    mask = (h < HEADS) & (d < DIM)
    start = _page_starts(bases_ptr, slot // PAGE, SLAB, PAGE * HEADS * DIM, DTYPE)
    start += (slot % PAGE) * (HEADS * DIM)
    k = tl.load(k_ptr + token * k_row + h * k_head + d, mask=mask).to(DTYPE)
    v = tl.load(v_ptr + token * v_row + h * v_head + d, mask=mask).to(DTYPE)
    tl.store(start + keys + h * DIM + d, k, mask=mask)
    tl.store(start + values + h * DIM + d, v, mask=mask)


@triton.jit
def _attend_block(
    q_ptr, bases_ptr, tables_ptr, blocks_ptr, out_ptr, q_row, q_head, table_row, keys, values, scale,
    DTYPE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, SLAB: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(blocks_ptr + block * 4), tl.load(blocks_ptr + block * 4 + 1)
    row, start = tl.load(blocks_ptr + block * 4 + 2), tl.load(blocks_ptr + block * 4 + 3)
    m, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token, in_head = m // GROUP, d < DIM
    query_head = head * GROUP + m % GROUP
    mask = (token < count)[:, None] & in_head[None, :]
    place = (first + token).to(tl.int64)
    q = tl.load(q_ptr + (place * q_row + query_head * q_head)[:, None] + d[None, :], mask=mask, other=0.0)
    _, total, sums = _attend_keys(
        q.to(DTYPE), start + token, 0, start + count,
        bases_ptr, tables_ptr + row.to(tl.int64) * table_row, head, keys, values, scale, DTYPE,
        HEADS, DIM, ROWS, WIDTH, PAGE, SLAB, TILE,
    )  # fmt: skip
    out = (sums / total[:, None]).to(DTYPE)
    places = (place * (HEADS * GROUP) + query_head) * DIM
    tl.store(out_ptr + places[:, None] + d[None, :], out, mask=mask)


def store(memory: PageMemory, layer: int, slots_T: Tensor, k_THD: Tensor, v_THD: Tensor) -> None:
    """Implement `paged_attention.store`."""
    keys, values = memory.offsets(layer)
    if len(slots_T):
        _store_token[(len(slots_T),)](
            k_THD, v_THD, slots_T, memory.bases_S,
            k_THD.stride(0), k_THD.stride(1), v_THD.stride(0), v_THD.stride(1), keys, values,
            DTYPE=TYPES[memory.dtype], HEADS=memory.heads, DIM=memory.dim,
            ROWS=triton.next_power_of_2(memory.heads), WIDTH=triton.next_power_of_2(memory.dim),
            PAGE=PAGE, SLAB=memory.slab_pages,
        )  # fmt: skip


def attend(
    memory: PageMemory,
    layer: int,
    q_BHD: Tensor,
    table_BP: Tensor,
    lengths_B: Tensor,
    scale: float,
    tiles: Tiles | None = None,
) -> Tensor:
    """Implement `paged_attention.attend`.

    The scratch memory is [B, H, SPLITS, D] in float32, or twice that with tiles.
    """
    rows, heads, dim = q_BHD.shape
    group, width, tile = heads // memory.heads, triton.next_power_of_2(dim), _tile(memory)
    count = SPLITS if tiles is None else 2 * SPLITS
    parts = q_BHD.new_empty((rows, heads, count, dim), dtype=torch.float32)
    weights = q_BHD.new_empty((rows, heads, count), dtype=torch.float32)
    out_BHD = q_BHD.new_empty((rows, heads, dim), dtype=memory.dtype)
    shared_B = lengths_B if tiles is None else tiles.shared_B  # not read without tiles
    tensors = (parts, weights)
    numbers = (q_BHD.stride(0), q_BHD.stride(1), table_BP.stride(0), *memory.offsets(layer), scale * LOG2_E)
    form = {
        "DTYPE": TYPES[memory.dtype], "HEADS": memory.heads, "GROUP": group, "DIM": dim,
        "WIDTH": max(_LEAST_ROWS, width), "PAGE": PAGE, "SLAB": memory.slab_pages, "TILE": tile,
        "SPLITS": SPLITS, "PARTS": count,
    }  # fmt: skip
    if tiles is not None:
        _attend_shared[(len(tiles.rows_NM), memory.heads, SPLITS)](
            q_BHD, memory.bases_S, table_BP, tiles.rows_NM, shared_B, *tensors, *numbers, **form,
            ROWS=block_rows(memory, group), LEAST=LEAST_SHARED, MEMBERS=tiles.rows_NM.shape[1],
            num_warps=4, num_stages=_STAGES,
        )  # fmt: skip
    _attend_split[(rows, memory.heads, SPLITS)](
        q_BHD, memory.bases_S, table_BP, lengths_B, shared_B, *tensors, *numbers, **form,
        ROWS=max(_LEAST_ROWS, triton.next_power_of_2(group)), LEAST=LEAST,
        num_warps=2, num_stages=_STAGES + 1,
    )  # fmt: skip
    _join_splits[(rows, heads)](
        parts, weights, lengths_B, shared_B, out_BHD,
        HEADS=heads, DIM=dim, WIDTH=width, TILE=tile, SPLITS=SPLITS, LEAST=LEAST,
        LEAST_SHARED=LEAST_SHARED, PARTS=count, num_warps=count // SPLITS,
    )  # fmt: skip
    return out_BHD


def block_rows(memory: PageMemory, group: int) -> int:
    """Return how many queries one program of `attend_blocks` computes.

    Each token has `group` queries, one for each query head that shares a key-value head.
    """
    fits = _QUERY_BYTES // (triton.next_power_of_2(memory.dim) * memory.dtype.itemsize)
    return int(max(_LEAST_ROWS, min(64, fits), triton.next_power_of_2(group)))


def _tile(memory: PageMemory) -> int:
    """Return how many keys a program reads at a time."""
    fits = _TILE_BYTES // (2 * _STAGES * triton.next_power_of_2(memory.dim) * memory.dtype.itemsize)
    return int(max(_LEAST_ROWS, min(64, fits)))


def attend_blocks(
    memory: PageMemory, layer: int, q_THD: Tensor, tables_BP: Tensor, blocks_N4: Tensor, scale: float
) -> Tensor:
    """Return the causal attention output of many queries per row, [T, H, D], in the cache's dtype.

    `blocks_N4` (int32) describes a block of queries by four numbers: the index of its first token in `q_THD`,
    its number of tokens, their row in `tables_BP`, and the position of the first token in this row. A block
    has at most `block_rows` queries.
    """
    tokens, heads, dim = q_THD.shape
    keys, values = memory.offsets(layer)
    group = heads // memory.heads
    rows = block_rows(memory, group)
    out_THD = q_THD.new_empty((tokens, heads, dim), dtype=memory.dtype)
    _attend_block[(len(blocks_N4), memory.heads)](
        q_THD, memory.bases_S, tables_BP, blocks_N4, out_THD,
        q_THD.stride(0), q_THD.stride(1), tables_BP.stride(0), keys, values, scale * LOG2_E,
        DTYPE=TYPES[memory.dtype], HEADS=memory.heads, GROUP=group, DIM=dim,
        WIDTH=max(_LEAST_ROWS, triton.next_power_of_2(dim)), PAGE=PAGE, SLAB=memory.slab_pages,
        ROWS=rows, TILE=_tile(memory), num_warps=4, num_stages=_STAGES,
    )  # fmt: skip
    return out_THD
