"""Small pure functions: hand-worked numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared_schemas.evaluate_result import EvaluateResult
from shared_schemas.trajectory import (
    ObservationData,
    PolicyLogprobs,
    Sampling,
    StepData,
    StepInfo,
    StopReason,
    Trajectory,
    UserReward,
)
from tests.trainer_backend.dialogues import trajectory
from trainer_backend.core.schedules import (
    DesiredKlKeys,
    FallKeys,
    constant,
    cosine,
    followed_rate,
    learning_rate,
    linear,
)
from trainer_backend.core.statistics import (
    Interval,
    average_by_turn,
    decision_metrics,
    episode_metrics,
    mean_interval,
    over_worlds,
    staleness_metrics,
    t_quantile_975,
    user_reward_metrics,
)


def episode(counters: list[dict[str, int]], *, invalid: tuple[int, ...] = ()) -> Trajectory:
    """An episode whose counters after each decision are given; before the first they are all 0."""
    before = dict.fromkeys(counters[-1], 0)
    steps = []
    for turn, after in enumerate(counters, start=1):
        steps.append(
            StepData(
                turn=turn,
                observation_data=ObservationData(achievements_counts=before),
                next_observation=ObservationData(achievements_counts=after),
                action_taken={"type": "tool_call"},
                env_rewards=(0.0,),
                step_info=StepInfo(invalid_reason="no" if turn in invalid else None),
            )
        )
        before = after
    ending = {"terminated": False, "truncated": True, "stop_reason": StopReason.MAX_DECISIONS}
    return trajectory(steps, (), outcome_reward=1.0, achievements_counts=before, **ending)


WOOD_TWICE = episode([{"wood": 1, "cow": 0}, {"wood": 2, "cow": 1}, {"wood": 2, "cow": 1}], invalid=(3,))
NOTHING = episode([{"wood": 0, "cow": 0}])


def test_the_logs_of_a_batch_by_hand():
    metrics = decision_metrics([WOOD_TWICE, NOTHING], [[1.0, 1.0, 0.0], [0.0]])
    assert metrics == {
        "decision/count": 4.0,
        "decision/unique_sum": 2.0,  # wood, then the cow
        "decision/ach_sum": 3.0,  # wood, then wood again and the cow
        "decision/nonzero": 2.0,
        "decision/nonzero_frac": 0.5,
        "decision/batch_nonzero": 1.0,
        "reward/sum": 2.0,
        "reward/mean": 1.0,
        "reward/nonzero_episode_frac": 0.5,
        "reward/batch_nonzero": 1.0,
    }


def test_an_outcome_reward_is_no_event_reward():
    # mode off: all of r_t lies on the last decision, though no decision unlocked anything
    metrics = decision_metrics([NOTHING], [[1.0]])
    assert (metrics["reward/batch_nonzero"], metrics["decision/batch_nonzero"]) == (1.0, 0.0)


def test_by_turn_a_risen_counter_counts_again_a_first_unlock_once_and_an_ended_episode_nothing():
    # wood; wood again and the cow; nothing. The other episode, of one decision, has nothing.
    expected = {"decision/unique_by_turn": [0.5, 0.5, 0.0], "decision/ach_by_turn": [0.5, 1.0, 0.0]}
    assert average_by_turn([WOOD_TWICE, NOTHING]) == expected
    assert average_by_turn([]) == {"decision/unique_by_turn": [], "decision/ach_by_turn": []}


def test_episode_means_and_endings():
    metrics = episode_metrics([WOOD_TWICE, NOTHING])
    assert metrics["episode/unique_achievements"] == 1.0
    assert metrics["episode/decisions"] == 2.0
    assert metrics["episode/invalid_frac"] == 0.25
    assert (metrics["episode/env_steps"], metrics["episode/outcome_reward"]) == (2.0, 1.0)
    assert metrics["stop/max_decisions"] == 1.0


def test_tokens_lag_behind_by_the_version_that_sampled_them():
    # two tokens of version 3 and one of 4, while 5 learns: 2, 2, 1
    call = PolicyLogprobs(
        prompt_token_ids=(1,), token_ids=(2, 3, 4), logprobs=(-1.0,) * 3, versions=((0, 3), (2, 4)),
        finish_reason="stop",
    )  # fmt: skip
    told = [
        step.model_copy(update={"policy_logprobs": call, "sampling": Sampling()}) for step in NOTHING.steps
    ]
    metrics = staleness_metrics([NOTHING.model_copy(update={"steps": tuple(told)}), WOOD_TWICE], version=5)
    assert metrics == {"policy/staleness_max": 2.0, "policy/staleness_mean": pytest.approx(5 / 3)}
    assert staleness_metrics([WOOD_TWICE], version=5) == {}


def test_what_a_reward_function_said_is_a_mean_over_the_episodes_that_it_judged():
    said = UserReward(
        reward_function="f", result=EvaluateResult(score=4.0), environment_outcome_reward=3.0,
        environment_outcome_definition="d",
    )  # fmt: skip
    first, *others = WOOD_TWICE.steps
    steps = (first.model_copy(update={"base_reward": 0.5}), *others)
    judged = WOOD_TWICE.model_copy(update={"steps": steps, "user_reward": said, "warnings": ("w", "w")})
    assert user_reward_metrics([judged, NOTHING]) == {
        "user_reward/score": 4.0,
        "user_reward/base_sum": 0.5,
        "user_reward/warnings": 2.0,
        "episode/environment_outcome_reward": 3.0,
    }
    assert user_reward_metrics([NOTHING]) == {}


def test_an_interval_by_hand():
    # 1, 2, 3: mean 2, sample std 1, t of 2 degrees of freedom 4.303
    interval = mean_interval([1.0, 2.0, 3.0])
    assert interval.mean == 2.0
    assert interval.low == pytest.approx(2.0 - 4.303 / math.sqrt(3))
    assert interval.high == pytest.approx(2.0 + 4.303 / math.sqrt(3))


def probability_within(t: float, freedom: int) -> float:
    """P(|T| <= t) of Student's t: finite sums, Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


