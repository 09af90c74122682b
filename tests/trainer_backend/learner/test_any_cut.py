"""The gradient of an optimizer step is the same, to 1e-6 of its size, however the batch is cut."""

import pytest
import torch

from tests.trainer_backend.learner.hand_made import learner_of, segment, tiny_tokenizer
from trainer_backend.core.critic import targets_of
from trainer_backend.plugins import AGGREGATIONS, LOSSES
from trainer_backend.protocols import CreditedEpisode

LENGTHS = [(3, 2), (9, 4), (5, 1), (12, 7), (4, 3), (30, 5), (7, 6), (2, 8)]
CUTS = [(16, 64), (35, 64), (64, 128), (200, 400)]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def episodes(*, with_critic: bool) -> list[CreditedEpisode]:
    made = []
    for i, (prompt, answer) in enumerate(LENGTHS):
        ids = [20 + (7 * i + j) % 40 for j in range(prompt + answer)]
        part = segment(f"r{i}", ids[:prompt], ids[prompt:], [-2.0 - 0.1 * j for j in range(answer)])
        advantages = [(-1.0) ** i * (1 + i / 4)]
        critic = targets_of([0.5], advantages) if with_critic else None
        made.append(CreditedEpisode(f"r{i}", [part], advantages, critic))
    return made


def gradient(tokenizer, cut, **settings):
    """Of one step over all episodes, from weights and proximal log-probs that are equal for every cut."""
    row_tokens, micro_batch_tokens = cut
    learner = learner_of(
        tokenizer,
        training__row_tokens=row_tokens,
        training__micro_batch_tokens=micro_batch_tokens,
        **settings,
    )
    head = learner._head
    given = episodes(with_critic=head is not None)
    if head is not None:
        head._weight_D.data.fill_(0.05)  # fresh it is 0, and its loss reaches nothing
    # As after some steps: ratios are about 1, and some are held. An untrained model says -5.7 or so.
    known = {
        item.rollout_id: [
            [-5.7 + 0.3 * (-1) ** j for j in range(len(part.sampled_positions))] for part in item.segments
        ]
        for item in given
    }
    update = learner.policy_update()
    update.gradient(update.weighed(given, known).scored, {item.rollout_id: item for item in given})
    weights = [*learner.model.parameters(), *([] if head is None else head._trained.values())]
    return torch.cat([weight.grad.flatten() for weight in weights]).double()


def assert_equal_for_every_cut(tokenizer, **settings):
    first, *others = (gradient(tokenizer, cut, **settings) for cut in CUTS)
    assert first.norm() > 1e-3
    for other in others:
        assert ((other - first).norm() / first.norm()).item() < 1e-6


@pytest.mark.parametrize("level", ["token", "decision", "episode"])
@pytest.mark.parametrize("loss", LOSSES)
def test_for_every_loss_and_level_of_ratio(tokenizer, loss, level):
    assert_equal_for_every_cut(tokenizer, algorithm__loss=loss, algorithm__ratio_level=level)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_for_every_aggregation_with_entropy_and_a_kl(tokenizer, aggregation):
    assert_equal_for_every_cut(
        tokenizer, training__aggregation=aggregation, training__entropy_coef=0.1, training__kl_coef=0.1
    )


def test_with_a_critic_whose_loss_reaches_the_policy(tokenizer):
    assert_equal_for_every_cut(tokenizer, algorithm__advantage="gae", training__value_trunk_gradient=True)
