"""The measured truth, and the scores of estimators against it, by hand and by identities."""

import math
import random

import numpy as np
import pytest

from trainer_backend.core import truth
from trainer_backend.core.truth import (
    Departures,
    Noise,
    TrueAdvantage,
    choice_strata,
    departures,
    even_order,
    mean_difference,
    measure_noise,
    pooled_errors,
    rank_correlation,
    unbiased_correlation,
)


def truth_score(advantages, truths):
    """Every episode a group of its own."""
    return truth.truth_score(advantages, truths, [item.rollout_id for item in truths])


def measured(advantage, *, error=0.0, turn=1, reward=0.0, rollout="a", **rest):
    values = {"action_value": None, "pairs": 4, "failed": 0, "others": 2, "decisions": 10} | rest
    return TrueAdvantage(rollout, turn, reward, advantage, error, **values)


def test_pairs_have_the_mean_of_their_differences_and_its_standard_error():
    # deviations from 2: -1, 1, -1, 1; sample variance 4/3; over four pairs 1/3
    assert mean_difference([(1.0, [1.0, 3.0, 1.0, 3.0])], 4) == (2.0, pytest.approx(math.sqrt(1 / 3)))
    assert mean_difference([(1.0, [1.0, 3.0])], 4) == (2.0, 1.0), "two are enough: 2 / 2"
    with pytest.raises(ValueError, match="at least two pairs, got 1"):
        mean_difference([(0.5, [1.0]), (0.5, [])], 8)


def test_choices_have_their_shares_and_noise_between_them_is_that_of_all_sampled_choices():
    # means 1 and 12, variances 2 and 8, weights 3/4 and 1/4: mean 3.75; between 3/4 * 2.75^2 + 1/4 * 8.25^2
    mean, error = mean_difference([(0.75, [0.0, 2.0]), (0.25, [10.0, 14.0])], 16)
    within, between = 0.75**2 * 2 / 2 + 0.25**2 * 8 / 2, 0.75 * 2.75**2 + 0.25 * 8.25**2
    assert (mean, error**2) == (3.75, pytest.approx(within + between / 16))
    # one pair of the second was lost: it varies like 0, 2 and 10, by 28; all of the third were
    mean, error = mean_difference([(0.6, [0.0, 2.0]), (0.2, [10.0]), (0.2, [])], 8)
    within, between = 0.75**2 * 2 / 2 + 0.25**2 * 28, 0.75 * 2.25**2 + 0.25 * 6.75**2
    assert (mean, error**2) == (3.25, pytest.approx(within + between / 8))


def test_frequent_choices_have_pairs_by_their_share_and_rare_ones_share_the_rest():
    choices = "aaaaaabbbacdebbb"  # 7 a, 6 b, c, d, e
    often, also, (share, rare) = choice_strata(choices, 8, seed=0)
    # 8 * 7 / 16 and 8 * 6 / 16 are 3.5 and 3; two are left for c, d and e
    assert often == (7 / 16, (0, 1, 2)) and also == (6 / 16, (6, 7, 8))
    assert share == 3 / 16 and len(set(rare)) == 2 and set(rare) <= {10, 11, 12}
    # 7 * 6 / 10 and 7 * 4 / 10 are 4.2 and 2.8: the second is given what is left
    assert [len(members) for _, members in choice_strata("aaaaaabbbb", 7, 0)] == [4, 3]
    # 8 * 9 / 16 and 8 * 7 / 16 are 4.5 and 3.5: nothing is rare, and the first is given what is left
    assert [len(members) for _, members in choice_strata("aaaaaaaaabbbbbbb", 8, 0)] == [5, 3]
    # 8 * 5 / 16 are 2.5, three times: two are left, one for the only rare choice, one for a
    assert [len(members) for _, members in choice_strata("aaaaabbbbbcccccd", 8, 0)] == [3, 2, 2, 1]
    assert choice_strata("aaaa", 2, 0) == [(1.0, (0, 1))]
    assert choice_strata("ab", 4, 0) == [(1.0, (0, 1))], "no more pairs than choices were sampled"


