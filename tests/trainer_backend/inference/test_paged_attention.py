"""Attention over pages is attention over plain rows, by torch and by Triton's kernels (here: interpreted)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch import Tensor

from trainer_backend.inference import paged_attention
from trainer_backend.inference.page_memory import (
    LEAST_SLABS,
    RESERVE_BYTES,
    PageMemory,
    page_bytes,
    slab_pages,
    whole_slabs,
)
from trainer_backend.inference.page_tiles import Group, Tiles, fill_tiles, group_rows, most_tiles
from trainer_backend.inference.paged_pass import PrefillAttention
from trainer_backend.inference.paged_runner import PageLimits
from trainer_backend.inference.pages import PAGE, pages_for

CPU = torch.device("cpu")
WITH_TRITON = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed: make test-kernel"
)
WAYS = ["torch", pytest.param("triton", marks=WITH_TRITON)]


@dataclass
class Case:
    """Rows of random keys and values in pages of several slabs, in no order, beside the rows themselves."""

    lengths: Sequence[int]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    dtype: torch.dtype = torch.float32
    layers: int = 2
    device: torch.device = CPU

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        widest = max(1, *map(pages_for, self.lengths))
        count = sum(map(pages_for, self.lengths)) + 1
        self.memory = PageMemory(
            layers=self.layers, heads=self.kv_heads, dim=self.dim, dtype=self.dtype, device=self.device,
            limit=max(count, 4 * LEAST_SLABS),  # 4 pages a slab, or more
        )  # fmt: skip
        while sum(slab.shape[2] for slab in self.memory.slabs) < count:
            self.memory.grow(count)
        for slab in self.memory.slabs:
            slab.fill_(math.nan)  # whatever nobody wrote must not be seen
        order = iter(torch.randperm(count, generator=draw).tolist())
        self.table_BP = torch.full((len(self.lengths), widest), 10**6, dtype=torch.int32)
        for row, length in enumerate(self.lengths):
            for place in range(pages_for(length)):
                self.table_BP[row, place] = next(order)
        self.keys, self.values = (
            [torch.randn(length, self.kv_heads, self.dim, generator=draw) for length in self.lengths]
            for _ in range(2)
        )
        self.q_BHD = torch.randn(len(self.lengths), self.heads, self.dim, generator=draw)
        self.lengths_B = torch.tensor(self.lengths, dtype=torch.int32)

    def slots(self) -> Tensor:
        rows = [
            self.table_BP[row, torch.arange(length) // PAGE].long() * PAGE + torch.arange(length) % PAGE
            for row, length in enumerate(self.lengths)
        ]
        return torch.cat(rows)

    def store(self, how: Callable[..., None], layer: int) -> None:
        # keys and values side by side, as a fused product leaves them
        both = torch.cat([torch.cat(self.keys), torch.cat(self.values)], dim=1).to(self.device)
        how(
            self.memory,
            layer,
            self.slots().to(self.device),
            both[:, : self.kv_heads],
            both[:, self.kv_heads :],
        )

    def attend(self, how: Callable[..., Tensor], layer: int, rows: slice = slice(None)) -> Tensor:
        given = (self.q_BHD[rows], self.table_BP[rows], self.lengths_B[rows])
        return how(self.memory, layer, *(one.to(self.device) for one in given), self.dim**-0.5).cpu()

    def expected(self) -> Tensor:
        rows = zip(self.q_BHD, self.keys, self.values, strict=True)
        return torch.stack([by_definition(*(tensor.to(self.dtype) for tensor in row)) for row in rows])


def by_definition(q_HD: Tensor, k_LKD: Tensor, v_LKD: Tensor) -> Tensor:
    """[H, D] of one query, in float64."""
    group = len(q_HD) // k_LKD.shape[1]
    k_LHD, v_LHD = (tensor.double().repeat_interleave(group, dim=1) for tensor in (k_LKD, v_LKD))
    scores_HL = torch.einsum("hd,lhd->hl", q_HD.double(), k_LHD) / math.sqrt(q_HD.shape[1])
    return torch.einsum("hl,lhd->hd", scores_HL.softmax(-1), v_LHD)


class Way(NamedTuple):
    store: Callable[..., None]
    attend: Callable[..., Tensor]


def by(way: str) -> Way:
    if way == "torch":
        return Way(paged_attention.store_by_torch, paged_attention.attend_by_torch)
    from trainer_backend.inference import paged_kernel

    return Way(paged_kernel.store, paged_kernel.attend)


SHAPES: dict[str, dict[str, Any]] = {
    "grouped heads": {"lengths": [1, PAGE, PAGE + 1, 300]},
    "one head each": {"lengths": [5, 70], "heads": 2, "kv_heads": 2},
    "a head size that is no power of 2": {"lengths": [40, 3], "heads": 6, "dim": 24},
    "wide heads": {"lengths": [65], "heads": 2, "kv_heads": 1, "dim": 256},
    "more than one split": {"lengths": [700, 10], "kv_heads": 1},
    "more keys than splits of the least size": {"lengths": [4500], "heads": 1, "kv_heads": 1},
    "a row without keys": {"lengths": [0, 33, 0]},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHAPES)
def test_each_row_attends_to_its_own_keys_alone(name: str, way: str):
    case, attend = Case(**SHAPES[name]), by(way).attend
    for layer in range(case.layers):
        case.store(paged_attention.store_by_torch, layer)  # interpreted, a store takes 10 ms a token
        found = case.attend(attend, layer)
        torch.testing.assert_close(found.double(), case.expected(), rtol=1e-5, atol=1e-6)


# Lengths of rows; those that begin with the same pages, and how many of them.
SHARING: dict[str, tuple[list[int], list[Group], dict[str, int]]] = {
    "a tile and a half, a row without, and one without keys": (
        [65, 70, 200, 96, 97, 364, 40, 0], [Group([0, 1, 2, 3, 4, 5], 2)], {"kv_heads": 1, "dim": 24},
    ),
    "two groups that lie apart, one of more pages than splits of the least size": (
        [1100, 70, 1090, 71, 1089, 90, 33, 1200, 66], [Group([0, 2, 4, 7], 34), Group([1, 3, 5, 8], 2)],
        {"heads": 2, "kv_heads": 1},
    ),
    "two groups of heads": ([129, 130, 131, 160], [Group([0, 1, 2, 3], 4)], {}),
}  # fmt: skip


def sharing(name: str, **more: Any) -> tuple[Case, list[Group]]:
    """A case whose groups begin with the same pages, and their keys and values."""
    lengths, groups, sizes = SHARING[name]
    case = Case(lengths, **sizes, **more)
    for (first, *others), pages in groups:
        for row in others:
            case.table_BP[row, :pages] = case.table_BP[first, :pages]
            for tokens in (case.keys, case.values):
                tokens[row][: pages * PAGE] = tokens[first][: pages * PAGE]
    return case, groups


def make_tiles(case: Case, groups: Sequence[Group], tile_rows: int) -> Tiles:
    rows_NM = np.empty((most_tiles(len(case.lengths)), tile_rows), dtype=np.int32)
    shared_B = np.empty(len(case.lengths), dtype=np.int32)
    fill_tiles(groups, rows_NM, shared_B, page=PAGE)
    return Tiles(*(torch.from_numpy(numbers).to(case.device) for numbers in (rows_NM, shared_B)))


@WITH_TRITON
@pytest.mark.parametrize("name", SHARING)
def test_shared_pages_read_once_for_a_tile_are_those_of_each_row(name: str):
    case, groups = sharing(name)
    case.store(paged_attention.store_by_torch, 1)
    attend = by("triton").attend
    tiles = make_tiles(case, groups, tile_rows=4)
    plain = case.attend(attend, 1)
    # The pages of all but a tile's first row are not read: a wrong one in their place does not matter.
    for group in groups:
        for row in set(group.rows) - set(tiles.rows_NM[:, 0].tolist()):
            case.table_BP[row, : group.pages] = 10**6
    found = case.attend(partial(attend, tiles=tiles), 1)
    torch.testing.assert_close(found.double(), case.expected(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)


def test_rows_are_grouped_where_most_reads_are_saved():
    def grouped(*pages: list[int], tile_rows: int = 16) -> list[Group]:
        return group_rows(pages, tile_rows=tile_rows)

    assert grouped(*[[7, 8, row] for row in range(3)], [7, 8]) == [Group([0, 1, 2, 3], 2)]
    assert grouped(*[[7, 8, row] for row in range(3)], [9]) == [], "three rows do not pay"
    assert grouped(*[[7, row] for row in range(4)]) == [], "nor does a page"
    assert grouped(*[[7, 8]] * 4, tile_rows=3) == [], "nor do tiles of few rows"
    # all have 2 pages alike, half of them 3 more: 7 * 2 = 14 reads less, or 3 * 5 = 15
    rows = [[1, 2, row + 10] if row % 2 else [1, 2, 3, 4, 5, row + 10] for row in range(8)]
    assert grouped(*rows) == [Group([0, 2, 4, 6], 5), Group([1, 3, 5, 7], 2)]
    # in tiles of 4, 100 rows with 3 pages alike save 75 * 3; their quarters with 1 more save 4 * 18 * 4
    siblings = [[1, 2, 3, row % 4 + 10, row + 50] for row in range(100)]
    assert [group.pages for group in grouped(*siblings, tile_rows=4)] == [4] * 4


def test_groups_fill_tiles_of_a_fixed_number():
    rows_NM, shared_B = np.empty((most_tiles(11), 4), np.int32), np.empty(11, np.int32)
    fill_tiles([Group([0, 2, 3, 5, 8], 2), Group([1, 4, 6, 7], 3)], rows_NM, shared_B, page=32)
    assert rows_NM.tolist() == [[0, 2, 3, 5], [8, -1, -1, -1], [1, 4, 6, 7], [-1] * 4, [-1] * 4]
    assert shared_B.tolist() == [64, 96, 64, 64, 96, 64, 96, 96, 64, 0, 0]


# Interpreted, a product of bfloat16 is wrong whatever the kernel; tests/gpu has it compiled.
@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        ("torch", torch.bfloat16),
        ("torch", torch.float16),
        pytest.param("triton", torch.float16, marks=WITH_TRITON),
    ],
)
def test_keys_and_queries_are_rounded_to_the_type_of_the_cache(way: str, dtype: torch.dtype):
    case, (store, attend) = Case([40, 33], dtype=dtype), by(way)
    case.store(store, 1)
    found = case.attend(attend, 1)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), case.expected(), rtol=0, atol=0.02)


@pytest.mark.parametrize("way", WAYS)
def test_a_row_has_the_same_bits_alone_and_with_others(way: str):
    case, attend = Case([700, 31, 300]), by(way).attend
    case.store(paged_attention.store_by_torch, 0)
    together = case.attend(attend, 0)
    for row in range(3):
        alone = case.attend(attend, 0, slice(row, row + 1))[0]
        if way == "triton":
            assert torch.equal(alone, together[row])
        else:
            torch.testing.assert_close(alone, together[row])


@pytest.mark.parametrize("way", WAYS)
def test_a_token_without_a_slot_is_not_stored(way: str):
    store = by(way).store
    case = Case([2])
    case.store(store, 0)
    before = [slab.clone() for slab in case.memory.slabs]
    nowhere = torch.full((3,), -1)
    store(case.memory, 0, nowhere, torch.ones(3, 2, 16), torch.ones(3, 2, 16))
    for slab, was in zip(case.memory.slabs, before, strict=True):
        torch.testing.assert_close(slab, was, equal_nan=True)


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_page_and_memory_that_is_allocated_again(way: str):
    case, (store, attend) = Case([20]), by(way)
    case.store(store, 0)
    unused = next(page for page in range(2) if page != int(case.table_BP[0, 0]))
    case.memory.copy(int(case.table_BP[0, 0]), unused)
    case.table_BP[0, 0] = unused
    torch.testing.assert_close(case.attend(attend, 0).double(), case.expected(), rtol=1e-5, atol=1e-6)
    case.memory.release()
    assert case.memory.slabs == []
    while len(case.memory.slabs) < len(case.memory.bases_S):
        case.memory.grow(2)
    case.store(store, 0)
    torch.testing.assert_close(case.attend(attend, 0).double(), case.expected(), rtol=1e-5, atol=1e-6)


def test_gathered_tokens_are_those_of_their_slots():
    case = Case([40, 3])
    case.store(paged_attention.store_by_torch, 1)
    slots = torch.cat([case.slots(), torch.tensor([-1])])
    keys, values = paged_attention.gather(case.memory, 1, slots)
    assert torch.equal(keys, torch.cat([*case.keys, torch.zeros(1, 2, 16)]))
    assert torch.equal(values, torch.cat([*case.values, torch.zeros(1, 2, 16)]))


PASSES: dict[str, tuple[list[int], dict[str, int]]] = {
    "whole prompts": ([0, 0, 0], {}),
    "rests of prompts": ([1, 33, 199], {}),
    "a group of three": ([0, 40, 0], {"heads": 6, "dim": 24}),
    "one token each": ([1, 69, 299], {"kv_heads": 1}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_sees_each_row_up_to_its_own_positions(name: str, way: str):
    starts, sizes = PASSES[name]
    case, starts_B = Case([2, 70, 300], **sizes), np.array(starts)
    counts_B = np.array(case.lengths) - starts_B
    case.store(paged_attention.store_by_torch, 1)
    attention = PrefillAttention(
        case.memory, case.table_BP.numpy(), starts_B=starts_B, counts_B=counts_B, heads=case.heads,
        by_kernel=way == "triton",
    )  # fmt: skip
    rows = [torch.randn(int(count), case.heads, case.dim) for count in counts_B]
    found = attention.attend(1, torch.cat(rows))
    positions = [
        place for start, count in zip(starts, counts_B, strict=True) for place in range(start, start + count)
    ]
    assert attention.positions_T.tolist() == positions
    for row, (q_QHD, part_QHD) in enumerate(zip(rows, found.split(counts_B.tolist()), strict=True)):
        for place in range(len(q_QHD)):
            visible = starts[row] + place + 1
            expected = by_definition(q_QHD[place], case.keys[row][:visible], case.values[row][:visible])
            torch.testing.assert_close(part_QHD[place].double(), expected, rtol=1e-5, atol=1e-6)


def test_a_page_has_keys_and_values_of_all_layers_and_a_slab_as_many_pages_as_may_be():
    # Qwen3-4B in bfloat16: 36 layers, 8 heads of 128, keys and values of 32 tokens
    page = page_bytes(36, 8, 128, torch.bfloat16)
    assert page == 2 * 36 * 32 * 8 * 128 * 2 == 4_718_592
    assert slab_pages(page, 10_000) == 32  # 144 MiB: 56 would fit, a power of 2 is needed
    assert slab_pages(page, 100) == 8  # 12 would be an eighth
    assert slab_pages(page, 5) == slab_pages(10**10, 5) == 1


@given(page=st.integers(1, 2**28), limit=st.integers(1, 10**6))
def test_whole_slabs_take_no_more_than_is_allowed_and_nearly_all_of_it(page: int, limit: int):
    whole = whole_slabs(page, limit)
    assert limit * 7 / 8 < whole <= limit
    size = slab_pages(page, whole)
    assert -(-whole // size) * size == whole, "what is allocated for them is what they are"


def test_a_slab_leaves_a_reserve_unless_one_longest_request_would_not_fit():
    memory = PageMemory(
        layers=1, heads=1, dim=16, dtype=torch.float32, device=CPU, limit=4 * LEAST_SLABS, least=6
    )
    enough = 4 * page_bytes(1, 1, 16, torch.float32) + RESERVE_BYTES
    for may in (True, True, False):  # 6 pages are two slabs of 4
        assert memory.may_grow(0) is may
        assert memory.may_grow(enough)
        memory.grow(4)
    assert not memory.may_grow(enough - 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels may run here")
def test_where_a_gpu_cannot_run_them_the_log_says_why_and_it_says_it_once():
    # without Triton, or with it and no driver: either way the first kernel cannot be launched
    paged_attention.why_no_kernels.cache_clear()
    with capture_logs() as lines:
        assert [PageLimits(None, None).wanted_on(torch.device("cuda")) for _ in range(2)] == [False, False]
    assert [(line["event"], line["device"]) for line in lines] == [("runs_without_kernels", "cuda")]
    assert lines[0]["reason"]
