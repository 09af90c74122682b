"""The three objectives for samples of a fixed policy, by hand and by what they must equal."""

from dataclasses import replace
from math import exp, log

import pytest
import torch

from trainer_backend.core.behaviour import WeightKeys, behaviour_weights
from trainer_backend.core.loss_metrics import clip_metrics
from trainer_backend.core.losses import ClipKeys, clipped_policy_loss, policy_gradient_loss
from trainer_backend.core.objective import Objective, Tokens

KINDS = ["decoupled", "single_ratio", "reinforce"]
LEVELS = ["token", "decision", "episode"]
CLIP = ClipKeys(clip_low=0.2, clip_high=0.25)
ADVANTAGES = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
WEIGHTS = torch.full((4,), 0.25, dtype=torch.float64)
UNITS = torch.tensor([0, 0, 1, 1])
NOW = torch.tensor([-1.0, -2.0, -0.5, -1.5], dtype=torch.float64)


def objective(kind, level="token", cap=2.0):
    return Objective(
        kind,
        clipped_policy_loss,
        CLIP,
        level,
        WeightKeys(behaviour_weight_cap=cap, behaviour_weight_level=level),
    )


def tokens(of, *, now=NOW, proximal=NOW, behaviour=NOW):
    units = None if of.weighting.behaviour_weight_level == "token" else UNITS
    return Tokens(
        logprobs=now.clone().requires_grad_(),
        proximal_logprobs=proximal,
        behaviour_logprobs=behaviour,
        advantages=ADVANTAGES,
        weights=WEIGHTS,
        behaviour_weights=behaviour_weights(proximal, behaviour, units, of.weighting),
        units=UNITS,
    )


def loss_and_gradient(of, given):
    loss = of.surrogate(given, of.unit_logs(given))
    loss.backward()
    return loss.item(), given.logprobs.grad


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_an_equal_policy_have_ratio_1_and_train_as_the_actors_own(kind, level):
    of = objective(kind, level)
    given = tokens(of)
    levelled, denominators = of.level_logprobs(given, of.unit_logs(given)), of.denominators(given)
    assert torch.equal(levelled, denominators)
    found = clip_metrics(levelled, denominators, ADVANTAGES, WEIGHTS, CLIP)
    assert (found["loss/ratio_min"], found["loss/ratio_max"]) == (1.0, 1.0)
    assert given.behaviour_weights.tolist() == [1.0] * 4
    loss, gradient = loss_and_gradient(of, given)
    own = NOW.clone().requires_grad_()
    on_policy = policy_gradient_loss if kind == "reinforce" else clipped_policy_loss
    expected = on_policy(own, NOW, ADVANTAGES, WEIGHTS, CLIP)
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(gradient, own.grad)
    torch.testing.assert_close(gradient, -WEIGHTS * ADVANTAGES, msg="the policy gradient, whichever it is")


def test_by_hand_with_three_policies_that_differ():
    # pi/p = 1.5, 0.5, 1, 1;  p/mu = 0.5, 3, 1, 1, held at 2;  so pi/mu = 0.75, 1.5, 1, 1
    proximal = NOW - torch.tensor([log(1.5), log(0.5), 0.0, 0.0])
    behaviour = proximal - torch.tensor([log(0.5), log(3.0), 0.0, 0.0])
    columns = {"proximal": proximal, "behaviour": behaviour}
    # A = 1, -2: both are held by the clip around p, and neither by that around mu
    decoupled = objective("decoupled")
    loss, gradient = loss_and_gradient(decoupled, tokens(decoupled, **columns))
    assert loss == pytest.approx(-(0.5 * 1.25 * 1 + 2 * 0.8 * -2 + 0.5 + 3) / 4)
    assert gradient.tolist() == pytest.approx([0.0, 0.0, -0.125, -0.75])
    single = objective("single_ratio")
    loss, gradient = loss_and_gradient(single, tokens(single, **columns))
    assert loss == pytest.approx(-(0.75 * 1 + 1.5 * -2 + 0.5 + 3) / 4)
    assert gradient.tolist() == pytest.approx([-0.75 / 4, 1.5 * 2 / 4, -0.125, -0.75])
    reinforce = objective("reinforce", cap=1.25)
    loss, gradient = loss_and_gradient(reinforce, tokens(reinforce, **columns))
    assert loss == pytest.approx(-(0.75 * 1 * -1 + 1.25 * -2 * -2 + 0.5 * -0.5 + 3 * -1.5) / 4)
    assert gradient.tolist() == pytest.approx([-0.75 / 4, 1.25 * 2 / 4, -0.125, -0.75])


def test_explicit_weights_of_a_unit_are_those_of_the_policy_as_it_is_now():
    # of the first unit pi/mu = 1.2 * 1.5 = 1.8, whatever the proximal policy said; of the second e^-1
    of = objective("reinforce", "decision")
    behaviour = NOW - torch.tensor([log(1.2), log(1.5), 0.0, -1.0])
    for proximal in (NOW, NOW - 3.0):
        _, gradient = loss_and_gradient(of, tokens(of, proximal=proximal, behaviour=behaviour))
        factors = torch.tensor([1.8, 1.8, exp(-1), exp(-1)], dtype=torch.float64)
        torch.testing.assert_close(gradient, -WEIGHTS * ADVANTAGES * factors)


def test_what_has_to_be_known_whole_is_the_unit_of_the_ratio_or_of_the_weight():
    both = Objective(
        "decoupled",
        clipped_policy_loss,
        CLIP,
        "decision",
        WeightKeys(behaviour_weight_cap=2.0, behaviour_weight_level="episode"),
    )
    assert both.unit_level == "decision"
    assert replace(both, kind="reinforce").unit_level == "episode"
    assert replace(both, kind="single_ratio").unit_level == "decision"