def counted(advantage, sampled, count, pairs, square=0.0, *, error=0.0):
    seen = Departures(sampled, count, pairs, square)
    return measured(advantage, error=error, pairs=sampled // 4, others=pairs, departures=seen)


def test_choices_that_change_nothing_are_no_departures():
    # 3/4 of 16 choices: one of two pairs changes the return by 2; 1/4: one pair changes it by -4
    seen = departures([(0.6, [0.0, 2.0]), (0.2, [-4.0]), (0.1, [])], 16)
    assert (seen.sampled, seen.pairs) == (16, 2)
    assert (seen.count, seen.square) == pytest.approx(
        (16 * (3 / 8 + 1 / 4), (3 / 8 * 4 + 1 / 4 * 16) / (5 / 8))
    )
    assert departures([(1.0, [0.0, 0.0])], 8) == Departures(8, 0.0, 0, 0.0)


def test_a_decision_that_was_only_chosen_as_stored_has_the_error_of_what_the_others_would_change():
    # shares 0 and 1/2: m 1/4, variance 1/8; of q (1/8 - 3/16 / 16) / (15/16) = 29/240; c = 3/16 * 240/29 - 1
    certain, open_ = counted(0.0, 16, 0, 0), counted(1.0, 16, 8, 2, square=4.0, error=0.5)
    weight = max(1.0, 45 / 29 - 1)
    mean = weight / 4 / (16 + weight)
    square = mean * (1 - mean) / (17 + weight) + mean**2
    errors = [item.error for item in pooled_errors([certain, open_])]
    assert errors == [pytest.approx(math.sqrt(4.0 * square)), 0.5], "two pairs tell their own error"


def test_a_decision_with_one_other_pair_has_the_variance_of_the_others():
    # both open decisions: mean 1 / (1/2) = 2, square 5, so S = 2 * (5 - 4) = 2, M = 4 - 2 / 2 = 3; of d^2 5
    open_ = counted(1.0, 16, 8, 2, square=5.0, error=0.5)
    rare = counted(0.125, 16, 1, 1, square=5.0)
    _, _, found = pooled_errors([open_, open_, rare])
    shares, mean = (0.5, 0.5, 0.0625), 17 / 48
    variance = sum((share - mean) ** 2 for share in shares) / 2
    of_chance = (variance - mean * (1 - mean) / 16) / (15 / 16)
    weight = max(1.0, mean * (1 - mean) / of_chance - 1)
    expected = (1 + weight * mean) / (16 + weight)
    apart = expected * (1 - expected) / (17 + weight) + (expected - 1 / 16) ** 2
    assert found.error**2 == pytest.approx(3.0 * apart + 2.0 / 16**2)
    assert pooled_errors([open_, open_, found])[2] == found, "a second time changes nothing"


def test_differences_that_are_all_alike_leave_what_their_choices_leave():
    # 2 of 2 decisions change the return with all 16 choices, or with half of them
    always, half = counted(-2.0, 16, 16.0, 4, square=4.0), counted(1.0, 16, 8.0, 2, square=4.0, error=0.5)
    found = pooled_errors([always, half])[0].error
    weight = max(1.0, 45 / 29 - 1)
    expected = (16 + weight * 0.75) / (16 + weight)
    square = expected * (1 - expected) / (17 + weight) + (1 - expected) ** 2
    assert found == pytest.approx(math.sqrt(4.0 * square))


def test_where_no_decision_was_ever_chosen_otherwise_nothing_is_known_to_vary():
    assert [item.error for item in pooled_errors([counted(0.0, 64, 0, 0)] * 3)] == [0.0] * 3


def test_lines_from_before_departures_were_stored_tell_them_by_their_pairs():
    old = measured(0.5, pairs=3, failed=1, others=2)
    # 16 choices, two of three of them others; the mean difference is 0.5 / (2/3)
    assert old.known_departures == Departures(16, pytest.approx(32 / 3), 2, pytest.approx(0.75**2))
    assert measure_noise([measured(1.0, error=0.5), measured(0.0, others=0)]).error > math.sqrt(0.5**2 / 2)


@pytest.mark.parametrize("stored_share", [0.5, 0.9, 0.98, 0.995])
def test_errors_are_as_large_as_what_was_missed_however_certain_a_decision_is(stored_share):
    source, truths, missed = np.random.default_rng(4), [], []
    for seed in range(1500):
        worth = source.normal()
        others = (source.random(64) >= stored_share).tolist()
        strata = [
            (share, [worth + source.normal() if others[index] else 0.0 for index in members])
            for share, members in choice_strata(others, 16, seed)
        ]
        mean, error = mean_difference(strata, 64)
        truths.append(measured(mean, error=error, departures=departures(strata, 64)))
        missed.append((mean - (1 - stored_share) * worth) ** 2)
    errors = [item.error for item in pooled_errors(truths)]
    assert min(errors) > 0.0
    assert 0.75 < math.fsum(error**2 for error in errors) / math.fsum(missed) < 1.35
    if stored_share == 0.98:
        before = [item.error for item in truths]
        assert 0.2 < before.count(0.0) / len(before) < 0.35, "0.98^64 is 0.27"


@pytest.mark.parametrize("count", [1, 2, 7, 100, 1000])
def test_an_even_order_names_every_decision_once(count):
    assert sorted(even_order(count, seed=3)) == list(range(count))


@pytest.mark.parametrize("seed", range(5))
def test_any_first_decisions_of_an_even_order_are_a_stratified_sample(seed):
    order = list(even_order(1000, seed))
    for size, apart in ((20, 1), (50, 1), (70, 1), (200, 2)):
        for tenth in range(10):
            inside = sum(tenth * 100 <= index < (tenth + 1) * 100 for index in order[:size])
            assert abs(inside - size / 10) <= apart


def test_the_spread_of_the_truth_is_without_the_noise_of_its_measurement():
    # variance of 1 and -1 is 1; noise 0.36 leaves 0.64
    noise = measure_noise([measured(1.0, error=0.6, failed=1), measured(-1.0, error=0.6)])
    assert (noise.spread, noise.error, noise.ratio) == pytest.approx((0.8, 0.6, 0.75))
    assert (noise.decisions, noise.failed, noise.played, noise.known) == (2, 1, 20, 0.0)
    # 0.75 of the spread with 16 pairs; 0.25 of it takes nine times as many
    assert (noise.pairs_for(0.25, 16), noise.pairs_for(0.75, 16)) == (144, 16)
    nothing = measure_noise([measured(0.1, error=0.6), measured(-0.1, error=0.6)])
    assert (nothing.spread, nothing.ratio, nothing.pairs_for(0.3, 16)) == (0.0, None, None)


def test_the_truth_itself_in_another_unit_explains_everything():
    truths = [measured(value, rollout=str(value), turn=t) for t, value in enumerate((0.5, -1.0, 0.0, 2.0), 1)]
    score = truth_score([10 * item.advantage for item in truths], truths)
    assert (score.correlation, score.rank, score.sign_agreement) == (pytest.approx(1), pytest.approx(1), 1.0)
    assert (score.scale, score.error, score.explained) == (
        pytest.approx(0.1),
        pytest.approx(0),
        pytest.approx(1),
    )
    assert all(bias.mean == pytest.approx(0) for bias in score.biases)


def test_no_signal_explains_nothing_and_says_so():
    score = truth_score([0.0, 0.0], [measured(1.0), measured(-1.0)])
    assert (score.correlation, score.sign_agreement, score.scale, score.zero_share) == (None, None, 0.0, 1.0)
    assert (score.error, score.explained) == (1.0, 0.0)
    assert truth_score([1.0, -1.0], [measured(0.0), measured(0.0)]).explained is None


def test_scores_by_hand():
    # A = 1, 1, -1, 3, 0 and T = 1, 0, -1, 1, 0: sum AT = 5, sum A^2 = 12, scale 5/12
    truths = [
        measured(value, turn=t, reward=float(t == 4)) for t, value in enumerate((1.0, 0.0, -1.0, 1.0, 0.0), 1)
    ]
    score = truth_score([1.0, 1.0, -1.0, 3.0, 0.0], truths)
    scale = 5 / 12
    assert score.scale == pytest.approx(scale)
    apart = [scale - 1, scale, 1 - scale, 3 * scale - 1]
    assert score.error == pytest.approx(sum(value**2 for value in apart) / 5)
    assert score.explained == pytest.approx(1 - score.error / 0.6), "the mean of T^2 is 3/5"
    assert score.sign_agreement == 1.0, "the second decision has no sign"
    by_name = {bias.name: bias for bias in score.biases}
    assert by_name["a reward"].mean == pytest.approx(apart[3]) and by_name["a reward"].error is None
    assert by_name["no reward"].mean == pytest.approx(sum(apart[:3]) / 4)
    # thirds of the turns 1 to 5 begin at 2 and 4
    assert [bias.decisions for bias in score.biases] == [1, 2, 2, 4, 1]
    assert (score.low, score.high) == (None, None), "one episode cannot be resampled"


def test_signs_that_are_lost_in_noise_are_not_compared():
    # Student's t of four pairs that chose otherwise is 3.18; one such pair says nothing about the noise.
    truths = [
        measured(1.0, error=0.3, pairs=16, others=4),
        measured(1.0, error=0.33, pairs=16, others=4),
        measured(1.0, error=0.01, pairs=16, others=1),
    ]
    assert truth_score([1.0, -1.0, -1.0], truths).sign_agreement == 1.0
    assert not measured(3.182, error=1.0, others=4).is_known, "the interval begins at 0"


def test_a_truth_that_is_rounding_alone_has_no_known_sign():
    assert not measured(0.1 + 0.2 - 0.3, reward=0.3).is_known
    assert not measured(0.1 + 0.2 - 0.3, action_value=0.3).is_known
    assert measured(1e-9, reward=0.3).is_known
    assert not measured(1.0, others=4, departures=Departures(16, 4.0, 1, 1.0)).is_known, "one changed it"
    assert not measured(1.0, others=1, departures=Departures(16, 4.0, 4, 1.0)).is_known


def test_noise_of_the_truth_is_taken_out_of_the_correlation_and_the_error():
    source = random.Random(0)
    true = [source.gauss(0, 1) for _ in range(20_000)]
    truths = [measured(value + source.gauss(0, 1), error=1.0) for value in true]
    score = truth_score(true, truths)
    assert score.correlation == pytest.approx(math.sqrt(0.5), abs=0.02)
    assert score.noiseless == pytest.approx(1.0, abs=0.03)
    assert score.explained == pytest.approx(1.0, abs=0.03)


def test_the_interval_of_a_correlation_by_hand():
    groups = {"a": ([0.0, 1.0], [0.0, 0.5]), "b": ([1.0, 0.0], [1.0, 0.5]), "c": ([2.0, -1.0], [0.0, 1.0])}

    def z(*names):
        left, right = ([value for name in names for value in groups[name][side]] for side in (0, 1))
        return math.atanh(np.corrcoef(left, right)[0, 1])

    without = [z("b", "c"), z("a", "c"), z("a", "b")]
    error = math.sqrt(2 / 3 * sum((value - sum(without) / 3) ** 2 for value in without))
    truths = [measured(value, rollout=name) for name in groups for value in groups[name][1]]
    score = truth_score([value for name in groups for value in groups[name][0]], truths)
    half = 4.302652729911275 * error  # Student's t, two degrees of freedom
    assert score.low == pytest.approx(math.tanh(z(*groups) - half))
    assert score.high == pytest.approx(math.tanh(z(*groups) + half))


def test_an_unbiased_estimator_scores_what_its_noise_leaves():
    # std 0.5 has noise of 0.4 over a truth of 0.3: 0.3 / 0.5; an error of 0.4 takes as much again
    noise = Noise(100, spread=0.3, error=0.4, known=0.0, failed=0, played=0)
    assert unbiased_correlation(0.5, noise) == pytest.approx(0.6 * 0.6)
    assert unbiased_correlation(0.3, noise) == pytest.approx(0.6), "the truth itself"
    assert unbiased_correlation(0.2, noise) is None, "what varies less than the truth is not unbiased"
    nothing = Noise(100, spread=0.0, error=0.4, known=0.0, failed=0, played=0)
    assert unbiased_correlation(0.5, nothing) is None


def test_ranks_see_order_alone_and_share_ties():
    assert rank_correlation([1.0, 2.0, 30.0], [5.0, 6.0, 7.0]) == pytest.approx(1.0)
    # ranks 0.5, 0.5, 2 and 0, 1, 2
    assert rank_correlation([1.0, 1.0, 2.0], [1.0, 2.0, 3.0]) == pytest.approx(1.5 / math.sqrt(1.5 * 2))
