"""`training.target_kl` on a real tiny model: which steps of an iteration are taken, and which are not."""

import math
from itertools import product
from typing import get_args

import pytest
import torch

from tests.conftest import tiny_job
from tests.trainer_backend.learner.hand_made import segment
from trainer_backend import learner_parts
from trainer_backend.core.aggregation import number_units
from trainer_backend.core.collate import collate
from trainer_backend.core.losses import RatioLevel
from trainer_backend.core.segments import Segment
from trainer_backend.job.training_table import LoopKeys
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.policy_terms import DRIFT, PolicyTerms
from trainer_backend.models import build_preset, train_tokenizer
from trainer_backend.parts import CreditedEpisode
from trainer_backend.plugins import AGGREGATIONS, LOSSES


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["tree L2 U1 water wood3 stone coal"] * 20, 300, whole_words=["noop", "do"])


def make_learner(tokenizer, **training) -> LocalLearner:
    torch.set_num_threads(1)
    job = tiny_job(**{f"training__{key}": value for key, value in training.items()})
    return LocalLearner(
        learner_parts.learner_config(job), build_preset("tiny-0.3m", tokenizer, seed=3), tokenizer
    )


def episode(learner: LocalLearner, name: str, advantage: float) -> CreditedEpisode:
    """One decision of one token, as if the learner had sampled it just now."""

    def segment(logprob: float) -> Segment:
        return Segment.of(name, (5, 6, 20), [logprob], [(2, 3, 0, 0, 1.0)])

    ((own,),) = learner.scorer.score([segment(0.0)], LoopKeys(row_tokens=64, micro_batch_tokens=1024))
    return CreditedEpisode(name, [segment(own)], [advantage])


def test_after_the_limit_the_remaining_steps_are_skipped_and_counted(tokenizer):
    free, held = (
        make_learner(tokenizer, update_passes=5, entropy_coef=0.0, **limit)
        for limit in ({}, {"target_kl": 1e-9})
    )
    went_on = free.update([episode(free, "r", 1.0)], iteration=1)
    stopped = held.update([episode(held, "r", 1.0)], iteration=1)
    assert (went_on["optim/steps"], went_on["optim/steps_skipped"]) == (5, 0)
    assert (stopped["optim/steps"], stopped["optim/steps_skipped"]) == (1, 4)
    assert stopped["loss/kl_to_proximal"] > 1e-9
    assert stopped["loss/approx_kl"] < 1e-9  # the mean over the steps taken: the first began at the proximal


def test_the_step_that_finds_it_too_far_leaves_the_weights_alone(tokenizer):
    once = make_learner(tokenizer, update_passes=1)
    held = make_learner(tokenizer, update_passes=5, target_kl=1e-9)
    for learner in (once, held):
        learner.update([episode(learner, "r", 1.0)], iteration=1)
    other = held.weights()
    assert all(torch.equal(tensor, other[name]) for name, tensor in once.weights().items())


def test_the_distance_told_is_that_of_the_last_step_looked_at(tokenizer):
    learner = make_learner(tokenizer, update_passes=2, entropy_coef=0.0)
    played = episode(learner, "r", 1.0)
    one_step = make_learner(tokenizer, update_passes=1, entropy_coef=0.0)
    one_step.update([episode(one_step, "r", 1.0)], iteration=1)
    # With d = new - old log-prob of the one token, k3 of KL(old || new) is exp(d) - 1 - d.
    ((new,),) = one_step.scorer.score(played.segments, LoopKeys(row_tokens=64, micro_batch_tokens=1024))
    d = new - played.segments[0].logprobs[-1]
    told = learner.update([played], iteration=1)["loss/kl_to_proximal"]
    assert told == pytest.approx(math.expm1(d) - d, rel=1e-3)


def backward_passes(learner: LocalLearner) -> list[None]:
    """Gets one more for each backward pass."""
    passes: list[None] = []
    learner.model.lm_head.weight.register_hook(lambda _: passes.append(None))
    return passes


