"""The bandit of the mixture: what a fixed policy brings where it is good, and costs where it is not."""

import pytest

from tests.trainer_backend.core.bandit_mixture import Lock, leaning, learned
from trainer_backend.core.allocation import ConstantSchedule
from trainer_backend.core.behaviour import WeightKeys

SEEDS = (0, 1, 2)
# One combination of 4^6 = 4096 opens it; the good policy does in 0.925^6 = 63 % of its samples.
HARD, GOOD = {"dials": 6, "numbers": 4}, leaning(4, 0)
# One of 16 opens it; the bad policy does in one of 1600 samples.
EASY, BAD = {"dials": 2, "numbers": 4}, leaning(4, 1)


def curve(lock, alpha, seed, iterations=40):
    return learned(lock, ConstantSchedule(seed=seed, alpha=alpha), iterations)


def opened_at(found):
    """The iteration after which it is opened in every second try."""
    return next((i for i, chance in enumerate(found, start=1) if chance >= 0.5), None)


@pytest.mark.parametrize("seed", SEEDS)
def test_with_a_good_policy_it_is_opened_where_the_actor_alone_never_sees_it_open(seed):
    lock = Lock(**HARD, fixed=GOOD)
    assert opened_at(curve(lock, 1.0, seed)) is None
    assert opened_at(curve(lock, 0.5, seed)) <= 30


@pytest.mark.parametrize("seed", SEEDS)
def test_with_weights_by_the_episode_it_is_not(seed):
    by_episode = Lock(**HARD, fixed=GOOD, weighting=WeightKeys(behaviour_weight_level="episode"))
    assert curve(by_episode, 0.5, seed)[-1] < 0.01


@pytest.mark.parametrize("kind", ["decoupled", "reinforce"])
def test_it_is_learned_from_the_fixed_policys_samples_alone(kind):
    assert opened_at(curve(Lock(**HARD, fixed=GOOD, kind=kind), 0.0, seed=0)) <= 35


def test_a_clip_around_the_fixed_policy_holds_the_actor_near_it():
    decoupled, single = (
        curve(Lock(**HARD, fixed=GOOD, kind=kind), 0.0, seed=0, iterations=80)[-1]
        for kind in ("decoupled", "single_ratio")
    )
    # a wrong number is held once it is 0.8 times as likely as to the fixed policy: 0.94 a dial, 0.69 in all;
    # AdamW's momentum carries it some way further
    assert decoupled > 0.95
    assert single < 0.85


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bad_policy_does_no_lasting_harm(seed):
    lock = Lock(**EASY, fixed=BAD)
    alone, beside = curve(lock, 1.0, seed), curve(lock, 0.5, seed)
    assert opened_at(alone) <= opened_at(beside) <= 20, "half of the samples show nothing"
    assert beside[-1] == pytest.approx(alone[-1], abs=0.02)


@pytest.mark.parametrize("kind", ["decoupled", "single_ratio", "reinforce"])
def test_a_fixed_policy_that_is_the_actor_as_it_begins_changes_nothing(kind):
    lock = Lock(**EASY, fixed=[0.25] * 4, kind=kind, steps=1)
    # seed 3: one of the first 16 samples opens it
    (own,), (other,) = curve(lock, 1.0, 3, iterations=1), curve(lock, 0.0, 3, iterations=1)
    assert own != 1 / 16
    assert other == pytest.approx(own, abs=1e-12)
    assert curve(lock, 0.5, 3, iterations=1) == pytest.approx([own], abs=1e-12)
