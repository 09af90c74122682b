"""`gae` and `gae_token` by hand; against exact arithmetic: test_every_estimator.py."""

from dataclasses import replace

from trainer_backend.core.advantages.episodes import EpisodeRewards
from trainer_backend.core.advantages.gae import foretold, gae, gae_token
from trainer_backend.core.critic import ByToken
from trainer_backend.job.training_table import AlgorithmTable

HALF = AlgorithmTable(gamma=0.5, gae_lambda=0.5, gae_token_lambda=0.5)
BOOTSTRAP = HALF.model_copy(update=dict(bootstrap_truncated=True))


def test_tokens_of_two_decisions_by_hand():
    # gamma 1/2, lambda 1/2 between decisions, 1/2 inside one; values 1, 3 and then 2; rewards 1, 4
    # last decision: 4 - 2 = 2; before it, last token: delta = 1 + 2/2 - 3 = -1, A = -1 + 2/4 = -1/2
    # first token: delta = 3 - 1 = 2, A = 2 - 1/2 * 1/2 = 7/4
    values = ByToken([[1.0, 3.0], [2.0]])
    episode = EpisodeRewards("r", "g", [1.0, 4.0], values_T=values.firsts_T, token_values=values)
    found = gae_token([episode], HALF)
    assert found.per_token[0].rows_T == [[1.75, -0.5], [2.0]]
    assert found.per_episode == [[0.625, 2.0]], "means over the tokens"
    assert found.parts["value"] == [[1.0, 2.0]], "those of first tokens"
    # The first decision's surprises are 2 - 1/2 = 3/2 and -1, mean 1/4. The next decision's advantage, 2,
    # counts 1/4 for the last token and 1/8 for the first, mean 3/8.
    assert found.parts["td_error"] == [[0.25, 2.0]]
    assert found.parts["later"] == [[0.375, 0.0]]


def test_a_truncated_episode_continues_with_the_value_of_its_last_state():
    # Values 1, 2 and then 6; rewards 0, 3: delta_1 = 3 + 6/2 - 2 = 4, delta_0 = 0 + 2/2 - 1 = 0; A_0 = 4/4.
    # Where it ended, delta_1 = 1. Advantages are not standardised, so they keep the unit of the rewards.
    cut = EpisodeRewards("r", "g", [0.0, 3.0], values_T=[1.0, 2.0], truncated=True, value_after=6.0)
    ended = replace(cut, rollout_id="e", truncated=False)  # its value_after says nothing
    unknown = replace(cut, rollout_id="u", value_after=None)
    result = gae([cut, ended, unknown], BOOTSTRAP)
    assert result.per_episode == [[1.0, 4.0], [0.25, 1.0], [0.25, 1.0]]
    assert result.parts["value"] == [[1.0, 2.0]] * 3
    counted = {key: value for key, value in result.diagnostics.items() if "truncated" in key or "boot" in key}
    assert counted == {"advantages/truncated": 2.0, "advantages/bootstrapped": 1.0}
    off = gae([cut, ended, unknown], HALF)
    assert off.per_episode == [[0.25, 1.0]] * 3
    assert off.diagnostics.keys() == result.diagnostics.keys() - counted.keys()


def test_predictions_are_compared_with_returns_before_the_critic_learns_from_them():
    # returns 3, 2 (gamma 1); V misses both by 1: it explains their spread and not their mean
    found = foretold([EpisodeRewards("r", "g", [1.0, 2.0], values_T=[2.0, 1.0])], gamma=1.0)
    assert found == {"value/mean": 1.5, "value/return_mean": 2.5, "value/explained_variance": 1.0}
    one = foretold([EpisodeRewards("r", "g", [1.0], values_T=[3.0])], gamma=1.0)
    assert one == {"value/mean": 3.0, "value/return_mean": 1.0}
    flat = foretold([EpisodeRewards("r", "g", [0.0, 2.0], values_T=[2.0, 1.0])], gamma=1.0)
    assert "value/explained_variance" not in flat, "equal returns leave nothing to explain"
