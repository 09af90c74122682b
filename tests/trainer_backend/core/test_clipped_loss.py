import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_backend.core.loss_metrics import clip_metrics, merge_metrics
from trainer_backend.core.losses import ClipKeys, clipped_policy_loss, entropy_loss

CLIP = ClipKeys(clip_low=0.2, clip_high=0.28)
OLD = torch.tensor([-1.0, -1.0, -1.0, -1.0])
NEW = torch.tensor([-0.5, -1.5, 0.5, -1.1])
ADVANTAGES = torch.tensor([1.0, 2.0, -1.0, -3.0])
WEIGHTS = torch.full((4,), 0.25)


def loss_and_gradient(new, old, advantages, weights, config=CLIP):
    new = new.clone().requires_grad_()
    loss = clipped_policy_loss(new, old, advantages, weights, config)
    loss.backward()
    return loss.detach(), new.grad


def test_the_loss_and_its_gradient_by_hand():
    # ratios e^.5, e^-.5, e^1.5, e^-.1. The first is held at 1.28; the others are free: a good token that
    # became unlikelier and a bad one that became likelier are never held, and e^-.1 is inside the range
    loss, gradient = loss_and_gradient(NEW, OLD, ADVANTAGES, WEIGHTS)
    expected = -(1.28 + 2 * math.exp(-0.5) - math.exp(1.5) - 3 * math.exp(-0.1)) / 4
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert gradient.tolist() == pytest.approx(
        [0.0, -2 * math.exp(-0.5) / 4, math.exp(1.5) / 4, 3 * math.exp(-0.1) / 4], rel=1e-6
    )


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "held"), [(0.5, 1, 1), (0.5, -1, 0), (-0.5, 1, 0), (-0.5, -1, 1)]
)
def test_the_clip_holds_only_what_moved_far_enough_in_the_direction_of_its_advantage(
    log_ratio, advantage, held
):
    one = torch.ones(1)
    _, gradient = loss_and_gradient(one * log_ratio, one * 0, one * advantage, one)
    assert (gradient.item() == 0.0) == bool(held)


def test_low_and_high_are_separate():
    one = torch.ones(1)
    config = ClipKeys(clip_low=0.1, clip_high=0.5)
    up, _ = loss_and_gradient(one, one * 0, one, one, config)
    down, _ = loss_and_gradient(-one, one * 0, -one, one, config)
    assert (up.item(), down.item()) == (pytest.approx(-1.5), pytest.approx(0.9))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 1, 2])
def test_nothing_that_stands_on_a_padded_token_reaches_loss_or_gradient(bad, column):
    inputs = [NEW.clone(), OLD.clone(), ADVANTAGES.clone()]
    inputs[column][1] = bad
    weights = torch.tensor([0.25, 0.0, 0.25, 0.25])
    loss, gradient = loss_and_gradient(*inputs, weights)
    clean, clean_gradient = loss_and_gradient(NEW, OLD, ADVANTAGES, weights)
    assert torch.equal(loss, clean)
    assert torch.equal(gradient, clean_gradient)
    assert gradient[1] == 0.0


@pytest.mark.parametrize(("new", "advantage"), [(500.0, 1.0), (500.0, -1.0), (-500.0, 1.0), (-500.0, -1.0)])
def test_a_ratio_beyond_all_bounds_leaves_loss_and_gradient_finite(new, advantage):
    one = torch.ones(1)
    loss, gradient = loss_and_gradient(one * new, one * 0, one * advantage, one)
    assert loss.isfinite()
    assert gradient.item() == 0.0


@given(st.integers(1, 3), st.booleans())
def test_the_loss_and_gradient_do_not_depend_on_how_the_batch_is_cut(where, flat):
    generator = torch.Generator().manual_seed(where)
    new, old, advantages = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64).unbind(0)
    mask = torch.rand(4, 5, generator=generator) > 0.3
    weights = mask / mask.sum()
    if flat:
        new, old, advantages, weights = (x.flatten() for x in (new, old, advantages, weights))
    whole, gradient = loss_and_gradient(new, old, advantages, weights)
    parts = [slice(0, where), slice(where, None)]
    losses, gradients = zip(
        *(loss_and_gradient(new[p], old[p], advantages[p], weights[p]) for p in parts), strict=True
    )
    torch.testing.assert_close(sum(losses), whole)
    torch.testing.assert_close(torch.cat(gradients), gradient)


def test_entropy_is_rewarded_by_weight_and_not_read_on_padding():
    entropies = torch.tensor([1.0, 2.0, math.nan], requires_grad=True)
    loss = entropy_loss(entropies, torch.tensor([0.25, 0.75, 0.0]))
    loss.backward()
    assert loss.item() == -1.75
    assert entropies.grad.tolist() == [-0.25, -0.75, 0.0]


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [(-0.1, 0.2, "clip_low"), (1.1, 0.2, "clip_low"), (0.2, -0.1, "clip_high"), (0.2, math.inf, "clip_high")],
)
def test_a_clip_range_without_a_meaning_is_refused(low, high, message):
    with pytest.raises(ValueError, match=message):
        ClipKeys(clip_low=low, clip_high=high)


def test_metrics_say_what_was_held_and_how_far_the_policy_moved():
    metrics = clip_metrics(NEW, OLD, ADVANTAGES, WEIGHTS, CLIP)
    ratios = [math.exp(x) for x in (0.5, -0.5, 1.5, -0.1)]
    assert metrics == {
        "loss/clip_low_share": 0.0,
        "loss/clip_high_share": 0.25,
        "loss/ratio_mean": pytest.approx(sum(ratios) / 4),
        "loss/ratio_min": pytest.approx(min(ratios)),
        "loss/ratio_max": pytest.approx(max(ratios)),
    }


def test_a_negative_advantage_is_held_at_the_low_end():
    one = torch.ones(1)
    metrics = clip_metrics(-one, one * 0, -one, one, CLIP)
    assert (metrics["loss/clip_low_share"], metrics["loss/clip_high_share"]) == (1.0, 0.0)


@pytest.mark.parametrize(("log_ratio", "advantage"), [(0.1, 1.0), (-0.1, -1.0), (1.0, 0.0), (-1.0, 0.0)])
def test_inside_the_range_or_without_advantage_nothing_is_held(log_ratio, advantage):
    one = torch.ones(1)
    metrics = clip_metrics(one * log_ratio, one * 0, one * advantage, one, CLIP)
    assert (metrics["loss/clip_low_share"], metrics["loss/clip_high_share"]) == (0.0, 0.0)


def test_metrics_of_cuts_merge_to_those_of_the_whole_and_padding_is_not_read():
    weights = torch.tensor([0.25, 0.25, 0.5, 0.0])
    new = torch.tensor([-0.5, -1.5, 0.5, math.nan])
    whole = clip_metrics(new, OLD, ADVANTAGES, weights, CLIP)
    cuts = [clip_metrics(new[p], OLD[p], ADVANTAGES[p], weights[p], CLIP) for p in (slice(0, 2), slice(2, 4))]
    assert merge_metrics(cuts) == pytest.approx(whole)
    assert merge_metrics([]) == {}


def test_a_cut_whose_tokens_weigh_nothing_adds_nothing():
    one = torch.ones(2)
    nothing, rest = (clip_metrics(one, one * 0, one, one * weight, CLIP) for weight in (0.0, 0.5))
    assert merge_metrics([nothing, rest]) == rest