def test_a_step_that_is_not_taken_has_no_backward_pass(tokenizer):
    learner = make_learner(tokenizer, update_passes=5, target_kl=1e-9)
    passes = backward_passes(learner)
    learner.update([episode(learner, "r", 1.0)], iteration=1)
    assert len(passes) == 1


def test_the_pieces_of_a_step_decide_as_one(tokenizer):
    """Two pieces, whose distances add up; the limit lies at the first, between them, or beyond both."""
    cut = {"row_tokens": 16, "micro_batch_tokens": 64, "update_passes": 2, "entropy_coef": 0.0}

    def played(learner: LocalLearner) -> list[CreditedEpisode]:
        return [episode(learner, f"r{i}", 1.0) for i in range(40)]  # of three tokens, in rows of five

    free = make_learner(tokenizer, **cut)
    free_passes = backward_passes(free)
    moved = free.update(played(free), iteration=1)["loss/kl_to_proximal"]
    assert moved > 0 and len(free_passes) == 4
    for limit, steps, passes in ((1e-9, 1, 2), (moved * 0.99, 1, 3), (moved * 1.01, 2, 4)):
        held = make_learner(tokenizer, **cut, target_kl=limit)
        found = backward_passes(held)
        told = held.update(played(held), iteration=1)
        assert told["optim/steps"] == steps
        assert told["loss/kl_to_proximal"] == pytest.approx(moved, rel=1e-5)
        assert len(found) == passes


def test_the_schedule_of_the_job_sets_the_rate(tokenizer):
    # Two iterations, one step each: the second begins half way.
    rates = {
        name: [
            learner.update([episode(learner, "r", 1.0)], iteration=number)["optim/lr"] for number in (1, 2)
        ]
        for name in ("linear", "cosine", "constant")
        for learner in [
            make_learner(
                tokenizer, update_passes=1, learning_rate=1e-3, learning_rate_final=0.0,
                learning_rate_schedule=name, iterations=4,
            )
        ]
    }  # fmt: skip
    quarter = (1 + math.cos(math.pi / 4)) / 2
    assert rates["linear"] == pytest.approx([1e-3, 0.75e-3])
    assert rates["cosine"] == pytest.approx([1e-3, quarter * 1e-3])
    assert rates["constant"] == [1e-3, 1e-3]


def test_the_distance_is_the_same_for_every_loss_ratio_level_and_aggregation():
    # Two episodes, of three tokens and one, whose log-probs moved up and down: at the level of a decision or
    # an episode that cancels in part, and by episodes the lone token would count for half.
    moves = {"long": [0.6, -0.5, 0.1], "short": [0.2]}
    parts = [segment(name, [5, 6], [20] * len(d), [-2.0] * len(d)) for name, d in moves.items()]
    rows = [[-2.0] * len(moved) for moved in moves.values()]
    now_N = torch.tensor([-2.0 + d for moved in moves.values() for d in moved])
    found = []
    for loss, level, name in product(LOSSES, get_args(RatioLevel), AGGREGATIONS):
        job = tiny_job(algorithm={"loss": loss, "ratio_level": level}, training__aggregation=name)
        terms = PolicyTerms(learner_parts.learner_config(job).objectives, job.training)
        batch = collate(
            parts,
            advantages={"long": [1.0], "short": [1.0]},
            weights=AGGREGATIONS[name].weights(parts, None),
            proximal=rows,
            behaviour=[[1.0] * len(row) for row in rows],
            units=number_units(parts, [level] * 2),
            policies=[0, 0],
            row_tokens=16,
        )
        _, metrics = terms.of(batch, now_N, torch.zeros(4), terms.sums(batch))
        found.append(metrics[DRIFT])
    of_tokens = [math.expm1(d) - d for moved in moves.values() for d in moved]
    assert found == pytest.approx([sum(of_tokens) / 4] * len(found), rel=1e-5)
