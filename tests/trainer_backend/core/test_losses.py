"""Policy losses and their metrics, by hand and by identity."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_backend.core.advantages.gigpo import GigpoKeys
from trainer_backend.core.critic import OwnCriticKeys
from trainer_backend.core.kl import KlKeys
from trainer_backend.core.loss_metrics import clip_metrics, merge_metrics
from trainer_backend.core.losses import (
    LOSSES,
    ClipKeys,
    SapoKeys,
    cispo_loss,
    clipped_policy_loss,
    entropy_loss,
    level_ratios,
    log_ratio,
    policy_gradient_loss,
    sapo_loss,
    unit_means,
)
from trainer_backend.core.router_loss import RouterKeys
from trainer_backend.job.training_table import TrainingTable

# The example of prior-art/verl.md 3.4; the values to six digits are those that verl prints.
OLD = torch.tensor([-1.0, -1.0, -1.0, -1.0])
NEW = torch.tensor([-0.5, -1.5, 0.5, -1.1])  # ratios e^.5, e^-.5, e^1.5, e^-.1
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -1.0])
WEIGHTS = torch.full((4,), 0.25)
CLIP = TrainingTable(clip_low=0.2, clip_high=0.28)
ONE_UNIT, TWO_UNITS = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, 1, 1])
# With the keys of each.
EVERY_LOSS = {plug.compute: CLIP.read(plug.keys, name) for name, plug in LOSSES.items()}


def loss_and_gradient(loss, new=NEW, old=OLD, advantages=ADVANTAGES, weights=WEIGHTS, keys=None):
    new = new.clone().requires_grad_()
    value = loss(new, old, advantages, weights, keys or EVERY_LOSS[loss])
    value.backward()
    return value.item(), new.grad


def level(units, new, weights=WEIGHTS):
    return level_ratios(unit_means(units, log_ratio(new, OLD, weights), weights), new, OLD)


@pytest.mark.parametrize(
    ("loss", "keys", "expected", "gradient"),
    [
        # The first is held at 1.28. A good token that became unlikelier is never held, nor is a bad one that
        # became likelier, and e^-.1 is inside the range.
        (
            clipped_policy_loss,
            ClipKeys(clip_low=0.2, clip_high=0.28),
            -(1.28 + math.exp(-0.5) - math.exp(1.5) - math.exp(-0.1)) / 4,
            [0.0, -math.exp(-0.5) / 4, math.exp(1.5) / 4, math.exp(-0.1) / 4],
        ),
        (
            clipped_policy_loss,
            ClipKeys(clip_high=0.2, clip_dual=3.0),
            0.524577,
            [0.0, -0.15163, 0.0, 0.22621],
        ),
        # the dual clip holds the bad third token, e^1.5 likelier, at 3
        (
            clipped_policy_loss,
            ClipKeys(clip_high=0.28, clip_dual=3.0),
            0.504577,
            [0.0, -0.15163, 0.0, 0.22621],
        ),
        # ratios 1.28, 0.8, 1.28, e^-.1 as weights: no token is without a gradient
        (cispo_loss, CLIP, 0.371170, [-0.32, -0.2, 0.32, math.exp(-0.1) / 4]),
        (policy_gradient_loss, CLIP, (0.5 + 1.5 + 0.5 - 1.1) / 4, [-0.25, -0.25, 0.25, 0.25]),
    ],
)
def test_losses_and_gradients_by_hand(loss, keys, expected, gradient):
    value, found = loss_and_gradient(loss, keys=keys)
    assert value == pytest.approx(expected, abs=1e-6)
    assert found.tolist() == pytest.approx(gradient, abs=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "held"), [(0.5, 1, 1.28), (0.5, -1, 0), (-0.5, 1, 0), (-0.5, -1, 0.8)]
)
def test_the_clip_holds_only_what_moved_far_enough_in_the_direction_of_its_advantage(ratio, advantage, held):
    one = torch.ones(1)
    given = (one * ratio, one * 0, one * advantage, one)
    value, gradient = loss_and_gradient(clipped_policy_loss, *given)
    assert value == pytest.approx(-advantage * (held or math.exp(ratio)))
    assert (gradient.item() == 0.0) == bool(held)
    metrics = clip_metrics(*given, CLIP)
    assert metrics["loss/clip_low_share"] == float(held == 0.8)
    assert metrics["loss/clip_high_share"] == float(held == 1.28)


@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_where_nothing_has_moved_all_losses_have_the_policy_gradient(loss):
    _, gradient = loss_and_gradient(loss, new=OLD)
    assert gradient.tolist() == pytest.approx([-a / 4 for a in ADVANTAGES.tolist()])


@pytest.mark.parametrize("loss", EVERY_LOSS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_stands_where_the_weight_is_0_touches_neither_loss_nor_gradient(loss, bad):
    weights = torch.tensor([0.25, 0.0, 0.25, 0.25])
    clean, clean_gradient = loss_and_gradient(loss, weights=weights)
    for column in range(3):
        columns = [NEW.clone(), OLD.clone(), ADVANTAGES.clone()]
        columns[column][1] = bad
        value, gradient = loss_and_gradient(loss, *columns, weights)
        assert value == clean and torch.equal(gradient, clean_gradient) and gradient[1] == 0.0


@pytest.mark.parametrize("loss", [clipped_policy_loss, cispo_loss, sapo_loss])
@pytest.mark.parametrize("new", [500.0, -500.0])
def test_a_ratio_beyond_all_bounds_leaves_loss_and_gradient_finite(loss, new):
    one = torch.ones(1)
    value, gradient = loss_and_gradient(loss, one * new, one * 0, one, one)
    assert math.isfinite(value) and gradient.isfinite().all()
    assert loss is cispo_loss or gradient.item() == 0.0


def test_cispo_of_the_paper_has_no_lower_bound():
    # ratios e^-2 and e^2 = 7.4: the first is kept, the second held at 5
    new, old, advantages = (torch.tensor(row) for row in ([-3.0, 1.0], [-1.0, -1.0], [2.0, -1.0]))
    keys = ClipKeys(clip_low=1.0, clip_high=4.0)
    _, gradient = loss_and_gradient(cispo_loss, new, old, advantages, torch.full((2,), 0.5), keys)
    assert gradient.tolist() == pytest.approx([-2.0 * 0.5 * math.exp(-2), 0.5 * 5.0], rel=1e-6)


LOG_RATIOS = st.lists(st.floats(-6, 6), min_size=4, max_size=4)
TAUS = st.floats(0.1, 8)


@settings(max_examples=40)
@given(LOG_RATIOS, TAUS, TAUS)
def test_sapo_is_trls_formula_and_its_gradient_that_of_finite_differences(moves, tau_pos, tau_neg):
    old, advantages, weights = (column.double() for column in (OLD, ADVANTAGES, WEIGHTS))
    keys = SapoKeys(tau_pos=tau_pos, tau_neg=tau_neg)

    def trl(logprobs):
        temperatures = torch.where(advantages > 0, old.new_tensor(tau_pos), old.new_tensor(tau_neg))
        soft = torch.sigmoid(temperatures * ((logprobs - old).exp() - 1)) * 4 / temperatures
        return (-soft * advantages).mean()

    new = old + torch.tensor(moves, dtype=torch.float64)
    value, gradient = loss_and_gradient(sapo_loss, new, old, advantages, weights, keys)
    assert value == pytest.approx(trl(new).item(), rel=1e-12)
    for k in range(4):
        step = torch.zeros(4, dtype=torch.float64)
        step[k] = 1e-6
        ahead, behind = (sapo_loss(new + d, old, advantages, weights, keys) for d in (step, -step))
        assert gradient[k].item() == pytest.approx((ahead - behind).item() / 2e-6, rel=1e-5, abs=1e-7)


def test_every_token_of_a_unit_has_the_ratio_of_its_unit():
    # two tokens each: means of the log-ratios (.5 - .5) / 2 = 0 and (1.5 - .1) / 2 = .7
    assert (level(TWO_UNITS, NEW) - OLD).tolist() == pytest.approx([0.0, 0.0, 0.7, 0.7], abs=1e-6)
    padded = level(ONE_UNIT, NEW, torch.tensor([0.5, 0.0, 0.0, 0.5])) - OLD
    assert padded[[0, 3]].tolist() == pytest.approx([0.2, 0.2]), "tokens of weight 0 do not count"
    gspo, _ = loss_and_gradient(clipped_policy_loss, level(ONE_UNIT, NEW))
    assert gspo == pytest.approx(0.069534, abs=1e-6), "as verl's GSPO of one sequence"


def test_the_gradient_of_a_units_tokens_is_that_of_its_ratio():
    # d/dx of A * exp(mean(x - old)): A * s / tokens for each of them
    units, advantages = torch.tensor([0, 0, 0, 1]), torch.tensor([1.0, 1.0, 1.0, -1.0])
    small = OLD + torch.tensor([0.05, -0.1, 0.02, 0.1])
    new = small.clone().requires_grad_()
    per_unit = torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 2])  # every unit counts the same
    clipped_policy_loss(level(units, new, per_unit), OLD, advantages, per_unit, CLIP).backward()
    direct = small.clone().requires_grad_()
    first, second = (direct[:3] - OLD[:3]).mean().exp(), (direct[3:] - OLD[3:]).mean().exp()
    (-(first - second) / 2).backward()
    assert new.grad.tolist() == pytest.approx(direct.grad.tolist(), rel=1e-5)


def test_entropy_is_rewarded_by_weight_and_not_read_on_padding():
    entropies = torch.tensor([1.0, 2.0, math.nan], requires_grad=True)
    loss = entropy_loss(entropies, torch.tensor([0.25, 0.75, 0.0]))
    loss.backward()
    assert loss.item() == -1.75
    assert entropies.grad.tolist() == [-0.25, -0.75, 0.0]


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (ClipKeys, {"clip_low": -0.1}),
        (ClipKeys, {"clip_low": 1.1}),
        (ClipKeys, {"clip_high": -0.1}),
        (ClipKeys, {"clip_high": math.inf}),
        (ClipKeys, {"clip_dual": 1.2, "clip_high": 0.5}),
        (SapoKeys, {"tau_pos": 0.0}),
        (SapoKeys, {"tau_neg": -1.0}),
        (SapoKeys, {"tau_pos": math.inf}),
        (RouterKeys, {"router_aux_coef": -0.1}),
        (KlKeys, {"kl_kind": "k1"}),
        (GigpoKeys, {"omega": -0.1}),
    ],
)
def test_keys_without_a_meaning_are_refused(keys, values):
    with pytest.raises(ValueError, match=next(iter(values))):
        keys(**values)


@pytest.mark.parametrize(
    ("keys", "values"), [(RouterKeys, {"router_aux_coef": 0.0}), (OwnCriticKeys, {"critic_passes": 1})]
)
def test_the_least_that_a_key_may_be_is_taken(keys, values):
    assert keys(**values).model_dump(include=values.keys()) == values


def test_the_dual_clip_leaves_small_positive_advantages_to_the_other_one():
    # ratio 1, advantage 1/2, whose dual bound of 3/2 is for negative ones alone
    zero, half, one = (torch.tensor([value]) for value in (0.0, 0.5, 1.0))
    loss = clipped_policy_loss(zero, zero, half, one, ClipKeys(clip_dual=3.0))
    assert loss.item() == -0.5


def test_metrics_tell_what_was_held_and_how_far_the_policy_moved():
    ratios = [math.exp(x) for x in (0.5, -0.5, 1.5, -0.1)]
    assert clip_metrics(NEW, OLD, ADVANTAGES, WEIGHTS, CLIP) == {
        "loss/clip_low_share": 0.0,
        "loss/clip_high_share": 0.25,
        "loss/ratio_mean": pytest.approx(sum(ratios) / 4),
        "loss/ratio_min": pytest.approx(min(ratios)),
        "loss/ratio_max": pytest.approx(max(ratios)),
    }


def test_metrics_of_cuts_merge_to_those_of_the_whole_and_padding_is_not_read():
    weights = torch.tensor([0.25, 0.25, 0.5, 0.0])
    new = torch.tensor([-0.5, -1.5, 0.5, math.nan])
    whole = clip_metrics(new, OLD, ADVANTAGES, weights, CLIP)
    cuts = [clip_metrics(new[p], OLD[p], ADVANTAGES[p], weights[p], CLIP) for p in (slice(0, 2), slice(2, 4))]
    assert merge_metrics(cuts) == pytest.approx(whole)
    nothing = clip_metrics(new, OLD, ADVANTAGES, 0.0 * weights, CLIP)
    assert merge_metrics([nothing, *cuts]) == pytest.approx(whole), "a cut without weights adds nothing"
    assert merge_metrics([]) == {}
