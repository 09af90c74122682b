"""The first step of an iteration scores its own segments: the same update, a forward pass less."""

from dataclasses import replace

import pytest
import torch

from tests.trainer_backend.learner.hand_made import SIZE, are_equal, copy_tensors, make_episodes, make_learner
from trainer_backend.errors import NonFiniteLoss, SamplerMismatch
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.update import LogprobCache
from trainer_backend.parts import CreditedEpisode

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


def tokens_seen(learner: LocalLearner) -> list[int]:
    """Gets a number for each forward pass."""
    seen: list[int] = []
    learner.model.get_input_embeddings().register_forward_hook(
        lambda _, given, __: seen.append(given[0].numel())
    )
    return seen


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
    ("cut", "scored", "stepped"), [("one step", 0, 4), ("two passes", 0, 8), ("steps of two", 2, 8)]
)
def test_only_what_the_first_step_lacks_is_scored_before_it(tokenizer, cut: str, scored: int, stepped: int):
    learner = make_learner(tokenizer, **CUTS[cut])
    episodes = make_episodes(learner, ADVANTAGES)
    seen = tokens_seen(learner)
    learner.update(episodes, iteration=1)
    assert sum(seen) == TOKENS * (scored + stepped)


@pytest.mark.parametrize(
    "settings", [{"algorithm__ratio_level": "episode"}, {"lora__rank": 4, "lora__dropout": 0.5}],
    ids=["a ratio of episodes", "dropout"],
)  # fmt: skip
def test_a_step_that_cannot_score_itself_is_scored_before(tokenizer, settings: dict):
    learner = make_learner(tokenizer, **CUTS["one step"], **settings)
    episodes = make_episodes(learner, ADVANTAGES)
    seen = tokens_seen(learner)
    learner.update(episodes, iteration=1)
    assert sum(seen) == TOKENS * (4 + 4)


@pytest.mark.parametrize("cut", CUTS)
def test_a_token_that_was_sampled_otherwise_is_found_before_a_step_is_taken(tokenizer, cut: str):
    learner = make_learner(tokenizer, **CUTS[cut], training__mismatch_limit=0.01)
    episodes = make_episodes(learner, ADVANTAGES)
    for number in range(len(episodes)):  # in the first step or not
        before = copy_tensors(learner)
        (bad,) = off_by(episodes[number : number + 1], 0.1)
        with pytest.raises(SamplerMismatch, match=rf"rollout r{number}, turn 1.*beyond it: 2 of 8 tokens"):
            learner.update([*episodes[:number], bad, *episodes[number + 1 :]], iteration=1)
        assert are_equal(learner.model.state_dict(), before)


def test_log_probs_that_are_not_finite_are_named_before_they_reach_a_gradient(tokenizer):
    learner = make_learner(tokenizer, **CUTS["one step"])
    episodes = make_episodes(learner, ADVANTAGES)
    (bad,) = off_by(episodes[:1], float("nan"))
    with pytest.raises(NonFiniteLoss, match=r"rollout r0, turn 1, token 3: the sampler's log-prob is nan"):
        learner.update([bad, *episodes[1:]], iteration=1)
    assert all(weight.grad is None for weight in learner.model.parameters())
