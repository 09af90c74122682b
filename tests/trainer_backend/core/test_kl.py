"""The KL to the reference, as a number, as a loss and as a reward, against sums over a whole vocabulary."""

import math

import pytest
import torch

from trainer_backend.core.kl import KL_ESTIMATORS, kl_loss
from trainer_backend.core.kl_reward import ScoredTokens, kl_estimates, kl_rewards
from trainer_backend.errors import RewardError

ESTIMATORS = {"k1": lambda d: d, **KL_ESTIMATORS}
# a decision of two tokens and one of one
SCORED = ScoredTokens([[-1.0, -2.0], [-0.5]], [[-1.5, -1.0], [-0.5]])


@pytest.mark.parametrize(
    ("kind", "expected"),
    # d is 0.5, -1 and 0; the values are those that verl's kl_penalty prints
    [("k1", [0.5, -1.0]), ("k2", [0.125, 0.5]), ("k3", [0.106531, 0.718282])],
)
def test_a_decision_pays_for_the_sum_over_its_own_tokens(kind, expected):
    estimates = kl_estimates(SCORED, kind)
    assert estimates[0] == pytest.approx(expected, abs=1e-6)
    assert estimates[1] == [0.0]
    assert kl_rewards(estimates, 0.1) == pytest.approx([-0.1 * sum(expected), 0.0], abs=1e-6)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_the_estimates_of_rewards_are_those_of_the_loss(kind):
    own, other = [-0.3, -25.0, -0.1], [-4.0, -1.0, -30.0]  # beyond the limit of a log-ratio too
    d = (torch.tensor(own) - torch.tensor(other)).clamp(-20, 20)
    found = kl_estimates(ScoredTokens([own], [other]), kind)[0]
    assert found == pytest.approx(ESTIMATORS[kind](d).tolist(), rel=1e-5)


def make_policies():
    """Logits of a policy over four tokens, and the log-probs of its reference."""
    reference = torch.tensor([0.0, 0.5, -0.2, 0.4], dtype=torch.float64)
    step = torch.tensor([0.3, -1.5, 0.7, -0.3], dtype=torch.float64)
    return (reference + step).requires_grad_(), reference.log_softmax(-1)


def differentiate(of_policy) -> torch.Tensor:
    logits, reference = make_policies()
    of_policy(logits.log_softmax(-1), reference).backward()
    return logits.grad


def reverse_kl(logp, reference):
    return (logp.exp() * (logp - reference)).sum()


def forward_kl(logp, reference):
    return (reference.exp() * (reference - logp)).sum()


def as_a_loss(kind: str) -> torch.Tensor:
    """E over the policy's own samples of d k(log pi(x) - log ref(x)) / d logits: what sampling estimates."""
    return differentiate(
        lambda logp, reference: (logp.exp().detach() * ESTIMATORS[kind](logp - reference)).sum()
    )


def as_a_reward(kind: str) -> torch.Tensor:
    """E over the policy's samples of reward * grad log policy: what REINFORCE follows, coefficient 1."""

    def surrogate(logp, reference):
        rewards = [
            kl_rewards(kl_estimates(ScoredTokens([[own]], [[other]]), kind), 1.0)[0]
            for own, other in zip(logp.tolist(), reference.tolist(), strict=True)
        ]
        return (logp.exp().detach() * torch.tensor(rewards, dtype=torch.float64) * logp).sum()

    return differentiate(surrogate)


def test_k1_and_k3_are_unbiased_estimates_of_the_kl():
    logits, reference = make_policies()
    logp = logits.detach().log_softmax(-1)
    for kind in ("k1", "k3"):
        expectation = (logp.exp() * ESTIMATORS[kind](logp - reference)).sum()
        torch.testing.assert_close(expectation, reverse_kl(logp, reference))


def test_as_a_loss_k1_has_no_gradient_and_k2_and_k3_descend_a_kl_each():
    torch.testing.assert_close(as_a_loss("k1"), torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(as_a_loss("k2"), differentiate(reverse_kl))
    torch.testing.assert_close(as_a_loss("k3"), differentiate(forward_kl))


def test_as_a_reward_k1_descends_the_kl_and_k3_climbs_the_other_one_too():
    torch.testing.assert_close(as_a_reward("k1"), -differentiate(reverse_kl))
    torch.testing.assert_close(as_a_reward("k3"), differentiate(forward_kl) - differentiate(reverse_kl))


@pytest.mark.parametrize(
    ("kind", "expected", "slope"), [("k2", 0.125, 0.5), ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5))]
)
def test_the_loss_is_a_weighted_sum_that_ignores_padding(kind, expected, slope):
    logprobs, reference = torch.tensor([-1.0, math.nan, -1.0]), torch.tensor([-1.5, -1.0, -1.5])
    logprobs.requires_grad_()
    weights = torch.tensor([0.5, 0.0, 0.5])
    loss = kl_loss(logprobs, reference, weights, kind=kind)
    loss.backward()
    assert loss.item() == pytest.approx(expected)
    assert logprobs.grad.tolist() == pytest.approx([slope / 2, 0.0, slope / 2])


@pytest.mark.parametrize("reference_T", [[[-1.0], [-0.5]], [[-1.0, math.nan], [-0.5]]])
def test_a_token_without_both_log_probs_is_named(reference_T):
    with pytest.raises(RewardError, match=r"r-1.*turn 1.*the KL needs both of each token"):
        kl_estimates(ScoredTokens([[-1.0, -2.0], [-0.5]], reference_T), "k1", rollout_id="r-1")


def test_a_last_decision_that_sampled_nothing_pays_nothing():
    estimates = kl_estimates(SCORED.over(4), "k1")
    assert estimates == [[0.5, -1.0], [0.0], [], []]
    assert kl_rewards(estimates, 2.0) == [1.0, 0.0, 0.0, 0.0]
