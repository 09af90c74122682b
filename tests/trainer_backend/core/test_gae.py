"""`gae` by hand and by identity."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_backend.core.advantages.episodes import EpisodeRewards
from trainer_backend.core.advantages.gae import gae, gae_token, generalised_advantages
from trainer_backend.core.critic import ByToken
from trainer_backend.core.rewards import discounted_returns
from trainer_backend.errors import AdvantageError
from trainer_backend.job.training_table import AlgorithmTable

NUMBER = st.integers(-16, 16).map(lambda quarters: quarters / 4)
PAIRS = st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=6)
SHARE = st.sampled_from([0.0, 0.5, 1.0])


def test_it_sums_discounted_surprises():
    # values 1, 2; rewards 0, 3; gamma = lambda = 1/2: delta_1 = 3 - 2 = 1, delta_0 = 0 + 1 - 1 = 0
    episode = EpisodeRewards("r", "g", [0.0, 3.0], values_T=[1.0, 2.0])
    result = gae([episode], AlgorithmTable(gamma=0.5, gae_lambda=0.5))
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


def test_a_decision_without_a_value_is_refused_by_name():
    with pytest.raises(AdvantageError, match="rollout r-7: 0 values of a critic for 1 decisions"):
        gae([EpisodeRewards("r-7", "g", [1.0])], AlgorithmTable(gamma=1.0))


BOOTSTRAP = AlgorithmTable(gamma=0.5, gae_lambda=0.5, gae_token_lambda=0.5, bootstrap_truncated=True)


def test_an_episode_that_a_limit_cut_short_goes_on_with_the_value_of_the_state_it_was_left_in():
    # Values 1, 2 and then 6; rewards 0, 3: delta_1 = 3 + 6/2 - 2 = 4, delta_0 = 0 + 2/2 - 1 = 0; A_0 = 4/4.
    cut = EpisodeRewards("r", "g", [0.0, 3.0], values_T=[1.0, 2.0], truncated=True, value_after=6.0)
    ended = replace(cut, rollout_id="e", truncated=False)  # its value_after says nothing
    unknown = replace(cut, rollout_id="u", value_after=None)
    result = gae([cut, ended, unknown], BOOTSTRAP)
    assert result.per_episode == [[1.0, 4.0], [0.25, 1.0], [0.25, 1.0]]
    counted = {key: value for key, value in result.diagnostics.items() if "truncated" in key or "boot" in key}
    assert counted == {"advantages/truncated": 2.0, "advantages/bootstrapped": 1.0}
    off = gae([cut, ended, unknown], BOOTSTRAP.model_copy(update=dict(bootstrap_truncated=False)))
    assert off.per_episode == [[0.25, 1.0]] * 3
    assert off.diagnostics.keys() == result.diagnostics.keys() - counted.keys()


@pytest.mark.parametrize("estimator", [gae, gae_token])
@given(PAIRS, NUMBER)
def test_a_value_that_an_episode_goes_on_with_is_worth_as_much_as_a_last_reward_of_it(
    estimator, pairs, after
):
    # delta_{T-1} = r + gamma * V(s_T) - V(s_{T-1}): nothing else reads V(s_T)
    rewards, values = map(list, zip(*pairs, strict=True))
    tokens = ByToken([[value, value - 1.0] for value in values])
    cut = EpisodeRewards(
        "r", "g", rewards, values_T=values, token_values=tokens, truncated=True, value_after=after
    )
    paid = replace(cut, rewards_T=[*rewards[:-1], rewards[-1] + 0.5 * after], truncated=False)
    (found, expected) = (estimator([item], BOOTSTRAP) for item in (cut, paid))
    assert found.per_episode == expected.per_episode  # in quarters nothing is rounded
    assert found.per_token == expected.per_token


def test_a_value_after_the_last_decision_that_is_not_finite_is_refused():
    episode = EpisodeRewards("r-1", "g", [0.0], values_T=[0.0], truncated=True, value_after=float("nan"))
    with pytest.raises(AdvantageError, match="rollout r-1: the value after its last decision is nan"):
        gae([episode], BOOTSTRAP)
