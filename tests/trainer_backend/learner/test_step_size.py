"""`training.learning_rate_schedule = "desired_kl"` on a real tiny model."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainer_backend.learner.hand_made import SIZE, make_episodes, make_learner, segment
from trainer_backend.core.segments import Segment
from trainer_backend.learner import step_size
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.step_size import RATE_FILE, kl_of_decisions, sample_decisions
from trainer_backend.learner.stepping import Scored
from trainer_backend.parts import Progress

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
    assert all(torch.equal(tensor, again.weights()[name]) for name, tensor in learner.weights().items())
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
