"""The steps of an update on a real tiny model: what is scored before them, which are taken, and how large."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from tests.trainer_backend.learner.hand_made import (
    SIZE,
    are_equal,
    copy_tensors,
    make_config,
    make_episodes,
    make_learner,
    segment,
)
from tests.trainer_backend.segment_columns import make_batch
from trainer_backend.core.losses import RatioLevel
from trainer_backend.core.segments import Segment
from trainer_backend.errors import NonFiniteLoss, SamplerMismatch
from trainer_backend.learner import step_size
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.policy_terms import DRIFT, PolicyTerms
from trainer_backend.learner.step_size import RATE_FILE, kl_of_decisions, sample_decisions
from trainer_backend.learner.stepping import Scored
from trainer_backend.learner.update import LogprobCache
from trainer_backend.parts import CreditedEpisode, Progress
from trainer_backend.plugins import AGGREGATIONS, LOSSES

ADVANTAGES = [1.0, -0.5, 0.25, -1.0]
TOKENS = 5  # of each episode


def off_by(episodes: list[CreditedEpisode], nats: float) -> list[CreditedEpisode]:
    """As if their sampler had found every token likelier than the learner does."""
    return [
        replace(item, segments=[replace(part, logprobs=part.logprobs + nats)])
        for item in episodes
        for part in item.segments
    ]


def scored_before(learner: LocalLearner, episodes: list[CreditedEpisode]) -> LogprobCache:
    """The log-probs of a pass of their own, with which no step has to score."""
    rows = learner.scorer.score([item.segments[0] for item in episodes], SIZE)
    return LogprobCache({item.rollout_id: [row] for item, row in zip(episodes, rows, strict=True)})


# Steps of all episodes, of two, and pieces of one.
CUTS = {
    "one step": {"training__update_passes": 1},
    "two passes": {"training__update_passes": 2},
    "steps of two": {"training__update_passes": 2, "training__batch_decisions": 2},
    "pieces": {"training__row_tokens": 16, "training__micro_batch_tokens": 64, "training__update_passes": 1},
}


@pytest.mark.parametrize("level", ["token", "decision", "episode"])
@pytest.mark.parametrize("cut", CUTS)
def test_the_update_is_that_of_segments_that_were_scored_before_it(tokenizer, cut: str, level: str):
    settings = {**CUTS[cut], "training__behaviour_weight_level": level, "training__kl_coef": 0.1}
    own, before = make_learner(tokenizer, **settings), make_learner(tokenizer, **settings)
    episodes = off_by(make_episodes(own, ADVANTAGES), -0.3)  # weights of 1.35
    found = own.update(episodes, iteration=1)
    expected = before.policy_update().run(episodes, iteration=1, cache=scored_before(before, episodes))
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    other = before.weights()
    for name, tensor in own.weights().items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("cut", "settings", "scored", "stepped"),
    [
        ("one step", {}, 0, 4),
        ("two passes", {}, 0, 8),
        ("steps of two", {}, 2, 8),
        ("one step", {"algorithm__ratio_level": "episode"}, 4, 4),
        ("one step", {"lora__rank": 4, "lora__dropout": 0.5}, 4, 4),
    ],
)
def test_only_what_the_first_step_lacks_or_cannot_score_is_scored_before_it(
    tokenizer, cut: str, settings: dict, scored: int, stepped: int
):
    learner, seen = make_learner(tokenizer, **CUTS[cut], **settings), []
    episodes = make_episodes(learner, ADVANTAGES)
    learner.model.get_input_embeddings().register_forward_hook(
        lambda _, given, __: seen.append(given[0].numel())
    )
    learner.update(episodes, iteration=1)
    assert sum(seen) == TOKENS * (scored + stepped)


@pytest.mark.parametrize("cut", CUTS)
def test_a_token_that_was_sampled_otherwise_is_found_before_a_step_is_taken(tokenizer, cut: str):
    learner = make_learner(tokenizer, **CUTS[cut], training__mismatch_limit=0.01)
    episodes = make_episodes(learner, ADVANTAGES)
    for number in range(len(episodes)):  # in the first step or not
        before = copy_tensors(learner)
        (bad,) = off_by(episodes[number : number + 1], 0.1)
        told = rf"rollout r{number}, turn 1.*beyond it: 2 of 8 tokens"
        with pytest.raises(SamplerMismatch, match=told) as caught:
            learner.update([*episodes[:number], bad, *episodes[number + 1 :]], iteration=1)
        assert caught.value.steps_taken == 0, "so the run saves what it has"
        assert are_equal(learner.model.state_dict(), before)


def test_log_probs_that_are_not_finite_are_named_before_they_reach_a_gradient(tokenizer):
    learner = make_learner(tokenizer, **CUTS["one step"])
    episodes = make_episodes(learner, ADVANTAGES)
    (bad,) = off_by(episodes[:1], float("nan"))
    with pytest.raises(NonFiniteLoss, match=r"rollout r0, turn 1, token 3: the sampler's log-prob is nan"):
        learner.update([bad, *episodes[1:]], iteration=1)
    assert all(weight.grad is None for weight in learner.model.parameters())


def episode(learner: LocalLearner, name: str, advantage: float) -> CreditedEpisode:
    """One decision of one token, as if the learner had sampled it just now."""
    ((own,),) = learner.scorer.score([segment(name, [5, 6], [20], [0.0])], SIZE)
    return CreditedEpisode(name, [segment(name, [5, 6], [20], [own])], [advantage])


def test_the_step_that_finds_it_too_far_and_those_after_it_are_skipped_and_counted(tokenizer):
    free, held, once = (
        make_learner(tokenizer, training__update_passes=passes, training__entropy_coef=0.0, **limit)
        for passes, limit in ((5, {}), (5, {"training__target_kl": 1e-9}), (1, {}))
    )
    went_on, stopped, _ = (one.update([episode(one, "r", 1.0)], iteration=1) for one in (free, held, once))
    assert (went_on["optim/steps"], went_on["optim/steps_skipped"]) == (5, 0)
    assert (stopped["optim/steps"], stopped["optim/steps_skipped"]) == (1, 4)
    assert stopped["loss/kl_to_proximal"] > 1e-9
    assert stopped["loss/approx_kl"] < 1e-9  # the mean over the steps taken: the first began at the proximal
    assert are_equal(once.weights(), held.weights())


def test_the_distance_told_is_that_of_the_last_step_looked_at(tokenizer):
    learner = make_learner(tokenizer, training__update_passes=2, training__entropy_coef=0.0)
    played = episode(learner, "r", 1.0)
    one_step = make_learner(tokenizer, training__update_passes=1, training__entropy_coef=0.0)
    one_step.update([episode(one_step, "r", 1.0)], iteration=1)
    # With d = new - old log-prob of the one token, k3 of KL(old || new) is exp(d) - 1 - d.
    ((new,),) = one_step.scorer.score(played.segments, SIZE)
    d = new - played.segments[0].logprobs[-1]
    told = learner.update([played], iteration=1)["loss/kl_to_proximal"]
    assert told == pytest.approx(math.expm1(d) - d, rel=1e-3)


def backward_passes(learner: LocalLearner) -> list[None]:
    """Gets one more for each backward pass."""
    passes: list[None] = []
    learner.model.lm_head.weight.register_hook(lambda _: passes.append(None))
    return passes


def test_the_pieces_of_a_step_decide_as_one(tokenizer):
    """Two pieces, whose distances add up; the limit lies at the first, between them, or beyond both."""
    sizes = {"row_tokens": 16, "micro_batch_tokens": 64, "update_passes": 2, "entropy_coef": 0.0}
    cut = {f"training__{key}": value for key, value in sizes.items()}

    def played(learner: LocalLearner) -> list[CreditedEpisode]:
        return [episode(learner, f"r{i}", 1.0) for i in range(40)]  # of three tokens, in rows of five

    free = make_learner(tokenizer, **cut)
    free_passes = backward_passes(free)
    moved = free.update(played(free), iteration=1)["loss/kl_to_proximal"]
    assert moved > 0 and len(free_passes) == 4
    for limit, steps, passes in ((1e-9, 1, 2), (moved * 0.99, 1, 3), (moved * 1.01, 2, 4)):
        held = make_learner(tokenizer, **cut, training__target_kl=limit)
        found = backward_passes(held)
        told = held.update(played(held), iteration=1)
        assert told["optim/steps"] == steps
        assert told["loss/kl_to_proximal"] == pytest.approx(moved, rel=1e-5)
        assert len(found) == passes


def test_the_schedule_of_the_job_sets_the_rate(tokenizer):
    # Of four iterations of a step each, the second begins after a quarter.
    keys = {"learning_rate": 1e-3, "learning_rate_final": 0.0, "iterations": 4, "update_passes": 1}
    for name, share in (("linear", 0.75), ("cosine", (1 + math.cos(math.pi / 4)) / 2), ("constant", 1.0)):
        settings = {
            f"training__{key}": value for key, value in {**keys, "learning_rate_schedule": name}.items()
        }
        learner = make_learner(tokenizer, **settings)
        rates = [learner.update([episode(learner, "r", 1.0)], iteration=n)["optim/lr"] for n in (1, 2)]
        assert rates == pytest.approx([1e-3, share * 1e-3])


def test_the_distance_is_the_same_for_every_loss_ratio_level_and_aggregation():
    # Two episodes, of three tokens and one, whose log-probs moved up and down: at the level of a decision or
    # an episode that cancels in part, and by episodes the lone token would count for half.
    moves = {"long": [0.6, -0.5, 0.1], "short": [0.2]}
    parts = [segment(name, [5, 6], [20] * len(d), [-2.0] * len(d)) for name, d in moves.items()]
    rows = [[-2.0] * len(moved) for moved in moves.values()]
    now_N = torch.tensor([-2.0 + d for moved in moves.values() for d in moved])
    found = []
    for loss, level, name in product(LOSSES, get_args(RatioLevel), AGGREGATIONS):
        config = make_config(algorithm={"loss": loss, "ratio_level": level}, training__aggregation=name)
        terms = PolicyTerms(config.objectives, config.training)
        batch = make_batch(
            parts,
            row_tokens=16,
            level=level,
            advantages={"long": [1.0], "short": [1.0]},
            weights=AGGREGATIONS[name].weights(parts, None),
            proximal=rows,
        )
        _, metrics = terms.of(batch, now_N, torch.zeros(4), terms.sums(batch))
        found.append(metrics[DRIFT])
    of_tokens = [math.expm1(d) - d for moved in moves.values() for d in moved]
    assert found == pytest.approx([sum(of_tokens) / 4] * len(found), rel=1e-5)


DESIRED = {"training__learning_rate_schedule": "desired_kl", "training__learning_rate": 1e-3}


def test_the_kl_is_that_of_the_sampled_tokens_before_and_after(tokenizer):
    learner = make_learner(tokenizer, **DESIRED, training__desired_kl=100.0, training__iterations=1)
    episodes = make_episodes(learner, [1.0, -1.0])
    before = [item.segments[0].logprobs for item in episodes]
    metrics = learner.update(episodes, iteration=1)
    after = learner.scorer.score([item.segments[0] for item in episodes], SIZE)
    d_N = np.concatenate(after) - np.concatenate(before)
    nats = np.expm1(d_N) - d_N
    assert metrics["kl/decision"] == pytest.approx(nats.sum() / 2, rel=1e-4)
    assert metrics["optim/lr"] == 1e-3
    assert learner.update(episodes, iteration=2)["optim/lr"] == 1.5e-3  # far less than half of 100 nats


def test_an_error_while_the_kl_is_measured_counts_the_steps_that_changed_the_weights(tokenizer):
    keys = {**DESIRED, "training__learning_rate": 1e30, "training__update_passes": 1}
    learner = make_learner(tokenizer, **keys)
    with pytest.raises(NonFiniteLoss) as caught:
        learner.update(make_episodes(learner, [1.0, -1.0]), iteration=1)
    assert caught.value.steps_taken == 1


def test_a_bandit_of_a_tiny_model_gets_steps_of_the_desired_size(tokenizer):
    desired = {"training__desired_kl": 0.01, "training__update_passes": 1, "training__iterations": 40}
    learner = make_learner(tokenizer, **DESIRED, **desired, training__max_grad_norm=1e9)
    told = [
        learner.update(make_episodes(learner, [1.0, -1.0]), iteration=n)["kl/decision"] for n in range(1, 25)
    ]
    assert 0.003 < sum(told[-8:]) / 8 < 0.03
    assert not 0.003 < told[0] < 0.03


def test_the_desired_kl_falls_over_the_run(tokenizer):
    half = {"training__desired_kl": 1e-9, "training__desired_kl_final": 0.0, "training__iterations": 2}
    learner = make_learner(tokenizer, **DESIRED, **half)
    rates = [learner.update(make_episodes(learner, [1.0, -1.0]), iteration=n)["optim/lr"] for n in (1, 2, 3)]
    assert rates == [1e-3, 1e-3 / 1.5, 1e-3 / 1.5 / 1.5]


def test_a_resume_has_the_rate_bit_for_bit_and_other_schedules_have_no_state(tokenizer, tmp_path: Path):
    learner, other = make_learner(tokenizer, **DESIRED), make_learner(tokenizer)
    for item in (learner, other):
        item.update(make_episodes(item, [1.0, -1.0]), iteration=1)
    learner.save(tmp_path / "iteration_1", Progress(1, 1, 2))
    again, _ = LocalLearner.resumed(learner.config, tmp_path / "iteration_1")
    episodes = make_episodes(learner, [0.5, -1.0])
    found = again.update(episodes, iteration=2)
    assert found == learner.update(episodes, iteration=2)
    assert found["optim/lr"] != 1e-3
    assert are_equal(learner.weights(), again.weights())
    other.save(tmp_path / "iteration_2", Progress(1, 1, 2))
    assert not [*tmp_path.glob(f"iteration_2/**/{RATE_FILE}")]


def two_decisions() -> Segment:
    return Segment.of(
        "r",
        [5, 20, 21, 6, 22],
        [math.log(0.995), -1.0, math.log(0.999)],
        [(1, 3, 0, 0, 1.0), (4, 5, 1, 0, 1.0)],
    )


def test_certain_decisions_and_those_of_other_policies_are_not_measured():
    mine = Scored(two_decisions(), proximal=np.array([-0.1, -1.0, -0.2]))
    assert sample_decisions([mine, Scored(two_decisions(), policy="teacher")], 0.99, (1, 1)) == {0: [0]}
    # d = 0, ln 2 and, in the certain decision, whatever: k3 = 2 - 1 - ln 2
    now = np.array([-0.1, -1.0 + math.log(2.0), 5.0])
    assert kl_of_decisions([mine], {0: [0]}, lambda segments: [now]) == pytest.approx(1 - math.log(2.0))
    assert sample_decisions([Scored(segment("c", [5], [20], [-1e-3]))], 0.99, (1, 1)) == {}


def test_the_sample_is_bounded_and_follows_from_the_seed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_size, "SAMPLE", 5)
    scored = [Scored(segment("r", [5], [20], [-1.0], t=t)) for t in range(50)]
    first, again, other = (sample_decisions(scored, 0.99, (1, iteration)) for iteration in (1, 1, 2))
    assert first == again != other and len(first) == 5
