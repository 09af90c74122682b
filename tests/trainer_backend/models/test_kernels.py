"""Triton's kernels of a layer are what torch's operators compute, forward and backward.

Interpreted where there is no GPU.
"""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer_backend.core.logprobs import chunked_logprobs

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed: make test-kernel"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def rms(states: Tensor, weight: Tensor) -> Tensor:
    return states / (states.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotated(heads: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cos_TD[:, None] + torch.cat([-second, first], -1) * sin_TD[:, None]


def angles(tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    angles_TH = torch.arange(tokens)[:, None] * 100.0 ** -torch.linspace(0, 1, dim // 2)
    return tuple(torch.cat([of, of], -1).to(DEVICE) for of in (angles_TH.cos(), angles_TH.sin()))


@pytest.mark.parametrize("width", [64, 100])
@pytest.mark.parametrize("adds", [True, False])
def test_a_norm_and_its_gradients_are_those_of_the_definition(width: int, adds: bool):
    from trainer_backend.models.kernels import rms_norm, rms_norm_backward

    states, added, weight = drawn(7, width), drawn(7, width, seed=1), drawn(width, seed=2)
    given = [tensor.clone().requires_grad_() for tensor in (states, added, weight)]
    sums = given[0] + given[1] if adds else given[0]
    expected = rms(sums, given[2])
    by_out, by_sums = drawn(7, width, seed=3), drawn(7, width, seed=4)
    (expected * by_out + sums * by_sums).sum().backward()

    kept = torch.empty_like(states)
    found = rms_norm(states, added if adds else None, weight, EPS, sums_TW=kept, out=torch.float32)
    torch.testing.assert_close(found, expected, **CLOSE)
    kept = kept if adds else states
    torch.testing.assert_close(kept, sums, **CLOSE)
    dtype = torch.float32 if adds else None
    by_states, by_added, by_weight = rms_norm_backward(
        kept, weight, by_out, by_sums, EPS, added=dtype, weighs=True
    )
    torch.testing.assert_close(by_states, given[0].grad, **CLOSE)
    torch.testing.assert_close(by_weight, given[2].grad, **CLOSE)
    assert (by_added is None) == (not adds)
    if by_added is not None:
        torch.testing.assert_close(by_added, given[1].grad, **CLOSE)
    alone, _, nothing = rms_norm_backward(kept, weight, by_out, None, EPS, added=None, weighs=False)
    torch.testing.assert_close(alone + by_sums, by_states, **CLOSE)
    assert nothing is None


def test_a_sum_may_be_written_over_the_states():
    from trainer_backend.models.kernels import rms_norm

    states, added, weight = drawn(3, 32), drawn(3, 32, seed=1), drawn(32, seed=2)
    expected = rms(states + added, weight), states + added
    found = rms_norm(states, added, weight, EPS, sums_TW=states, out=torch.float32)
    torch.testing.assert_close((found, states), expected, **CLOSE)


@pytest.mark.parametrize("dim", [32, 24, 80])
@pytest.mark.parametrize("has_norm", [True, False])
def test_rotated_heads_and_their_gradients_are_those_of_the_definition(dim: int, has_norm: bool):
    from trainer_backend.models.kernels import rotary, rotary_backward

    tokens, heads = 5, 11
    wide = drawn(tokens, heads + 2, dim)  # as a fused product leaves them: values lie behind
    weight = drawn(dim, seed=1)
    cos, sin = angles(tokens, dim)
    states = wide[:, :heads].clone().requires_grad_()
    given = weight.clone().requires_grad_()
    expected = rotated(rms(states, given) if has_norm else states, cos, sin)
    by_out = drawn(tokens, heads, dim, seed=2)
    (expected * by_out).sum().backward()

    weights = (weight, weight) if has_norm else None
    found = rotary(wide[:, :heads], weights, cos, sin, None, queries=heads, eps=EPS, out=torch.float32)
    torch.testing.assert_close(found, expected, **CLOSE)
    by_wide = torch.empty_like(wide)
    by_heads = by_wide[:, 1:-1]
    by_weight = rotary_backward(
        wide[:, :heads], weight if has_norm else None, cos, sin, by_out, by_heads_TSD=by_heads, eps=EPS,
        weighs=True,
    )  # fmt: skip
    torch.testing.assert_close(by_heads, states.grad, **CLOSE)
    if has_norm:
        torch.testing.assert_close(by_weight, given.grad, rtol=1e-5, atol=1e-5)


def test_queries_and_keys_have_norms_of_their_own_and_positions_may_be_any():
    from trainer_backend.models.kernels import rotary

    heads, q_weight, k_weight = drawn(4, 6, 16), drawn(16, seed=1), drawn(16, seed=2)
    cos, sin = angles(50, 16)
    positions = torch.tensor([49, 0, 7, 7], device=DEVICE)
    negated = torch.cat([-sin[:, :8], sin[:, 8:]], -1)  # as the engine's tables have it
    found = rotary(
        heads, (q_weight, k_weight), cos, negated, positions, queries=4, eps=EPS, out=torch.float32
    )
    normed = torch.cat([rms(heads[:, :4], q_weight), rms(heads[:, 4:], k_weight)], 1)
    torch.testing.assert_close(found, rotated(normed, cos[positions], sin[positions]), **CLOSE)


@pytest.mark.parametrize("width", [48, 1100])
def test_a_gate_and_its_gradients_are_those_of_the_definition(width: int):
    from trainer_backend.models.kernels import swiglu, swiglu_backward

    both = drawn(3, 2 * width).requires_grad_()
    gate, up = both.chunk(2, -1)
    expected, by_out = F.silu(gate) * up, drawn(3, width, seed=1)
    (expected * by_out).sum().backward()
    parts = both.detach().chunk(2, -1)
    torch.testing.assert_close(swiglu(*parts), expected, **CLOSE)
    torch.testing.assert_close(swiglu_backward(*parts, by_out), both.grad, **CLOSE)


@pytest.mark.parametrize("vocabulary", [7, 5000])
def test_logprobs_of_logits_and_their_gradients_are_those_of_torch(vocabulary: int):
    from trainer_backend.models.kernels import token_logprobs, token_logprobs_backward

    logits = (4 * drawn(6, vocabulary)).requires_grad_()
    targets = torch.tensor([0, 1, 2, 3, 5, vocabulary - 1], device=DEVICE)
    temperatures = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0, 0.7], device=DEVICE)
    # the head is the identity, so that hidden states are logits
    expected = chunked_logprobs(logits, torch.eye(vocabulary, device=DEVICE), targets, temperatures)
    by = drawn(6, seed=1), drawn(6, seed=2)
    sum((one * weight).sum() for one, weight in zip(expected, by, strict=True)).backward()

    logprobs, entropies, totals = token_logprobs(logits.detach(), targets, temperatures)
    torch.testing.assert_close((logprobs, entropies), expected, rtol=1e-5, atol=1e-5)
    found = token_logprobs_backward(
        logits.detach(), targets, temperatures, entropies, totals, *by, out=torch.float32
    )
    torch.testing.assert_close(found, logits.grad, rtol=1e-4, atol=1e-6)


def test_logits_far_from_0_give_finite_logprobs():
    from trainer_backend.models.kernels import token_logprobs

    logits = torch.tensor([[1e4, 0.0, -1e4], [-1e4, -1e4, -1e4 + 1.0]], device=DEVICE)
    logprobs, entropies, _ = token_logprobs(
        logits, torch.tensor([2, 2], device=DEVICE), torch.ones(2, device=DEVICE)
    )
    expected = torch.tensor([-2e4, float(logits[1].log_softmax(-1)[2])])
    torch.testing.assert_close(logprobs.cpu(), expected)
    assert entropies.isfinite().all()


def test_a_logit_that_is_no_number_shows_in_its_row_alone():
    from trainer_backend.models.kernels import token_logprobs

    logits = drawn(3, 5000)
    logits[1, 4321] = float("nan")
    logprobs, entropies, _ = token_logprobs(
        logits, torch.zeros(3, dtype=torch.int64, device=DEVICE), torch.ones(3, device=DEVICE)
    )
    assert logprobs.isnan().tolist() == entropies.isnan().tolist() == [False, True, False]
