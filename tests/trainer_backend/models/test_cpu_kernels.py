"""The kernels that a CPU alone has compute what torch's operators do, and broken numbers stay broken."""

import math
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.trainer_backend.models.test_kernels import CLOSE, by_threads, drawn
from trainer_backend.models import cpu_kernels as module
from trainer_backend.models.cpu_kernels import CpuKernels, Depths


@pytest.fixture(params=[1, 2])
def kernels(request: pytest.FixtureRequest) -> Iterator[CpuKernels]:
    with by_threads(request.param) as built:
        yield built


@pytest.mark.parametrize("tokens", [1, 2, 7, 32])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 320), (37, 336), (13, 1552)])
def test_a_product_is_that_of_the_definition_and_a_token_s_own(
    kernels: CpuKernels, tokens: int, outputs: int, inputs: int
):
    states, weight = drawn(tokens, 2 * inputs)[:, inputs:], drawn(outputs, inputs, seed=1)
    if not kernels.multiplies(tokens, weight):
        pytest.skip("this processor's vectors are too short")
    found, expected = kernels.product(states, weight), states.double() @ weight.double().T
    assert float((found - expected).norm() / expected.norm()) < 2e-7
    for token in range(tokens):  # to the last bit, whatever is computed with it
        assert torch.equal(found[token], kernels.product(states[token : token + 1], weight)[0])
    whole = drawn(tokens, outputs, seed=2)
    added = whole.clone()
    kernels.add_product(states, weight, to_TO=added)
    torch.testing.assert_close(added, whole + found, rtol=1e-6, atol=1e-5)


def test_products_that_torch_computes_faster_are_left_to_it(kernels: CpuKernels):
    assert not kernels.multiplies(129, drawn(64, 640))
    assert not kernels.multiplies(8, drawn(512, 128))
    assert not kernels.multiplies(8, drawn(64, 641)), "no whole vectors"
    assert not kernels.multiplies(8, drawn(4, 640)), "fewer outputs than are computed at a time"
    assert not kernels.multiplies(8, drawn(640, 64).T), "not as it lies"


@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 1), (4, 2), (6, 2)])
def test_queries_of_one_head_are_computed_as_each_alone(kernels: CpuKernels, heads: int, kv_heads: int):
    cache, size = (drawn(1, kv_heads, 150, 64), drawn(1, kv_heads, 150, 64, seed=1)), 64
    query, rows = drawn(1, heads, size, seed=2), torch.arange(kv_heads)[None]
    for column in (0, 6, 8, 140):
        at = torch.tensor([column])
        together, _ = kernels.attend(query, cache, rows, at, scale=0.1)
        for head in range(heads):
            own = torch.tensor([[head * kv_heads // heads]])
            alone, _ = kernels.attend(query[:, head : head + 1], cache, own, at, scale=0.1)
            torch.testing.assert_close(together[:, head], alone[:, 0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [32, 64, 128, 24])
def test_tokens_attend_to_their_own_rows_up_to_themselves(kernels: CpuKernels, size: int):
    keys, values = drawn(3, 2, 300, size), drawn(3, 2, 310, size, seed=1)  # a growth may stop between them
    rows, columns = torch.tensor([2, 0, 2, 1]), torch.tensor([0, 299, 130, 3])
    heads, k, v = rows[:, None] * 2 + torch.arange(2), drawn(4, 2, size, seed=2), drawn(4, 2, size, seed=3)
    kernels.store(k, v, (keys, values), heads, columns)
    query = 3 * drawn(4, 6, size, seed=4)[:, :4]
    out, lse = kernels.attend(query, (keys, values), heads, columns, scale=0.1)
    for token, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
        assert (keys[row, :, column] == k[token]).all() and (values[row, :, column] == v[token]).all()
        own_keys, own_values = (
            tensor[row, :, : column + 1].double().repeat_interleave(2, 0) for tensor in (keys, values)
        )
        scores = 0.1 * torch.einsum("hd,hld->hl", query[token].double(), own_keys)
        expected = torch.einsum("hl,hld->hd", scores.softmax(-1), own_values)
        torch.testing.assert_close(out[token].double(), expected, **CLOSE)
        torch.testing.assert_close(lse[token].double(), scores.logsumexp(-1), **CLOSE)


def trie(tokens: int, deepest: int) -> Tensor:
    """Positions in depth-first order."""
    draw, positions = random.Random(0), [0]
    while len(positions) < tokens:
        ends = draw.random() < 0.1 or positions[-1] == deepest
        positions.append(draw.randint(0, positions[-1]) if ends else positions[-1] + 1)
    return torch.tensor(positions)


def seen_by(positions: Tensor) -> Tensor:
    """[L, L] which tokens each sees: the last of each depth above it, and itself."""
    seen, path = torch.zeros(len(positions), len(positions), dtype=torch.bool), list[int]()
    for token, depth in enumerate(positions.tolist()):
        path = [*path[:depth], token]
        seen[token, path] = True
    return seen


# Heads, those of keys, their size; two threads have the row in two parts where the heads are three.
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(3, 3, 32), (4, 2, 64), (2, 1, 128), (3, 3, 24)])
@pytest.mark.parametrize("reads_some", [False, True])
def test_attention_over_tries_and_its_gradients_equal_those_under_a_mask(
    kernels: CpuKernels, heads: int, kv_heads: int, size: int, reads_some: bool
):
    positions = trie(300, 70)
    read = torch.arange(5, 300, 3) if reads_some else torch.arange(300)
    depths = Depths.of(positions, read if reads_some else None)
    q = drawn(300, heads, size, seed=7)[read]
    k, v = drawn(300, kv_heads, size), drawn(300, kv_heads, size, seed=1)
    by = drawn(len(read), heads, size, seed=2)
    given = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    k_all, v_all = (tensor.repeat_interleave(heads // kv_heads, 1) for tensor in given[1:])
    scores = torch.einsum("nhd,lhd->hnl", given[0], k_all) * 0.1
    scores = scores.masked_fill(~seen_by(positions)[read], -math.inf)
    expected = torch.einsum("hnl,lhd->nhd", scores.softmax(-1), v_all)

    out, lse = kernels.path_forward(depths, q, k, v, 0.1)
    torch.testing.assert_close(out.double(), expected.detach(), **CLOSE)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1).T.detach(), **CLOSE)
    found = kernels.path_backward(depths, by, q, k, v, out, lse, 0.1)
    for one, other in zip(found, torch.autograd.grad(expected, given, by.double()), strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 1e-6


def test_numbers_that_are_not_finite_stay_so(kernels: CpuKernels):
    broken = torch.full((1, 32), math.nan)
    assert kernels.rms_norm(broken, None, torch.ones(32), 1e-6, sums_TW=broken).isnan().all()
    assert kernels.swiglu(broken, broken).isnan().all()
    assert kernels.product(torch.ones(2, 640), broken.new_full((8, 640), math.nan)).isnan().all()
    rows = torch.zeros(1, 1, dtype=torch.int64)
    cache = torch.zeros(1, 1, 2, 32), torch.zeros(1, 1, 2, 32)
    out, _ = kernels.attend(broken[None], cache, rows, rows[0], scale=1.0)
    assert out.isnan().all()


def test_without_a_compiler_there_are_none_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert module.cpu_kernels.__wrapped__() is None
    told = capsys.readouterr()
    assert "no C compiler" in told.out + told.err
