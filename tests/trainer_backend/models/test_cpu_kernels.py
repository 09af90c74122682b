"""The kernels of a CPU compute what torch's operators do, and broken numbers stay broken."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer_backend.models import cpu_kernels as module
from trainer_backend.models.cpu_kernels import CpuKernels, cpu_kernels

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(params=[1, 2])
def kernels(request: pytest.FixtureRequest):
    """By one thread and by two."""
    built, before = cpu_kernels(), torch.get_num_threads()
    if built is None:
        pytest.skip("there is no C compiler")
    torch.set_num_threads(request.param)
    yield built
    torch.set_num_threads(before)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def normed(states: Tensor, weight: Tensor) -> Tensor:
    return states / (states.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


@pytest.mark.parametrize("width", [96, 7])
def test_a_norm_is_that_of_the_definition(kernels: CpuKernels, width: int):
    states, weight = drawn(5, width), drawn(width, seed=1)
    torch.testing.assert_close(kernels.rms_norm(states, weight, 1e-6), normed(states, weight), **CLOSE)


@pytest.mark.parametrize("size", [32, 64, 24])
@pytest.mark.parametrize("has_norms", [True, False])
def test_heads_are_normed_and_turned_by_their_positions(kernels: CpuKernels, size: int, has_norms: bool):
    heads, positions = drawn(6, 7, size)[:, :5], torch.tensor([3, 0, 2, 9, 1, 1])
    cos, sin, query, key = drawn(10, 1, size), drawn(10, 1, size, seed=1), drawn(size), drawn(size, seed=3)
    found = kernels.rotary(heads, (query, key) if has_norms else None, cos, sin, positions, keys=2, eps=1e-6)
    if has_norms:
        heads = torch.cat([normed(heads[:, :3], query), normed(heads[:, 3:], key)], 1)
    expected = heads * cos[positions] + heads.roll(size // 2, -1) * sin[positions]
    torch.testing.assert_close(found, expected, **CLOSE)


def test_a_gate_is_exact_from_minus_to_plus_100(kernels: CpuKernels):
    gate, up = torch.linspace(-100, 100, 400).view(2, 200), drawn(2, 200)
    found = kernels.swiglu(torch.cat([gate, up], 1))
    torch.testing.assert_close(found, F.silu(gate) * up, **CLOSE)


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
        seen = slice(0, column + 1)
        scores = 0.1 * torch.einsum("hd,hld->hl", query[token], keys[row, :, seen].repeat_interleave(2, 0))
        expected = torch.einsum(
            "hl,hld->hd", scores.softmax(-1), values[row, :, seen].repeat_interleave(2, 0)
        )
        torch.testing.assert_close(out[token], expected, **CLOSE)
        torch.testing.assert_close(lse[token], scores.logsumexp(-1), **CLOSE)


def test_numbers_that_are_not_finite_stay_so(kernels: CpuKernels):
    broken = torch.full((1, 32), math.nan)
    assert kernels.rms_norm(broken, torch.ones(32), 1e-6).isnan().all()
    assert kernels.swiglu(broken).isnan().all()
    rows = torch.zeros(1, 1, dtype=torch.int64)
    cache = torch.zeros(1, 1, 2, 32), torch.zeros(1, 1, 2, 32)
    out, _ = kernels.attend(broken[None], cache, rows, rows[0], scale=1.0)
    assert out.isnan().all()


def test_without_a_compiler_there_are_none_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert module.cpu_kernels.__wrapped__() is None
    assert "no C compiler" in capsys.readouterr().out
