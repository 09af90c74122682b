"""`algorithm.ratio_level` and every loss on a real tiny model: the cut of the batch never matters."""

from collections.abc import Sequence

import pytest
import torch

from tests.trainer_backend.learner.hand_made import SIZE, learner_of, segment, tiny_tokenizer
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.parts import CreditedEpisode
from trainer_backend.plugins import LOSSES


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def two_segments_each(learner: LocalLearner, advantages: Sequence[float]) -> list[CreditedEpisode]:
    """Episodes of two decisions with fresh prompts, of two tokens and three."""
    made = []
    for i, advantage in enumerate(advantages):
        drafts = [([5, 6, 7 + i], [20 + i, 30 + i]), ([8, 9 + i], [40 + i, 50, 60 + i])]
        parts = []
        for t, (prompt, answer) in enumerate(drafts):
            (own,) = learner.scorer.score([segment(f"r{i}", prompt, answer, [0.0] * len(answer))], SIZE)
            parts.append(segment(f"r{i}", prompt, answer, own, t))
        made.append(CreditedEpisode(f"r{i}", parts, [advantage, -advantage / 2]))
    return made


def updated(tokenizer, advantages=(1.0, -1.0, 0.5), **settings):
    training = {
        f"training__{key}": value for key, value in settings.items() if key not in ("loss", "ratio_level")
    }
    algorithm = {f"algorithm__{key}": settings[key] for key in ("loss", "ratio_level") if key in settings}
    learner = learner_of(
        tokenizer,
        **{
            "training__update_passes": 3,
            "training__batch_decisions": 64,
            "training__learning_rate": 1e-4,
            **training,
        },
        **algorithm,
    )
    metrics = learner.update(two_segments_each(learner, advantages), iteration=1)
    return metrics, learner.weights()


@pytest.mark.parametrize("level", ["token", "decision", "episode"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_cut_into_pieces_of_one_row_moves_the_weights_alike(tokenizer, loss, level):
    whole, of_whole = updated(tokenizer, loss=loss, ratio_level=level, row_tokens=16, micro_batch_tokens=4096)
    cut, of_cut = updated(tokenizer, loss=loss, ratio_level=level, row_tokens=16, micro_batch_tokens=64)
    assert cut["loss/policy"] == pytest.approx(whole["loss/policy"], abs=1e-6)
    for name, tensor in of_whole.items():
        # AdamW divides by the gradient's size: a rounding of a tiny gradient can turn its step around
        assert torch.allclose(tensor, of_cut[name], atol=2e-5), name


def test_the_tokens_of_an_episode_share_one_ratio_over_all_its_segments(tokenizer):
    # Two steps of one episode: the first at ratio 1, the second at one other for all of its five tokens.
    one = {"advantages": [1.0], "update_passes": 2}
    metrics, _ = updated(tokenizer, ratio_level="episode", **one)
    low, high = metrics["loss/ratio_min"], metrics["loss/ratio_max"]
    assert high - low > 1e-4
    assert metrics["loss/ratio_mean"] == pytest.approx((low + high) / 2, abs=1e-6)
    by_decision, _ = updated(tokenizer, ratio_level="decision", **one)
    assert by_decision["loss/ratio_min"] < 1 < by_decision["loss/ratio_max"], "a good decision and a bad one"


def test_gspo_is_the_clipped_loss_with_the_ratio_of_decisions(tokenizer):
    # a range so wide that three passes stay inside, where ratios of tokens and of decisions pull differently
    wide = {"clip_low": 0.2, "clip_high": 0.25, "aggregation": "decision_mean"}
    _, of_gspo = updated(tokenizer, loss="gspo", **wide)
    _, by_hand = updated(tokenizer, loss="clipped", ratio_level="decision", **wide)
    _, by_token = updated(tokenizer, loss="clipped", **wide)
    assert all(torch.equal(tensor, by_hand[name]) for name, tensor in of_gspo.items())
    assert any(not torch.equal(tensor, by_token[name]) for name, tensor in of_gspo.items())