# 3 decimals in the table, and a series whose first term left out is 1.6 / freedom^4
@pytest.mark.parametrize(
    ("freedom", "error"), [*((n, 6e-4) for n in range(1, 31)), (31, 3e-6), (101, 3e-8), (1000, 3e-12)]
)
def test_19_of_20_lie_within_the_quantile_of_student_s_t(freedom: int, error: float):
    quantile = t_quantile_975(freedom)
    assert (
        probability_within(quantile - error, freedom) < 0.95 < probability_within(quantile + error, freedom)
    )


def test_one_value_has_no_interval_and_none_has_no_mean():
    assert (mean_interval([4.0]).mean, mean_interval([4.0]).low) == (4.0, None)
    with pytest.raises(ValueError, match="at least one"):
        mean_interval([])
    with pytest.raises(ValueError, match="at least one degree"):
        t_quantile_975(0)


@pytest.mark.parametrize(
    ("fall", "falling"),
    [
        (linear, [1.0, 0.8, 0.6, 0.4, 0.2]),
        # 1 - 0.8 * (1 - cos(pi x)) / 2 at x = 0, 1/4, 1/2, 3/4, 1; cos(pi / 4) = 0.7071068
        (cosine, [1.0, 0.8828427, 0.6, 0.3171573, 0.2]),
        (constant, [1.0] * 5),
    ],
)
def test_every_schedule_rises_the_same_and_falls_to_its_share_at_the_end_or_not_at_all(fall, falling):
    def rates(rise, *progress):
        return [learning_rate(2.0, progress=p, rise=rise, final=0.2, fall=fall) for p in progress]

    assert rates(0.4, 0.0, 0.1, 0.4) == [0.0, 0.5, 2.0]
    assert rates(0.0, 0.0, 0.25, 0.5, 0.75, 1.0) == pytest.approx([2 * rate for rate in falling])
    assert rates(0.5, 0.5, 0.625, 0.75, 0.875, 1.0) == pytest.approx([2 * rate for rate in falling])


@given(st.floats(0, 1), st.floats(0, 0.99), st.floats(0, 1))
def test_the_learning_rate_never_passes_its_peak_and_never_its_share(
    progress: float, rise: float, final: float
):
    for fall in (linear, cosine, constant):
        rate = learning_rate(1.0, progress=progress, rise=rise, final=final, fall=fall)
        assert 0.0 <= rate <= 1.0 + 1e-12
        assert progress < rise or rate >= final - 1e-12


def test_the_rate_moves_by_a_bounded_factor_towards_the_desired_kl():
    moves = {kl: followed_rate(3.0, kl, desired=0.1, begin=3.0) for kl in (0.0, 0.04, 0.06, 0.2, 0.21)}
    assert moves == {0.0: 3.0, 0.04: 4.5, 0.06: 3.0, 0.2: 3.0, 0.21: 2.0}
    assert followed_rate(29.0, 0.01, desired=0.1, begin=3.0) == 30.0
    assert followed_rate(0.031, 1.0, desired=0.1, begin=3.0) == 0.03


def test_shares_outside_their_range_are_refused():
    with pytest.raises(ValueError, match="progress=2"):
        learning_rate(1.0, progress=2, rise=0, final=0)
    for keys, name in ((FallKeys, "learning_rate_final"), (DesiredKlKeys, "desired_kl_final")):
        for share in (-0.1, 1.1):
            with pytest.raises(ValidationError, match=name):
                keys.model_validate({name: share})


def test_the_interval_of_a_batch_is_over_groups_whose_siblings_share_their_start():
    # group means -1 and 1: mean 0, standard error 1, one degree of freedom
    interval = over_worlds([-2.0, 0.0, 1.0, 1.0], ["a", "a", "b", "b"])
    t = t_quantile_975(1)
    assert interval == Interval(0.0, -t, t, 2)
    assert over_worlds([1.0, 2.0], ["a", "a"]).low is None  # one group has no interval


def test_the_mean_of_counts_is_no_negative_number_and_that_of_penalties_no_positive_one():
    # means 1 and 3: the interval of Student's t alone begins at 2 - 12.706
    t = t_quantile_975(1)
    assert over_worlds([1.0, 3.0], ["a", "b"]) == Interval(2.0, 0.0, 2 + t, 2)
    assert over_worlds([-1.0, -3.0], ["a", "b"]) == Interval(-2.0, -2 - t, 0.0, 2)
