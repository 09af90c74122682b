"""Weights of samples by the policy that sampled them: by hand, against verl's, and as properties."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_backend.core.behaviour import (
    WeightKeys,
    behaviour_weights,
    counted_share,
    effective_share,
    log_weights,
    truncated,
)

LOG = math.log
TOKEN = WeightKeys(behaviour_weight_cap=2.0)


def weigh(ratios, config=TOKEN, units=None):
    """Of tokens whose ratios to their sampler are these; every behaviour log-prob is -1."""
    behaviour = torch.full((len(ratios),), -1.0)
    logprobs = behaviour + torch.tensor(ratios).log()
    return behaviour_weights(logprobs, behaviour, None if units is None else torch.tensor(units), config)


def test_a_tokens_weight_is_its_ratio_held_at_the_cap_without_gradient():
    proximal = torch.tensor([0.0, LOG(1.5), LOG(9.0), -500.0], requires_grad=True)
    weights = behaviour_weights(proximal - 1.0, torch.full((4,), -1.0), None, TOKEN)
    assert weights.tolist() == pytest.approx([1.0, 1.5, 2.0, 0.0])
    assert not weights.requires_grad


def test_a_decisions_or_episodes_weight_is_the_product_over_its_tokens_and_cut_off_once():
    # 1.5 * 1.5 = 2.25 and 3 * 0.5 = 1.5: token by token, 3 would have been held at 2
    ratios, units = [1.5, 3.0, 1.5, 0.5], [0, 1, 0, 1]
    config = WeightKeys(behaviour_weight_cap=2.0, behaviour_weight_level="episode")
    assert weigh(ratios, config, units).tolist() == pytest.approx([2.0, 1.5, 2.0, 1.5])
    assert weigh(ratios).tolist() == pytest.approx([1.5, 2.0, 1.5, 0.5])


def test_as_in_verl_a_threshold_is_a_cap_and_two_of_them_are_a_range_outside_of_which_nothing_counts():
    # compute_rollout_correction_weights of verl 0.9.1 with 2.0, and with "0.5_1.5"
    assert weigh([0.25, 1.75, 4.0]).tolist() == pytest.approx([0.25, 1.75, 2.0])
    masked = weigh(
        [0.25, 0.6, 1.0, 1.4, 1.75, 4.0],
        WeightKeys(behaviour_weight_cap=1.5, behaviour_weight_mode="mask", behaviour_weight_floor=0.5),
    )
    assert masked.tolist() == pytest.approx([0.0, 0.6, 1.0, 1.4, 0.0, 0.0])
    keys = WeightKeys(behaviour_weight_cap=1.0, behaviour_weight_mode="mask", behaviour_weight_floor=1.0)
    assert weigh([1.0], keys).tolist() == [1.0], "both ends belong to the range"


def test_the_sum_of_a_sequence_is_held_at_20_before_exp_and_from_below_by_nothing():
    far = torch.tensor([15.0, 15.0, -15.0, -15.0])
    logs = log_weights(far, torch.zeros(4), torch.tensor([0, 0, 1, 1]))
    assert logs.tolist() == [20.0, 20.0, -30.0, -30.0]
    # held token by token instead, 15 and 15 would have stayed 30
    assert truncated(logs, WeightKeys(behaviour_weight_cap=1e9)).tolist() == pytest.approx(
        [math.exp(20)] * 2 + [math.exp(-30)] * 2
    )


def test_the_effective_share_of_samples_by_hand():
    assert effective_share([0.5, 0.5, 0.5]) == 1.0
    assert effective_share([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert effective_share([3.0, 1.0]) == 16 / 20
    assert effective_share([0.0, 0.0]) == 0.0, "nothing counts"


def test_samples_that_all_weigh_the_same_and_next_to_nothing_count_for_nothing():
    assert counted_share([1.0, 1.0, 1.0]) == 1.0
    assert counted_share([2.0, 2.0]) == 1.0, "never as more than the actor's own"
    assert counted_share([0.001] * 5) == pytest.approx(0.001)
    assert counted_share([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert counted_share([1.5, 0.5, 0.5, 0.5]) == 9 / (4 * 3), "equal sums of w and of w^2"
    assert counted_share([0.0, 0.0]) == 0.0
    # 1,000 tokens of 1 nat: whichever the episode is, it is far away, and more so if it is longer
    for nats in (-50.0, -500.0):
        logs = log_weights(torch.full((4,), nats), torch.zeros(4), torch.tensor([0, 0, 1, 1]))
        assert counted_share(truncated(logs, WeightKeys(behaviour_weight_level="episode")).tolist()) < 1e-40


RATIOS = st.lists(st.tuples(st.integers(0, 3), st.floats(-30, 30)), min_size=1, max_size=20)


@given(RATIOS, st.floats(1, 10), st.sampled_from(["truncate", "mask"]))
def test_weights_lie_between_0_and_the_cap_and_are_equal_within_a_unit(tokens, cap, mode):
    units, logs = torch.tensor([u for u, _ in tokens]), torch.tensor([x for _, x in tokens])
    config = WeightKeys(
        behaviour_weight_cap=cap,
        behaviour_weight_level="episode",
        behaviour_weight_mode=mode,
        behaviour_weight_floor=0.25,
    )
    weights = behaviour_weights(logs, torch.zeros(len(tokens)), units, config)
    assert weights.min() >= 0.0
    assert weights.max() <= torch.tensor(cap)
    for unit in units.unique():
        assert len(weights[units == unit].unique()) == 1
    share = effective_share(weights.tolist())
    assert 1 / len(tokens) - 1e-12 <= share <= 1.0 + 1e-12 or not weights.any()
    assert 0.0 <= counted_share(weights.tolist()) <= share
