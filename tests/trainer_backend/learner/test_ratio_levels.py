"""`algorithm.ratio_level` on a real tiny model: which tokens share a ratio."""

import pytest

from tests.trainer_backend.learner.hand_made import SIZE, make_learner, segment, tiny_tokenizer
from trainer_backend.parts import CreditedEpisode


def ratios(tokenizer, level: str) -> dict[str, float]:
    """Of two steps of one episode, whose decisions have two tokens and three: a good one and a bad one."""
    learner = make_learner(
        tokenizer,
        algorithm__ratio_level=level,
        training__update_passes=2,
        training__batch_decisions=64,
        training__learning_rate=1e-4,
    )
    parts = []
    for t, (prompt, answer) in enumerate([([5, 6, 7], [20, 30]), ([8, 9], [40, 50, 60])]):
        (own,) = learner.scorer.score([segment("r0", prompt, answer, [0.0] * len(answer))], SIZE)
        parts.append(segment("r0", prompt, answer, own, t))
    metrics = learner.update([CreditedEpisode("r0", parts, [1.0, -0.5])], iteration=1)
    return {name: metrics[f"loss/ratio_{name}"] for name in ("min", "max", "mean")}


def test_the_tokens_of_an_episode_share_one_ratio_over_all_its_segments():
    tokenizer = tiny_tokenizer()
    # The first step has ratio 1, the second another one for all of the five tokens.
    found = ratios(tokenizer, "episode")
    assert found["max"] - found["min"] > 1e-4
    assert found["mean"] == pytest.approx((found["min"] + found["max"]) / 2, abs=1e-6)
    by_decision = ratios(tokenizer, "decision")
    assert by_decision["min"] < 1 < by_decision["max"]
