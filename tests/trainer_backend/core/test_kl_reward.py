"""KL in the reward: its numbers by hand, and what each estimate pulls towards, by enumeration."""

import math

import pytest
import torch

from trainer_backend.core.kl import KL_ESTIMATORS
from trainer_backend.core.kl_reward import ScoredTokens, kl_estimates, kl_rewards
from trainer_backend.errors import RewardError

# a decision of two tokens and one of one
SCORED = ScoredTokens([[-1.0, -2.0], [-0.5]], [[-1.5, -1.0], [-0.5]])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # d is 0.5, -1 and 0; the values are those that verl's kl_penalty prints
        ("k1", [0.5, -1.0]),
        ("k2", [0.125, 0.5]),
        ("k3", [0.106531, 0.718282]),
    ],
)
def test_a_decision_pays_for_the_sum_over_its_own_tokens(kind, expected):
    estimates = kl_estimates(SCORED, kind)
    assert estimates[0] == pytest.approx(expected, abs=1e-6)
    assert estimates[1] == [0.0]
    assert kl_rewards(estimates, 0.1) == pytest.approx([-0.1 * sum(expected), 0.0], abs=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_estimates_are_those_of_the_loss(kind):
    own, other = [-0.3, -25.0, -0.1], [-4.0, -1.0, -30.0]  # beyond the limit of a log-ratio too
    d = (torch.tensor(own) - torch.tensor(other)).clamp(-20, 20)
    found = kl_estimates(ScoredTokens([own], [other]), kind)[0]
    assert found == pytest.approx(KL_ESTIMATORS[kind](d).tolist(), rel=1e-5)


def policies(distance: float = 1.0):
    """Over four tokens; the policy lies so far from the reference."""
    reference = torch.tensor([0.0, 0.5, -0.2, 0.4], dtype=torch.float64)
    step = torch.tensor([0.3, -1.5, 0.7, -0.3], dtype=torch.float64)
    return (reference + distance * step).requires_grad_(), reference.log_softmax(-1)


def as_a_reward(kind: str, distance: float = 1.0) -> torch.Tensor:
    """E over the policy's samples of reward * grad log policy: what REINFORCE follows, coefficient 1."""
    logits, reference = policies(distance)
    logp = logits.log_softmax(-1)
    rewards = [
        kl_rewards(kl_estimates(ScoredTokens([[own]], [[other]]), kind), 1.0)[0]
        for own, other in zip(logp.tolist(), reference.tolist(), strict=True)
    ]
    (logp.exp().detach() * torch.tensor(rewards, dtype=torch.float64) * logp).sum().backward()
    return logits.grad


def gradient_of(kl, distance: float = 1.0) -> torch.Tensor:
    logits, reference = policies(distance)
    kl(logits.log_softmax(-1), reference).backward()
    return logits.grad


def to_the_reference(logp, reference):
    return (logp.exp() * (logp - reference)).sum()


def from_the_reference(logp, reference):
    return (reference.exp() * (reference - logp)).sum()


def test_k1_as_a_reward_descends_the_kl_to_the_reference():
    torch.testing.assert_close(as_a_reward("k1"), -gradient_of(to_the_reference))


def test_k3_as_a_reward_descends_one_kl_and_climbs_the_other():
    torch.testing.assert_close(
        as_a_reward("k3"), gradient_of(from_the_reference) - gradient_of(to_the_reference)
    )


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_near_the_reference_k2_and_k3_as_rewards_pull_next_to_nothing(kind):
    def strength(distance):
        return (as_a_reward(kind, distance).norm() / as_a_reward("k1", distance).norm()).item()

    assert strength(0.01) < 0.02
    assert strength(0.001) == pytest.approx(strength(0.01) / 10, rel=0.1)  # one order less than k1


def test_over_two_tokens_k1_has_the_gradient_of_the_kl_of_whole_decisions():
    # The second token's policy depends on the first; the reward is the sum, given to both.
    torch.manual_seed(0)
    first, second = torch.randn(3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    first.requires_grad_(), second.requires_grad_()
    ref_a = torch.randn(3, dtype=torch.float64).log_softmax(-1)
    ref_b = torch.randn(3, 3, dtype=torch.float64).log_softmax(-1)
    a, b = first.log_softmax(-1), second.log_softmax(-1)
    joint, ref = a[:, None] + b, ref_a[:, None] + ref_b
    exact = torch.autograd.grad((joint.exp() * (joint - ref)).sum(), (first, second), retain_graph=True)
    surrogate = torch.zeros((), dtype=torch.float64)
    for i in range(3):
        for j in range(3):
            scored = ScoredTokens([[a[i].item(), b[i, j].item()]], [[ref_a[i].item(), ref_b[i, j].item()]])
            (reward,) = kl_rewards(kl_estimates(scored, "k1"), 1.0)
            surrogate = surrogate + joint[i, j].exp().detach() * reward * joint[i, j]
    for found, expected in zip(torch.autograd.grad(surrogate, (first, second)), exact, strict=True):
        torch.testing.assert_close(found, -expected)


@pytest.mark.parametrize("reference_T", [[[-1.0], [-0.5]], [[-1.0, math.nan], [-0.5]]])
def test_a_token_without_both_log_probs_is_named(reference_T):
    with pytest.raises(RewardError, match=r"r-1.*turn 1.*the KL needs both of each token"):
        kl_estimates(ScoredTokens([[-1.0, -2.0], [-0.5]], reference_T), "k1", rollout_id="r-1")


def test_a_last_decision_that_sampled_nothing_pays_nothing():
    estimates = kl_estimates(SCORED.over(4), "k1")
    assert estimates == [[0.5, -1.0], [0.0], [], []]
    assert kl_rewards(estimates, 2.0) == [1.0, 0.0, 0.0, 0.0]
