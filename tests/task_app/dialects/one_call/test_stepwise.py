"""The stepwise blocks of POST /rollout: the r_t of source 1, worked by hand."""

import pytest

from shared_schemas.trajectory import DecisionRewards, ObservationData, StepData, StepMetadata
from task_app.dialects.one_call.reply import stepwise_blocks, stepwise_details
from task_app.dialects.one_call.request import read_stepwise
from task_app.errors import InvalidRequest

ON = {"enabled": True, "mode": "decision_stepwise"}


def steps(*achieved):
    """Decisions that achieved these: upper case for the first time, lower case again."""
    return [
        StepData(
            turn=turn,
            observation_data=ObservationData(),
            action_taken={"type": "text"},
            metadata=StepMetadata(
                decision_rewards=DecisionRewards(
                    turn=turn,
                    ach_delta=len(names),
                    unique_delta=sum(name.isupper() for name in names),
                    all=tuple(name.lower() for name in names),
                    unique=tuple(name.lower() for name in names if name.isupper()),
                )
            ),
        )
        for turn, names in enumerate(achieved, start=1)
    ]


def rewards(rules, *achieved):
    found = stepwise_blocks(steps(*achieved), read_stepwise({**ON, **rules}, where="step_rewards"))
    return [block["reward"] for block in found]


def test_the_reward_is_the_unique_delta_or_the_absolute_one():
    assert rewards({}, ["A", "B"], ["a"], []) == [2.0, 0.0, 0.0]
    assert rewards({"kind": "absolute"}, ["A", "B"], ["a"], []) == [2.0, 1.0, 0.0]


def test_lambda_is_added_and_beta_counts_the_decisions_left_where_something_was_unlocked():
    # T = 3: r_0 = 1 + 0.5 + 0.1 * 3, r_1 = 0, r_2 = 1 + 0.5 + 0.1 * 1
    assert rewards({"indicator_lambda": 0.5, "step_beta": 0.1}, ["A"], ["a"], ["B"]) == pytest.approx(
        [1.8, 0.0, 1.6]
    )


def test_weights_and_limits_hold_with_the_strategy_per_achievement():
    rules = {"strategy": "per-achievement", "weights": {"a": 0.25}, "k_limits": {"a": 2, "b": 0}}
    # a: 0.25 twice, then no more; b: 1 each time, without limit; c: 1 once.
    assert rewards(rules, ["A", "B", "C"], ["a", "b"], ["a", "b", "c"]) == [2.25, 1.25, 1.0]


def test_the_sums_of_the_details_are_those_of_the_blocks():
    rules = read_stepwise({**ON, "indicator_lambda": 1.0}, where="")
    first = stepwise_blocks(steps(["A", "B"], ["b"]), rules)
    second = stepwise_blocks(steps(["A"]), rules)
    details = stepwise_details([first, second], rules, unlocked=["b", "a"])
    assert (details["indicator_sum"], details["reward_sum"], details["resource_reward"]) == (2, 5.0, 0.0)
    assert (details["new_achievements_total"], details["unique_achievements_total"]) == (3, 2)
    assert (details["unique_achievements"], details["final_achievements"]) == (["a", "b"], ["a", "b"])


@pytest.mark.parametrize("mode", [{"enabled": False}, {"mode": "env_sparse"}, {"mode": "off"}])
def test_without_the_switches_there_are_no_blocks(mode):
    assert stepwise_blocks(steps(["A"]), read_stepwise({**ON, **mode}, where="")) == []


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"strategy": "consistant"}, "Did you mean 'consistent'?"),
        ({"enabeld": True}, "Did you mean 'enabled'?"),
        ({"mode": "decision_step"}, "decision_stepwise"),
        ({"k_limits": {"a": "x"}}, "step_rewards.k_limits.a"),
        ([], "is no object"),
    ],
)
def test_a_misspelt_switch_is_told(raw, words):
    with pytest.raises(InvalidRequest, match=words.replace("?", r"\?").replace(".", r"\.")):
        read_stepwise(raw, where="step_rewards")
