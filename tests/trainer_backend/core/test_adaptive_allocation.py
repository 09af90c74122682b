"""Choices that look back: how far the actor is from the fixed policies, and which of these is worth most."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_backend.core.adaptive import AdaptiveSchedule
from trainer_backend.core.allocation import ByReward
from trainer_backend.core.behaviour import counted_share
from trainer_backend.core.mixture_history import Past, read_past
from trainer_backend.core.policies import ACTOR

SHARES = st.floats(0.0, 1.0)
OUTCOMES = st.floats(-100, 100)


def past(iteration: int, *, actor: float | None = None, counted: float | None = None, **fixed: float) -> Past:
    """Of ten episodes each, with these mean outcomes; `counted` is that of every fixed policy."""
    outcomes = {**({} if actor is None else {ACTOR: actor}), **fixed}
    shares = {} if counted is None else dict.fromkeys(fixed, counted)
    return Past(iteration, dict.fromkeys(outcomes, 10.0), outcomes, shares)


def adaptive(*history: Past, **keys: float) -> AdaptiveSchedule:
    bounds = {"alpha_0": 0.5, "min_alpha": 0.25}
    return AdaptiveSchedule(seed=0, history=history, **{**bounds, **keys})  # type: ignore[arg-type]


def test_before_both_are_known_alpha_is_the_one_that_it_begins_with():
    assert adaptive().alpha_at(1) == 0.5
    assert adaptive(past(1, teacher=5.0, counted=0.1)).alpha_at(2) == 0.5
    assert adaptive(past(1, actor=5.0)).alpha_at(2) == 0.5


def test_a_fixed_policy_that_is_ahead_and_whose_samples_count_gets_more_than_at_the_beginning():
    assert adaptive(past(1, actor=2.0, teacher=6.0, counted=1.0)).alpha_at(2) == 0.25
    assert adaptive(past(1, actor=2.0, teacher=6.0, counted=1.0), min_alpha=0.0).alpha_at(2) == 0.0


def test_fewer_fixed_samples_as_the_actor_catches_up():
    # The gap was 4 at most, and is 1: a quarter of the samples that it began with. 1 - 3/4 * 1 * 1/4.
    first, then = past(1, actor=2.0, teacher=6.0, counted=1.0), past(2, actor=5.0, teacher=6.0, counted=1.0)
    assert adaptive(first, then, window=1).alpha_at(3) == pytest.approx(1 - 0.75 * 0.25)
    # Over both iterations the actor's mean is 3.5: the gap 2.5.
    assert adaptive(first, then, window=2).alpha_at(3) == pytest.approx(1 - 0.75 * 2.5 / 4)


def test_fewer_fixed_samples_as_they_tell_less():
    assert adaptive(past(1, actor=2.0, teacher=6.0, counted=0.2)).alpha_at(2) == pytest.approx(1 - 0.75 * 0.2)
    # All weigh the same, a thousandth: their effective sample size is 1, and they are worth nothing.
    tiny = counted_share([0.001] * 10)
    assert adaptive(past(1, actor=2.0, teacher=6.0, counted=tiny)).alpha_at(2) > 0.999
    # An update that skipped every group told of none: as much as one of the actor's.
    assert adaptive(past(1, actor=2.0, teacher=6.0)).alpha_at(2) == pytest.approx(0.25)


def test_a_fixed_policy_that_is_worse_is_left_and_looked_at_again_where_that_is_asked_for():
    worse = past(1, actor=6.0, teacher=2.0, counted=1.0)
    assert adaptive(worse).alpha_at(2) == 1.0
    assert adaptive(worse, max_alpha=0.95).alpha_at(2) == 0.95


def test_a_lead_that_is_rounding_alone_is_none():
    assert adaptive(past(1, actor=0.3, teacher=0.1 + 0.2, counted=1.0)).alpha_at(2) == 1.0


def test_what_was_known_of_it_stands_and_it_comes_back_when_the_actor_falls_behind():
    begun = [past(1, actor=2.0, teacher=6.0, counted=1.0)]
    better = [past(step, actor=7.0) for step in range(2, 5)]
    assert adaptive(*begun, *better, window=2).alpha_at(5) == 1.0
    fallen = [past(step, actor=4.0) for step in range(5, 7)]
    assert adaptive(*begun, *better, *fallen, window=2).alpha_at(7) == pytest.approx(1 - 0.75 * 2 / 4)


def test_several_fixed_policies_are_weighed_by_their_episodes():
    mixed = Past(1, {ACTOR: 10, "good": 30, "bad": 10}, {ACTOR: 0.0, "good": 4.0, "bad": 0.0}, {"good": 0.5})
    later = Past(2, {ACTOR: 10}, {ACTOR: 1.5})
    # 3 on average, of which 1.5 is caught up: the actor's mean is 0.75. Half of the good one's samples count.
    assert adaptive(mixed, later).alpha_at(3) == pytest.approx(1 - 0.75 * 0.5 * 2.25 / 3)


@given(st.lists(st.tuples(OUTCOMES, OUTCOMES, SHARES), max_size=12), st.integers(1, 6), st.integers(1, 13))
def test_a_resumed_run_chooses_as_it_would_have(told, window: int, step: int):
    # What comes later, a row that a kill left behind say, changes nothing.
    history = [past(i, actor=a, teacher=f, counted=e) for i, (a, f, e) in enumerate(told, start=1)]
    whole, until = adaptive(*history, window=window), adaptive(*history[: step - 1], window=window)
    assert whole.alpha_at(step) == until.alpha_at(step)
    assert whole.get_policy_choice(step) == until.get_policy_choice(step)


@given(st.lists(st.tuples(OUTCOMES, OUTCOMES, SHARES), max_size=12), SHARES, SHARES)
def test_alpha_stays_within_its_bounds(told, one: float, other: float):
    low, high = sorted((one, other))
    history = [past(i, actor=a, teacher=f, counted=e) for i, (a, f, e) in enumerate(told, start=1)]
    schedule = adaptive(*history, alpha_0=low, min_alpha=low, max_alpha=high)
    assert low <= schedule.alpha_at(13) <= high


def test_each_fixed_policy_is_tried_once_in_their_order():
    names = ["a", "b", "c"]
    assert ByReward(names).shares(1) == {"a": 1.0}
    assert ByReward(names, [past(1, a=9.0)]).shares(2) == {"b": 1.0}
    assert ByReward(names, [past(1, b=9.0), past(2, actor=9.0), past(3, a=1.0)]).shares(4) == {"c": 1.0}


def test_rewards_that_differ_by_rounding_alone_are_explored_like_equal_ones():
    told = [past(1, a=0.8), past(2, a=0.8), past(3, a=0.8), past(4, b=0.1 + 0.7)]
    assert ByReward(["a", "b"], told).shares(5) == {"b": 1.0}, "it has sampled once, the other three times"


def test_then_the_one_that_promises_most_samples():
    # Rewards 0 to 4, so the spread is 4; n = 5, ln 5 = 1.609. a: 3 + 4 sqrt(2 ln 5 / 4) = 6.588;
    # b: 0 + 4 sqrt(2 ln 5) = 7.176: little is known of it.
    told = [past(1, a=4.0), past(2, b=0.0), past(3, a=4.0), past(4, a=4.0), past(5, a=0.0)]
    assert 3 + 4 * math.sqrt(2 * math.log(5) / 4) < 4 * math.sqrt(2 * math.log(5))
    assert ByReward(["a", "b"], told).shares(6) == {"b": 1.0}
    # Tried once more, b has 0 + 4 sqrt(ln 6) = 5.354, and a 3 + 4 sqrt(ln 6 / 2) = 6.786.
    assert ByReward(["a", "b"], [*told, past(6, b=0.0)]).shares(7) == {"a": 1.0}
    assert ByReward(["a", "b"], [*told, past(6, b=0.0)]).shares(6) == {"b": 1.0}  # not known yet


def test_where_all_are_worth_the_same_they_take_turns():
    history: list[Past] = []
    for step in range(1, 10):
        (name,) = ByReward(["a", "b", "c"], history).shares(step)
        history.append(past(step, **{name: 0.0}))
    assert [next(iter(item.outcomes)) for item in history] == ["a", "b", "c"] * 3


def test_the_past_is_read_from_the_rows_of_iterations():
    rows = [
        {"kind": "evaluation", "iteration": 0, "eval/outcome_reward": 1.0},
        {
            "kind": "iteration", "iteration": 1, "mixture/actor/episodes": 0.0, "mixture/t/episodes": 4.0,
            "mixture/t/outcome_reward": 2.5, "mixture/t/counted_share": 0.5, "mixture/gone/episodes": 3.0,
        },
        {"kind": "iteration", "iteration": 2},
    ]  # fmt: skip
    assert read_past(rows, ["t"]) == (Past(1, {"t": 4.0}, {"t": 2.5}, {"t": 0.5}), Past(2, {}, {}))
