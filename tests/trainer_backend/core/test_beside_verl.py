"""Our conventions beside verl's, number by number: where they are equal, and where they differ on purpose.

Its numbers are those that verl 0.9.1 printed on a CPU; nothing of it runs here.
"""

import pytest
import torch

from tests.trainer_backend.segment_columns import lists, segment_of
from trainer_backend.core.advantages.episodes import EpisodeRewards
from trainer_backend.core.advantages.gae import gae
from trainer_backend.core.advantages.grpo import grpo, grpo_no_std
from trainer_backend.core.advantages.rloo import rloo
from trainer_backend.core.aggregation import decision_mean, token_mean
from trainer_backend.core.losses import (
    ClipKeys,
    at_level_of,
    cispo_loss,
    clipped_policy_loss,
    log_ratio,
    unit_means,
)
from trainer_backend.core.segments import CONTEXT
from trainer_backend.job.training_table import AlgorithmTable

OLD = torch.full((4,), -1.0)
NEW = torch.tensor([-0.5, -1.5, 0.5, -1.1])
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -1.0])
MEAN = torch.full((4,), 0.25)
RANGE = ClipKeys(clip_low=0.2, clip_high=0.28)


def episodes(*groups):
    return [
        EpisodeRewards(f"{name}-{i}", name, [score])
        for name, scores in zip("ab", groups, strict=False)
        for i, score in enumerate(scores)
    ]


def firsts(found):
    return [row_T[0] for row_T in found.per_episode]


def test_the_clipped_loss_is_vanilla_once_the_dual_clip_is_set_as_it_always_is_there():
    new = NEW.clone().requires_grad_()
    loss = clipped_policy_loss(
        new, OLD, ADVANTAGES, MEAN, ClipKeys(clip_low=0.2, clip_high=0.28, clip_dual=3.0)
    )
    loss.backward()
    assert loss.item() == pytest.approx(0.504577, abs=1e-6)
    assert new.grad.tolist() == pytest.approx([0.0, -0.15163, 0.0, 0.22621], abs=1e-5)
    # without it, which is the default here, the third token, e^1.5 likelier and bad, is not held at 3
    free = clipped_policy_loss(NEW, OLD, ADVANTAGES, MEAN, RANGE)
    assert free.item() == pytest.approx(0.504577 + (4.481689 - 3.0) / 4, abs=1e-6)


def test_one_range_for_both_sides():
    config = ClipKeys(clip_low=0.2, clip_high=0.2, clip_dual=3.0)
    assert clipped_policy_loss(NEW, OLD, ADVANTAGES, MEAN, config).item() == pytest.approx(0.524577, abs=1e-6)


def test_gspo_of_one_sequence_and_cispo_are_equal():
    one = torch.zeros(4, dtype=torch.int64)
    levelled = at_level_of(unit_means(one, log_ratio(NEW, OLD, MEAN), MEAN), NEW, OLD)
    assert clipped_policy_loss(levelled, OLD, ADVANTAGES, MEAN, RANGE).item() == pytest.approx(
        0.069534, abs=1e-6
    )
    assert cispo_loss(NEW, OLD, ADVANTAGES, MEAN, RANGE).item() == pytest.approx(0.371170, abs=1e-6)


def test_grpo_has_the_sample_std_without_epsilon_and_a_lone_episode_learns_nothing():
    # there 0.577349, -1.154699, 0.577349 (an epsilon of 1e-6), and the lone one its raw reward of 2.999997
    given = episodes([1.0, 0.0, 1.0], [3.0])
    assert firsts(grpo(given, AlgorithmTable(gamma=1.0))) == pytest.approx(
        [0.577350, -1.154701, 0.577350, 0.0], abs=1e-6
    )
    # there 1/3, -2/3, 1/3 and 3
    assert firsts(grpo_no_std(given, AlgorithmTable(gamma=1.0))) == pytest.approx([1 / 3, -2 / 3, 1 / 3, 0.0])


def test_rloo_agrees_and_a_lone_episode_is_0_as_in_its_vectorised_form():
    # there .5, -1, .5, and for the lone one 3 in one function and 0 in the other
    assert firsts(rloo(episodes([1.0, 0.0, 1.0], [3.0]), AlgorithmTable(gamma=1.0))) == [0.5, -1.0, 0.5, 0.0]


def test_group_statistics_count_an_episode_once_however_many_segments_it_lies_in():
    # there, row by row, 1.0954, -0.7303, -0.7303 where the first and the last have two rows each
    found = firsts(grpo(episodes([1.0, 0.0, 0.0]), AlgorithmTable(gamma=1.0)))
    assert found == pytest.approx([1.1547, -0.5774, -0.5774], abs=5e-5)


def test_gae_is_not_whitened_so_that_the_unit_of_the_rewards_stays():
    (found,) = gae(
        [EpisodeRewards("r", "g", [0.0, 4.0], values_T=[0.0, 0.0])],
        AlgorithmTable(gamma=1.0, gae_lambda=1.0),
    ).per_episode
    assert found == [4.0, 4.0]  # there it would have mean 0 over the batch


def test_tokens_or_sequences_count_the_same():
    # the losses of two sequences: 1, 2, 3 and 5; there token-mean 2.75 and seq-mean-token-mean 3.5
    parts = [segment("a", 3), segment("b", 1)]
    losses = [[1.0, 2.0, 3.0], [5.0]]

    def summed(weights):
        pairs = zip(losses, weights, strict=True)
        return sum(loss * w for row, of_row in pairs for loss, w in zip(row, of_row, strict=True))

    assert summed(token_mean(parts)) == pytest.approx(2.75)
    assert summed(decision_mean(parts)) == pytest.approx(3.5)


def test_a_sequence_without_a_trained_token_does_not_dilute_the_others():
    # there it does, once the trainer gives global sizes: 1.5 for 2
    assert lists(decision_mean([segment("a", 3), segment("b", 0)])) == [[pytest.approx(1 / 3)] * 3, []]


def segment(name, sampled):
    length = sampled + 1
    decision = (CONTEXT,) + (0,) * sampled
    return segment_of(name, (1,) * length, decision, (0.0,) * length)
