"""Who samples: as often as alpha says, the same after every resume, and by what earlier iterations told."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_backend.core.adaptive import AdaptiveSchedule
from trainer_backend.core.allocation import (
    AllocationPlug,
    ConstantSchedule,
    DrawnSchedule,
    ExponentialSchedule,
    LinearSchedule,
    RolloutAllocationSchedule,
    StepSchedule,
    Weighted,
)
from trainer_backend.core.policies import ACTOR
from trainer_backend.errors import JobError

DRAWS = 10_000
SHARES = st.floats(0.0, 1.0)
EACH: dict[str, DrawnSchedule] = {
    "constant": ConstantSchedule(seed=3, alpha=0.5),
    "linear": LinearSchedule(seed=3, alpha_0=0.1, beta=0.00005, max_alpha=0.4),
    "exponential": ExponentialSchedule(seed=3, gamma=0.0002),
    "step": StepSchedule(seed=3, switch_steps=[100, 500, 1000]),
    "adaptive": AdaptiveSchedule(seed=3, alpha_0=0.3),
}


def within_bounds(found: int, probabilities: list[float]) -> bool:
    """Five standard deviations of a sum of coin flips: one in two million would lie beyond."""
    deviation = math.sqrt(math.fsum(p * (1 - p) for p in probabilities))
    return abs(found - math.fsum(probabilities)) <= 5 * deviation


@pytest.mark.parametrize("schedule", EACH.values(), ids=EACH)
def test_of_ten_thousand_draws_the_actor_has_as_many_as_alpha_says(schedule: DrawnSchedule):
    steps = range(1, DRAWS + 1)
    actors = sum(schedule.get_policy_choice(step) == ACTOR for step in steps)
    assert within_bounds(actors, [schedule.alpha_at(step) for step in steps])


def test_fixed_policies_share_what_is_left_by_their_weights():
    ensemble = Weighted({"teacher": 3.0, "early": 1.0})
    schedule = ConstantSchedule(seed=0, alpha=0.5, selection=ensemble)
    assert schedule.shares(1) == {ACTOR: 0.5, "teacher": 0.375, "early": 0.125}
    chosen = Counter(schedule.get_policy_choice(step) for step in range(DRAWS))
    for policy, share in schedule.shares(1).items():
        assert within_bounds(chosen[policy], [share] * DRAWS)


@pytest.mark.parametrize("schedule", EACH.values(), ids=EACH)
@given(st.lists(st.integers(1, 5000), max_size=30))
def test_a_choice_needs_nothing_but_seed_and_step(schedule: DrawnSchedule, steps: list[int]):
    # Whatever was asked before, and wherever a resumed run begins.
    known = {step: schedule.get_policy_choice(step) for step in sorted(steps)}
    assert {step: schedule.get_policy_choice(step) for step in reversed(steps)} == known


def test_the_choices_are_those_of_every_machine_and_version():
    schedule = ConstantSchedule(seed=0, alpha=0.5)
    assert "".join(schedule.get_policy_choice(step)[0] for step in range(1, 13)) == "faaafffaaaff"
    other = ConstantSchedule(seed=1, alpha=0.5)
    assert [other.get_policy_choice(step) for step in range(100)] != [
        schedule.get_policy_choice(step) for step in range(100)
    ]


@given(SHARES, SHARES, st.integers(0, 2**31 - 1), st.integers(1, 10_000))
def test_a_higher_alpha_only_ever_turns_fixed_samples_into_the_actors(
    one: float, other: float, seed: int, step: int
):
    low, high = sorted((one, other))
    if ConstantSchedule(seed=seed, alpha=low).get_policy_choice(step) == ACTOR:
        assert ConstantSchedule(seed=seed, alpha=high).get_policy_choice(step) == ACTOR


def test_linear_rises_by_beta_a_step_up_to_its_bound():
    schedule = LinearSchedule(seed=0, alpha_0=0.1, beta=0.01, max_alpha=0.5)
    assert schedule.alpha_at(1) == pytest.approx(0.11)
    assert schedule.alpha_at(30) == pytest.approx(0.4)
    assert schedule.alpha_at(40) == schedule.alpha_at(41) == 0.5


def test_exponential_nears_one():
    schedule = ExponentialSchedule(seed=0, gamma=0.1)
    assert schedule.alpha_at(0) == 0.0
    assert schedule.alpha_at(5) == pytest.approx(1 - math.exp(-0.5))
    assert schedule.alpha_at(10**6) == 1.0


@pytest.mark.parametrize(
    ("steps", "initial", "step", "choice"),
    [
        # the published example: fixed, then flips at 100, 500 and 1000, which count as behind (step >= s)
        ([100, 500, 1000], "fixed", 99, "fixed"),
        ([100, 500, 1000], "fixed", 100, "actor"),
        ([100, 500, 1000], "fixed", 500, "fixed"),
        ([100, 500, 1000], "fixed", 10**6, "actor"),
        ([2], "actor", 1, "actor"),
        ([2], "actor", 2, "fixed"),
        # iterations count from 1: before the first there is a step 0, and a switch at 1 is one at once
        ([1], "fixed", 0, "fixed"),
        ([1], "fixed", 1, "actor"),
    ],
)
def test_step_changes_hands_at_each_of_its_steps(steps: list[int], initial: str, step: int, choice: str):
    schedule = StepSchedule(seed=9, switch_steps=steps, initial_policy=initial)  # type: ignore[arg-type]
    assert schedule.get_policy_choice(step) == choice


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ConstantSchedule(seed=0, alpha=1.1), r"alpha must lie in \[0, 1\], got 1.1"),
        (lambda: ConstantSchedule(seed=0, alpha=math.nan), "alpha must lie in"),
        (lambda: LinearSchedule(seed=0, alpha_0=-0.1, beta=0.1), "alpha_0 must lie in"),
        (lambda: LinearSchedule(seed=0, alpha_0=0.1, beta=-0.1), "beta must be finite and not below 0"),
        (lambda: ExponentialSchedule(seed=0, gamma=math.inf), "gamma must be finite"),
        (lambda: StepSchedule(seed=0, switch_steps=[3, 3]), r"switch_steps must rise, got \[3, 3\]"),
        (lambda: StepSchedule([3], "reference"), "initial_policy is 'reference'; known: actor, fixed"),
        (
            lambda: AdaptiveSchedule(seed=0, alpha_0=0.5, min_alpha=0.9, max_alpha=0.2),
            "alpha_0 must lie within min_alpha and max_alpha",
        ),
        (lambda: AdaptiveSchedule(seed=0, alpha_0=0.5, window=0), "window must be 1 at least"),
        (lambda: Weighted({}), "one at least"),
        (lambda: Weighted({"a": 0.0}), "must be above 0"),
        (lambda: Weighted({"a": math.inf}), "must be above 0 and finite"),
    ],
)
def test_what_is_no_schedule_is_refused(make, told: str):
    with pytest.raises(ValueError, match=told):
        make()


class EveryThird(RolloutAllocationSchedule):
    """As a person writes one who has the source alone."""

    def __init__(self, first: str = "actor"):
        self.first = first

    def get_policy_choice(self, step):
        return "fixed" if step % 3 == 0 else self.first


def test_a_subclass_with_get_policy_choice_alone_schedules():
    ensemble = Weighted({"teacher": 1.0, "early": 1.0})
    schedule = AllocationPlug(EveryThird).schedule({}, seed=0, selection=ensemble)
    alone = AllocationPlug(EveryThird).schedule({}, seed=0, selection=Weighted({"teacher": 1.0}))
    assert [alone.get_policy_choice(step) for step in range(1, 7)] == ["actor", "actor", "teacher"] * 2
    assert [alone.alpha_at(step) for step in (1, 2, 3)] == [1.0, 1.0, 0.0]
    rising = AllocationPlug(LinearSchedule).schedule(
        {"alpha_0": 0.25, "beta": 0.25}, seed=0, selection=Weighted()
    )
    assert [rising.alpha_at(step) for step in (1, 2)] == [0.5, 0.75], "one with alpha is asked for it"
    units = [(group,) for group in range(40)]
    assert set(schedule.choices(2, units)) == {ACTOR}
    assert set(schedule.choices(3, units)) == {"teacher", "early"}, "each unit draws which of them"


def test_a_schedule_that_raises_is_named_with_its_line():
    schedule = AllocationPlug(EveryThird).schedule({}, seed=0, selection=Weighted())
    with pytest.raises(JobError, match=r"EveryThird.get_policy_choice\(a\) raised TypeError: .*\(test_alloc"):
        schedule.choices("a", [()])


def test_the_four_take_what_is_published_by_name_and_by_place():
    assert ConstantSchedule(0.5) == ConstantSchedule(alpha=0.5)
    assert ConstantSchedule(alpha=0.5).alpha == 0.5
    assert LinearSchedule(0.1, 0.01, 1.0) == LinearSchedule(alpha_0=0.1, beta=0.01)
    assert ExponentialSchedule(0.1) == ExponentialSchedule(gamma=0.1)
    steps = [100, 500, 1000]
    assert StepSchedule(steps, "fixed") == StepSchedule(switch_steps=steps, initial_policy="fixed")
    assert StepSchedule(steps).get_policy_choice(100) == "actor"
    fields = AllocationPlug(LinearSchedule).keys.model_fields
    assert [(name, item.is_required()) for name, item in fields.items()] == [
        ("alpha_0", True), ("beta", True), ("max_alpha", False),
    ]  # fmt: skip
