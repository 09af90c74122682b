"""KL estimators, as numbers and as losses, against sums over a whole vocabulary."""

import math

import pytest
import torch

from trainer_backend.core.kl import KL_ESTIMATORS, kl_estimate, kl_loss

WEIGHTS = torch.full((3,), 1 / 3)
k1, k2, k3 = (KL_ESTIMATORS[name] for name in ("k1", "k2", "k3"))


def policies():
    logits = torch.tensor([0.3, -1.0, 0.5, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 0.5, -0.2, 0.4], dtype=torch.float64).log_softmax(-1)
    return logits, reference


def expected_gradient(of_log_ratio):
    """E over the policy's own samples of d k(log pi(x) - log ref(x)) / d logits: what sampling estimates."""
    logits, reference = policies()
    logp = logits.log_softmax(-1)
    (logp.exp().detach() * of_log_ratio(logp - reference)).sum().backward()
    return logits.grad


def gradient(of_policy):
    logits, reference = policies()
    of_policy(logits.log_softmax(-1), reference).backward()
    return logits.grad


def reverse_kl(logp, reference):
    return (logp.exp() * (logp - reference)).sum()


def forward_kl(logp, reference):
    return (reference.exp() * (reference - logp)).sum()


def test_the_three_estimates_by_hand():
    d = torch.tensor([0.5, -1.0, 0.0])
    assert k1(d).tolist() == [0.5, -1.0, 0.0]
    assert k2(d).tolist() == [0.125, 0.5, 0.0]
    assert k3(d).tolist() == pytest.approx([math.exp(-0.5) - 0.5, math.e - 2, 0.0], abs=1e-7)


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_are_unbiased_estimates_of_the_kl(estimator):
    logits, reference = policies()
    logp = logits.detach().log_softmax(-1)
    expectation = (logp.exp() * estimator(logp - reference)).sum()
    torch.testing.assert_close(expectation, reverse_kl(logp, reference))


def test_as_a_loss_k1_has_no_expected_gradient():
    torch.testing.assert_close(expected_gradient(k1), torch.zeros(4, dtype=torch.float64))


def test_as_a_loss_k2_descends_the_kl_to_the_reference_and_k3_the_one_from_it():
    torch.testing.assert_close(expected_gradient(k2), gradient(reverse_kl))
    torch.testing.assert_close(expected_gradient(k3), gradient(forward_kl))


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_an_estimate_is_a_weighted_sum_that_ignores_padding(name):
    logprobs, reference = torch.tensor([-1.0, math.nan, -1.0]), torch.tensor([-1.5, -1.0, -1.5])
    weights = torch.tensor([0.5, 0.0, 0.5])
    expected = {"k1": 0.5, "k2": 0.125, "k3": math.exp(-0.5) - 0.5}[name]
    assert kl_estimate(logprobs, reference, weights, name=name).item() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_a_kl_loss_is_the_estimate_with_a_gradient(name):
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    reference = torch.tensor([-1.5, -1.0, -0.5])
    loss = kl_loss(logprobs, reference, WEIGHTS, name=name)
    loss.backward()
    assert loss.item() == kl_estimate(logprobs, reference, WEIGHTS, name=name).item()
    assert [math.copysign(1, g) if g else 0 for g in logprobs.grad.tolist()] == [1, -1, 0]


def test_k1_is_refused_as_a_loss_with_the_reason():
    with pytest.raises(ValueError, match="k1 as a loss has zero expected gradient"):
        kl_loss(torch.zeros(3), torch.zeros(3), WEIGHTS, name="k1")


def test_an_unknown_estimator_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'k4'; known: k1, k2, k3"):
        kl_estimate(torch.zeros(3), torch.zeros(3), WEIGHTS, name="k4")
