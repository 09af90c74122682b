"""`system_apply_gigpo_to_batch_steps`, the door that source 2 publishes, by hand."""

import pytest

from shared_schemas.messages import Message
from shared_schemas.trajectory import ObservationData, StepData
from trainer_backend.core.advantages.gigpo import system_apply_gigpo_to_batch_steps
from trainer_backend.core.errors import AdvantageError


def step(turn, state, base_reward=None, value=None):
    return StepData(
        turn=turn,
        observation_data=ObservationData(messages=(Message(role="user", content=state),)),
        action_taken={"type": "text", "content": ""},
        base_reward=base_reward,
        policy_value_estimate=value,
    )


def rollout(states, rewards=None, values=None):
    count = len(states)
    rewards, values = rewards or [None] * count, values or [None] * count
    return [step(t + 1, *row) for t, row in enumerate(zip(states, rewards, values, strict=True))]


def text_of(observation):
    return observation.messages[-1].content


def applied(rollouts, scores, *, omega=0.5, gamma=0.5, default=0.0):
    return system_apply_gigpo_to_batch_steps(rollouts, scores, omega, gamma, text_of, default)


def columns(rollouts, name):
    return [[getattr(item, name) for item in steps] for steps in rollouts]


def test_scores_and_returns_from_equal_states_are_standardised_and_joined():
    # Scores 1 and 0: A_E = +-1/sqrt(2) * ... = (1 - .5) / sqrt(.5) = .7071. State "a": G = 2 + .5 * 4 = 4 and
    # 0 + .5 * 0 = 0, so A_S = +-.7071 too; "b" and "c" are met once: 0.
    done = applied([rollout("ab", [2.0, 4.0]), rollout("ac", [0.0, 0.0])], [1.0, 0.0])
    half = 0.5**0.5
    assert columns(done, "advantage")[0] == pytest.approx([half, half / 2])
    assert columns(done, "advantage")[1] == pytest.approx([-half, -half / 2])
    assert columns(done, "return_to_go") == [[4.0, 4.0], [0.0, 0.0]]


def test_without_step_rewards_the_final_score_comes_at_the_end_after_a_cost_of_time():
    (done, _) = applied([rollout("abc"), rollout("xyz")], [8.0, 0.0], default=-1.0)
    # G_2 = -1 + 8, G_1 = -1 + 7 / 2, G_0 = -1 + 2.5 / 2
    assert [item.return_to_go for item in done] == [0.25, 2.5, 7.0]


def test_a_missing_step_reward_among_others_is_the_default_and_no_score_is_added():
    (done, _) = applied([rollout("ab", [None, 1.0]), rollout("xy")], [8.0, 0.0], default=-1.0, gamma=1.0)
    assert [item.return_to_go for item in done] == [0.0, 1.0]


def test_with_a_critic_the_return_to_go_is_advantage_plus_value():
    done, _ = applied([rollout("a", [1.0], [0.25]), rollout("b", [0.0], [0.25])], [1.0, 0.0], omega=1.0)
    assert done[0].return_to_go == pytest.approx(0.5**0.5 + 0.25)


def test_the_steps_given_are_left_as_they_were():
    given = [rollout("a", [1.0]), rollout("b", [0.0])]
    applied(given, [1.0, 0.0])
    assert columns(given, "advantage") == [[None], [None]]


@pytest.mark.parametrize(
    ("rollouts", "scores", "message"),
    [
        ([rollout("a")], [], "0 final scores for 1 rollouts"),
        ([rollout("a"), []], [1.0, 0.0], "rollout number 1: no decision"),
        ([rollout("a"), rollout("b")], [1.0, float("nan")], "rollout number 1"),
    ],
)
def test_what_cannot_be_credited_is_refused_by_the_number_of_its_rollout(rollouts, scores, message):
    with pytest.raises(AdvantageError, match=message):
        applied(rollouts, scores)
