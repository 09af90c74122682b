import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_backend.core.rewards import discounted_returns

rewards = st.lists(st.integers(-8, 8).map(float), max_size=20)


def test_a_reward_is_credited_to_its_own_decision_and_all_before_it():
    # one achievement, at the second of three decisions; gamma = 1/2
    assert discounted_returns([0.0, 1.0, 0.0], gamma=0.5) == [0.5, 1.0, 0.0]


def test_an_empty_episode_has_no_returns():
    assert discounted_returns([], gamma=0.9) == []


@given(rewards)
def test_without_discount_the_first_return_is_the_sum_and_with_gamma_0_nothing_carries_over(rewards_T):
    if rewards_T:
        assert discounted_returns(rewards_T, gamma=1.0)[0] == sum(rewards_T)
    assert discounted_returns(rewards_T, gamma=0.0) == rewards_T


@given(rewards, st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_each_return_is_its_reward_and_the_discounted_next_return(rewards_T, gamma):
    returns_T = [*discounted_returns(rewards_T, gamma), 0.0]
    assert all(returns_T[t] == r + gamma * returns_T[t + 1] for t, r in enumerate(rewards_T))


@pytest.mark.parametrize("gamma", [-0.1, 1.01, float("nan")])
def test_a_gamma_outside_0_1_is_refused(gamma):
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\]"):
        discounted_returns([1.0], gamma)
