"""Dual clip, CISPO, SAPO, plain policy gradient and ratios of whole units, by hand and by identity."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_backend.core.losses import (
    ClipKeys,
    SapoKeys,
    cispo_loss,
    clipped_policy_loss,
    level_ratios,
    log_ratio,
    policy_gradient_loss,
    sapo_loss,
    unit_means,
)
from trainer_backend.job.training_table import TrainingTable

# The example of prior-art/verl.md 3.4, whose values are those that verl prints.
OLD = torch.tensor([-1.0, -1.0, -1.0, -1.0])
NEW = torch.tensor([-0.5, -1.5, 0.5, -1.1])
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -1.0])
WEIGHTS = torch.full((4,), 0.25)
CLIP = TrainingTable(clip_low=0.2, clip_high=0.28)


def loss_and_gradient(loss, new=NEW, config=CLIP):
    new = new.clone().requires_grad_()
    value = loss(new, OLD, ADVANTAGES, WEIGHTS, config)
    value.backward()
    return value.item(), new.grad.tolist()


def test_the_dual_clip_holds_a_bad_token_that_became_far_likelier():
    # ratios e^.5 (held at 1.28), e^-.5 (free), e^1.5 = 4.48 (bad: held at 3), e^-.1 (free)
    value, gradient = loss_and_gradient(
        clipped_policy_loss, config=ClipKeys(clip_low=0.2, clip_high=0.28, clip_dual=3.0)
    )
    assert value == pytest.approx(-(1.28 + math.exp(-0.5) - 3.0 - math.exp(-0.1)) / 4)
    assert value == pytest.approx(0.504577, abs=1e-6)
    assert gradient == pytest.approx([0.0, -0.15163, 0.0, 0.22621], abs=1e-5)


def test_a_dual_clip_inside_the_clip_range_is_refused():
    with pytest.raises(ValueError, match="clip_dual"):
        ClipKeys(clip_high=0.5, clip_dual=1.2)


def test_cispo_weighs_the_gradient_by_a_clipped_ratio():
    # ratios e^.5, e^-.5, e^1.5, e^-.1 -> 1.28, 0.8, 1.28, e^-.1: no token is without a gradient
    value, gradient = loss_and_gradient(cispo_loss)
    weights = [1.28, 0.8, 1.28, math.exp(-0.1)]
    terms = [w * a * x for w, a, x in zip(weights, ADVANTAGES.tolist(), NEW.tolist(), strict=True)]
    assert value == pytest.approx(-sum(terms) / 4)
    assert value == pytest.approx(0.371170, abs=1e-6)
    assert gradient == pytest.approx(
        [-w * a / 4 for w, a in zip(weights, ADVANTAGES.tolist(), strict=True)], rel=1e-6
    )


def test_the_plain_policy_gradient_does_not_look_at_the_ratio():
    value, gradient = loss_and_gradient(policy_gradient_loss)
    assert value == pytest.approx(-(-0.5 - 1.5 - 0.5 + 1.1) / 4)
    assert gradient == [-0.25, -0.25, 0.25, 0.25]


@pytest.mark.parametrize("loss", [clipped_policy_loss, cispo_loss, sapo_loss, policy_gradient_loss])
def test_where_nothing_has_moved_yet_all_losses_have_the_policy_gradient(loss):
    _, gradient = loss_and_gradient(loss, new=OLD)
    assert gradient == pytest.approx([-a / 4 for a in ADVANTAGES.tolist()])


@pytest.mark.parametrize("loss", [clipped_policy_loss, cispo_loss, sapo_loss, policy_gradient_loss])
def test_what_stands_where_the_weight_is_0_touches_neither_loss_nor_gradient(loss):
    new = torch.tensor([-0.5, float("nan")], requires_grad=True)
    value = loss(
        new, torch.tensor([-1.0, float("inf")]), torch.tensor([1.0, float("nan")]),
        torch.tensor([1.0, 0.0]), CLIP,
    )  # fmt: skip
    value.backward()
    assert torch.isfinite(value) and torch.isfinite(new.grad).all() and new.grad[1] == 0


def level_of(units, new, weights=WEIGHTS):
    return level_ratios(unit_means(units, log_ratio(new, OLD, weights), weights), new, OLD)


def test_every_token_of_a_unit_has_the_units_ratio():
    # two tokens each: means of the log-ratios (.5 - .5) / 2 = 0 and (1.5 - .1) / 2 = .7
    units = torch.tensor([0, 0, 1, 1])
    found = level_of(units, NEW) - OLD
    assert found.tolist() == pytest.approx([0.0, 0.0, 0.7, 0.7], abs=1e-6)


def test_tokens_of_weight_0_do_not_count_in_a_unit():
    units = torch.zeros(4, dtype=torch.int64)
    found = level_of(units, NEW, torch.tensor([0.5, 0.5, 0.0, 0.0])) - OLD
    assert found[:2].tolist() == pytest.approx([0.0, 0.0])


def test_the_gradient_of_a_units_tokens_is_that_of_its_ratio():
    # d/dx of A * exp(mean(x - old)): A * s / tokens for each of them
    units, advantages = torch.tensor([0, 0, 0, 1]), torch.tensor([1.0, 1.0, 1.0, -1.0])
    small = OLD + torch.tensor([0.05, -0.1, 0.02, 0.1])
    new = small.clone().requires_grad_()
    per_unit = torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 2])  # every unit counts the same
    level = level_of(units, new, per_unit)
    clipped_policy_loss(level, OLD, advantages, per_unit, CLIP).backward()
    direct = small.clone().requires_grad_()
    first, second = (direct[:3] - OLD[:3]).mean().exp(), (direct[3:] - OLD[3:]).mean().exp()
    (-(first - second) / 2).backward()
    assert new.grad.tolist() == pytest.approx(direct.grad.tolist(), rel=1e-5)


@given(st.lists(st.floats(-1, 1), min_size=4, max_size=4))
def test_units_of_one_token_change_nothing(moves):
    new = OLD + torch.tensor(moves)
    level = level_of(torch.arange(4), new)
    assert torch.allclose(level, new, atol=1e-6)


def test_cispo_of_the_paper_has_no_lower_bound_and_holds_above():
    # ratios e^-2 and e^2 = 7.4: the first is kept, the second held at 5
    logprobs = torch.tensor([-3.0, 1.0], requires_grad=True)
    one_sided = ClipKeys(clip_low=1.0, clip_high=4.0)
    weights = torch.full((2,), 0.5)
    cispo_loss(logprobs, torch.full((2,), -1.0), torch.tensor([1.0, -1.0]), weights, one_sided).backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.5 * math.exp(-2), 0.5 * 5.0], rel=1e-6)


def test_the_soft_gate_by_hand():
    # ratio 1 + ln 3 at tau 1: sigmoid 3/4, gate 3; ratio 1 + 2 ln 3 at tau 1/2: sigmoid 3/4, gate 6
    ratios = torch.tensor([1 + math.log(3), 1 + 2 * math.log(3)], dtype=torch.float64)
    logprobs = ratios.log().requires_grad_()
    advantages, weights = torch.tensor([2.0, -1.0]), torch.tensor([0.5, 0.25])
    config = SapoKeys(tau_pos=1.0, tau_neg=0.5)
    loss = sapo_loss(logprobs, torch.zeros(2, dtype=torch.float64), advantages, weights, config)
    assert loss.item() == pytest.approx(-(0.5 * 3 * 2 - 0.25 * 6 * 1))
    loss.backward()
    # -w * 4 * 3/4 * 1/4 * ratio * A
    expected = [-0.5 * 0.75 * (1 + math.log(3)) * 2, 0.25 * 0.75 * (1 + 2 * math.log(3))]
    assert logprobs.grad.tolist() == pytest.approx(expected)


LOG_RATIOS = st.lists(st.floats(-6, 6), min_size=4, max_size=4)
TAUS = st.floats(0.1, 8)


@given(LOG_RATIOS, TAUS, TAUS)
def test_sapo_is_trls_formula_and_its_gradient_that_of_finite_differences(moves, tau_pos, tau_neg):
    old, advantages, weights = (column.double() for column in (OLD, ADVANTAGES, WEIGHTS))
    config = SapoKeys(tau_pos=tau_pos, tau_neg=tau_neg)

    def trl(logprobs):
        temperatures = torch.where(advantages > 0, old.new_tensor(tau_pos), old.new_tensor(tau_neg))
        soft = torch.sigmoid(temperatures * ((logprobs - old).exp() - 1)) * 4 / temperatures
        return (-soft * advantages).mean()

    new = (old + torch.tensor(moves, dtype=torch.float64)).requires_grad_()
    loss = sapo_loss(new, old, advantages, weights, config)
    assert loss.item() == pytest.approx(trl(new).item(), rel=1e-12)
    loss.backward()
    for k in range(4):
        step = torch.zeros(4, dtype=torch.float64)
        step[k] = 1e-6
        with torch.no_grad():
            ahead, behind = (sapo_loss(new + d, old, advantages, weights, config) for d in (step, -step))
        assert new.grad[k].item() == pytest.approx((ahead - behind).item() / 2e-6, rel=1e-5, abs=1e-7)


def test_the_gradient_of_a_far_ratio_fades_and_faster_with_a_higher_tau():
    far = OLD + torch.tensor([2.0, -1.0, 25.0, 1.0])
    slow, fast = (
        loss_and_gradient(sapo_loss, new=far, config=SapoKeys(tau_pos=tau, tau_neg=tau))[1]
        for tau in (0.5, 2.0)
    )
    assert slow[2] == fast[2] == 0.0, "beyond the limit of log-ratios"
    # tokens 1 and 4 are far above 1
    assert 0 < abs(fast[0]) < abs(slow[0]) and 0 < abs(fast[3]) < abs(slow[3])


@pytest.mark.parametrize("taus", [{"tau_pos": 0.0}, {"tau_neg": -1.0}, {"tau_pos": math.inf}])
def test_a_temperature_that_is_not_positive_is_refused(taus):
    with pytest.raises(ValueError, match="tau_"):
        SapoKeys(**taus)
