"""Kernels of a layer are what torch's operators compute, forward and backward: those of a CPU, and Triton's.

Triton's are interpreted where there is no GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer_backend.core.logprobs import chunked_logprobs
from trainer_backend.models.cpu_kernels import CpuKernels, cpu_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
TRITON = pytest.param(
    "triton",
    marks=pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: make test-kernel"),
)
TRITON_ALONE = pytest.mark.parametrize("kernels", [TRITON], indirect=True)


@contextmanager
def by_threads(count: int) -> Iterator[CpuKernels]:
    built, before = cpu_kernels(), torch.get_num_threads()
    if built is None:
        pytest.skip("there is no C compiler")
    torch.set_num_threads(count)
    yield built
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2, TRITON], ids=["1 thread", "2 threads", "triton"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Make their device the default one for the tensors of a test."""
    if request.param != "triton":
        with by_threads(request.param) as built:
            yield built
        return
    from trainer_backend.models import kernels

    with torch.device(DEVICE):
        yield kernels


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu").to(torch.get_default_device())


def normed(states: Tensor, weight: Tensor) -> Tensor:
    return states / (states.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotated(heads: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cos_TD[:, None] + torch.cat([-second, first], -1) * sin_TD[:, None]


def angles(tokens: int, size: int) -> tuple[Tensor, Tensor]:
    angles_TH = torch.arange(tokens)[:, None] * 100.0 ** -torch.linspace(0, 1, size // 2)
    return torch.cat([angles_TH.cos()] * 2, -1), torch.cat([angles_TH.sin()] * 2, -1)


@pytest.mark.parametrize("width", [64, 100, 7])
@pytest.mark.parametrize("adds", [True, False])
def test_a_norm_and_its_gradients_are_those_of_the_definition(kernels: Any, width: int, adds: bool):
    states, added, by_out, by_sums = (drawn(130, width, seed=seed) for seed in range(4))
    weight = drawn(width, seed=4)
    given = [tensor.clone().requires_grad_() for tensor in (states, added, weight)]
    sums = given[0] + given[1] if adds else given[0]
    expected = normed(sums, given[2])
    (expected * by_out + sums * by_sums).sum().backward()

    kept = torch.empty_like(states) if adds else states
    found = kernels.rms_norm(states, added if adds else None, weight, EPS, sums_TW=kept, out=torch.float32)
    torch.testing.assert_close((found, kept), (expected, sums), **CLOSE)
    dtype = torch.float32 if adds else None
    by_states, by_added, by_weight = kernels.rms_norm_backward(
        kept, weight, by_out, by_sums, EPS, added=dtype, weighs=True
    )
    torch.testing.assert_close((by_states, by_weight), (given[0].grad, given[2].grad), rtol=1e-5, atol=1e-5)
    assert (by_added is None) == (not adds)
    if adds:
        torch.testing.assert_close(by_added, given[1].grad, rtol=1e-5, atol=1e-5)
    alone, _, nothing = kernels.rms_norm_backward(kept, weight, by_out, None, EPS, added=None, weighs=False)
    torch.testing.assert_close(alone + by_sums, by_states, **CLOSE)
    assert nothing is None


def test_a_sum_may_be_written_over_the_states(kernels: Any):
    states, added, weight = drawn(3, 32), drawn(3, 32, seed=1), drawn(32, seed=2)
    expected = normed(states + added, weight), states + added
    found = kernels.rms_norm(states, added, weight, EPS, sums_TW=states, out=torch.float32)
    torch.testing.assert_close((found, states), expected, **CLOSE)


@pytest.mark.parametrize("size", [32, 64, 24, 80])
@pytest.mark.parametrize("has_norm", [True, False])
def test_rotated_heads_and_their_gradients_are_those_of_the_definition(
    kernels: Any, size: int, has_norm: bool
):
    wide = drawn(70, 13, size)  # as a fused product leaves them: values lie behind
    heads, weight, by_out = wide[:, :11], drawn(size, seed=1), drawn(70, 11, size, seed=2)
    cos, sin = angles(70, size)
    given = [heads.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = rotated(normed(*given) if has_norm else given[0], cos, sin)
    (expected * by_out).sum().backward()

    weights = (weight, weight) if has_norm else None
    found = kernels.rotary(heads, weights, cos, sin, None, queries=11, eps=EPS, out=torch.float32)
    torch.testing.assert_close(found, expected, **CLOSE)
    by_heads = torch.empty_like(wide)[:, 1:-1]
    by_weight = kernels.rotary_backward(
        heads, weight if has_norm else None, cos, sin, by_out, by_heads_TSD=by_heads, eps=EPS, weighs=True
    )
    torch.testing.assert_close(by_heads, given[0].grad, rtol=1e-5, atol=1e-5)
    if has_norm:
        torch.testing.assert_close(by_weight, given[1].grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [32, 64, 24])
def test_queries_and_keys_have_norms_of_their_own_and_positions_may_be_any(kernels: Any, size: int):
    heads, q_weight, k_weight = drawn(6, 7, size)[:, :5], drawn(size, seed=1), drawn(size, seed=2)
    cos, sin = angles(50, size)
    positions = torch.tensor([3, 0, 49, 9, 1, 1])
    negated = torch.cat([-sin[:, : size // 2], sin[:, size // 2 :]], -1)  # as the engine's tables have it
    found = kernels.rotary(
        heads, (q_weight, k_weight), cos, negated, positions, queries=3, eps=EPS, out=torch.float32
    )
    both = torch.cat([normed(heads[:, :3], q_weight), normed(heads[:, 3:], k_weight)], 1)
    torch.testing.assert_close(found, rotated(both, cos[positions], sin[positions]), **CLOSE)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # interpreted; 1 / inf is right
@pytest.mark.parametrize("width", [48, 1100])
def test_a_gate_and_its_gradients_are_exact_from_minus_to_plus_100(kernels: Any, width: int):
    gates = torch.linspace(-100, 100, 3 * width).view(3, width)
    both = torch.cat([gates, drawn(3, width)], -1).requires_grad_()
    gate, up = both.chunk(2, -1)
    expected, by_out = F.silu(gate) * up, drawn(3, width, seed=1)
    (expected * by_out).sum().backward()
    parts = both.detach().chunk(2, -1)
    torch.testing.assert_close(kernels.swiglu(*parts), expected, **CLOSE)
    torch.testing.assert_close(kernels.swiglu_backward(*parts, by_out), both.grad, **CLOSE)


@TRITON_ALONE
@pytest.mark.parametrize("vocabulary", [7, 5000])
def test_logprobs_of_logits_and_their_gradients_are_those_of_torch(kernels: Any, vocabulary: int):
    logits = (4 * drawn(6, vocabulary)).requires_grad_()
    targets = torch.tensor([0, 1, 2, 3, 5, vocabulary - 1])
    temperatures = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0, 0.7])
    # the head is the identity, so that hidden states are logits
    expected = chunked_logprobs(logits, torch.eye(vocabulary), targets, temperatures)
    by = drawn(6, seed=1), drawn(6, seed=2)
    sum((one * weight).sum() for one, weight in zip(expected, by, strict=True)).backward()

    logprobs, entropies, totals = kernels.token_logprobs(logits.detach(), targets, temperatures)
    torch.testing.assert_close((logprobs, entropies), expected, rtol=1e-5, atol=1e-5)
    found = kernels.token_logprobs_backward(
        logits.detach(), targets, temperatures, entropies, totals, *by, out=torch.float32
    )
    torch.testing.assert_close(found, logits.grad, rtol=1e-4, atol=1e-6)


@TRITON_ALONE
def test_logits_far_from_0_give_finite_logprobs(kernels: Any):
    logits = torch.tensor([[1e4, 0.0, -1e4], [-1e4, -1e4, -1e4 + 1.0]])
    logprobs, entropies, _ = kernels.token_logprobs(logits, torch.tensor([2, 2]), torch.ones(2))
    torch.testing.assert_close(logprobs, torch.tensor([-2e4, float(logits[1].log_softmax(-1)[2])]))
    assert entropies.isfinite().all()


@TRITON_ALONE
def test_a_logit_that_is_no_number_shows_in_its_row_alone(kernels: Any):
    logits = drawn(3, 5000)
    logits[1, 4321] = float("nan")
    logprobs, entropies, _ = kernels.token_logprobs(logits, torch.zeros(3, dtype=torch.int64), torch.ones(3))
    assert logprobs.isnan().tolist() == entropies.isnan().tolist() == [False, True, False]
