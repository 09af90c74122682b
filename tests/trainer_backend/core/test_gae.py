"""`gae` by hand and by identity."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_backend.core.advantages.episodes import AdvantageConfig, EpisodeRewards
from trainer_backend.core.advantages.gae import gae, generalised_advantages
from trainer_backend.core.errors import AdvantageError
from trainer_backend.core.returns import discounted_returns

NUMBER = st.integers(-16, 16).map(lambda quarters: quarters / 4)
PAIRS = st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=6)
SHARE = st.sampled_from([0.0, 0.5, 1.0])


def test_it_sums_discounted_surprises():
    # values 1, 2; rewards 0, 3; gamma = lambda = 1/2: delta_1 = 3 - 2 = 1, delta_0 = 0 + 1 - 1 = 0
    episode = EpisodeRewards("r", "g", [0.0, 3.0], values_T=[1.0, 2.0])
    result = gae([episode], AdvantageConfig(gamma=0.5, gae_lambda=0.5))
    assert result.per_episode == [[0.25, 1.0]]
    assert result.parts["value"] == [[1.0, 2.0]]


@given(PAIRS, SHARE)
def test_lambda_1_is_the_return_minus_the_value(pairs, gamma):
    rewards, values = map(list, zip(*pairs, strict=True))
    found = generalised_advantages(rewards, values, gamma=gamma, gae_lambda=1.0)
    returns = discounted_returns(rewards, gamma)
    assert found == pytest.approx([g - v for g, v in zip(returns, values, strict=True)])


@given(PAIRS, SHARE)
def test_lambda_0_is_the_surprise_of_one_decision(pairs, gamma):
    rewards, values = map(list, zip(*pairs, strict=True))
    found = generalised_advantages(rewards, values, gamma=gamma, gae_lambda=0.0)
    after = [*values[1:], 0.0]
    assert found == pytest.approx([r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)])


@given(PAIRS, SHARE)
def test_a_critic_that_knows_the_returns_leaves_nothing_to_learn(pairs, gae_lambda):
    rewards = [reward for reward, _ in pairs]
    found = generalised_advantages(
        rewards, discounted_returns(rewards, 0.5), gamma=0.5, gae_lambda=gae_lambda
    )
    assert found == pytest.approx([0.0] * len(rewards), abs=1e-12)


def test_a_decision_without_a_value_is_refused_by_name():
    with pytest.raises(AdvantageError, match="rollout r-7: 0 values for 1 decisions"):
        gae([EpisodeRewards("r-7", "g", [1.0])], AdvantageConfig())


@pytest.mark.parametrize("config", [AdvantageConfig(gamma=1.5), AdvantageConfig(gae_lambda=-0.5)])
def test_shares_outside_0_1_are_refused(config):
    with pytest.raises(ValueError, match="must lie in"):
        gae([EpisodeRewards("r", "g", [1.0], values_T=[0.0])], config)
