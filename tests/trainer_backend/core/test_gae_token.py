"""`gae_token` by hand and by identity: two clocks, and nothing between decisions counts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_schemas.trajectory import ObservationData, PolicyLogprobs, Sampling, StepData
from trainer_backend.core.advantages.episodes import EpisodeRewards
from trainer_backend.core.advantages.gae import foretold, gae, gae_token
from trainer_backend.core.critic import ByToken, column_of, targets_of, values_of_episode
from trainer_backend.core.rewards import discounted_returns
from trainer_backend.core.segments import segments_of
from trainer_backend.errors import AdvantageError
from trainer_backend.job.training_table import AlgorithmTable

NUMBER = st.integers(-16, 16).map(lambda quarters: quarters / 4)
ROW = st.lists(NUMBER, min_size=1, max_size=4)
DECISIONS = st.lists(st.tuples(NUMBER, ROW), min_size=1, max_size=5)
SHARE = st.sampled_from([0.0, 0.5, 1.0])


def episode(rewards, rows):
    values = ByToken(rows)
    return EpisodeRewards("r", "g", rewards, values_T=values.firsts_T, token_values=values)


def of_tokens(rewards, rows, **config):
    return gae_token([episode(rewards, rows)], AlgorithmTable(**config)).per_token[0].rows_T


def test_two_decisions_of_two_tokens_and_one_by_hand():
    # gamma 1/2, lambda 1/2 between decisions, 1/2 inside one; values 1, 3 and then 2; rewards 1, 4
    # last decision: 4 - 2 = 2; before it, last token: delta = 1 + 2/2 - 3 = -1, A = -1 + 2/4 = -1/2
    # first token: delta = 3 - 1 = 2, A = 2 - 1/2 * 1/2 = 7/4
    found = of_tokens([1.0, 4.0], [[1.0, 3.0], [2.0]], gamma=0.5, gae_lambda=0.5, gae_token_lambda=0.5)
    assert found == [[1.75, -0.5], [2.0]]


def test_the_advantage_of_a_decision_is_the_mean_of_its_tokens_and_its_value_that_of_the_first():
    found = gae_token([episode([1.0, 4.0], [[1.0, 3.0], [2.0]])], AlgorithmTable(gamma=1.0, gae_lambda=1.0))
    # returns 5 and 4, less each token's value
    assert found.per_token[0].rows_T == [[4.0, 2.0], [2.0]]
    assert found.per_episode == [[3.0, 2.0]]
    assert found.parts["value"] == [[1.0, 2.0]]


def test_the_parts_of_a_decision_are_the_means_of_what_its_own_and_what_later_tokens_changed():
    # As above: the surprises of the first decision are 2 - 1/2 = 3/2 (its second token's at 1/2) and -1, mean
    # 1/4; the next decision's advantage, 2, counts 1/4 for the last token and 1/8 for the first, mean 3/8.
    config = AlgorithmTable(gamma=0.5, gae_lambda=0.5, gae_token_lambda=0.5)
    parts = gae_token([episode([1.0, 4.0], [[1.0, 3.0], [2.0]])], config).parts
    assert parts["td_error"] == [[0.25, 2.0]]
    assert parts["later"] == [[0.375, 0.0]]


@given(DECISIONS, SHARE)
def test_a_critic_that_says_0_and_lambda_1_give_every_token_the_return_to_go_of_its_decision(
    decisions, gamma
):
    rewards = [reward for reward, _ in decisions]
    rows = [[0.0] * len(row) for _, row in decisions]
    returns = discounted_returns(rewards, gamma)
    found = of_tokens(rewards, rows, gamma=gamma, gae_lambda=1.0)
    assert found == [[g] * len(row) for g, row in zip(returns, rows, strict=True)]


@given(DECISIONS, SHARE, SHARE)
def test_tokens_of_equal_value_have_the_advantage_of_their_decision_however_many_they_are(
    decisions, gamma, between
):
    rewards = [reward for reward, _ in decisions]
    rows = [[row[0]] * len(row) for _, row in decisions]
    config = AlgorithmTable(gamma=gamma, gae_lambda=between)
    by_decision = gae([episode(rewards, rows)], config).per_episode[0]
    by_token = gae_token([episode(rewards, rows)], config).per_token[0]
    for advantage, row in zip(by_decision, by_token.rows_T, strict=True):
        assert row == pytest.approx([advantage] * len(row))


@given(DECISIONS, SHARE, SHARE)
def test_with_token_lambda_1_a_tokens_target_is_its_decisions(decisions, gamma, between):
    rewards, rows = [reward for reward, _ in decisions], [row for _, row in decisions]
    values = ByToken(rows)
    found = gae_token([episode(rewards, rows)], AlgorithmTable(gamma=gamma, gae_lambda=between))
    for row in targets_of(values, found.per_token[0]).returns.rows_T:
        assert row == pytest.approx([row[0]] * len(row))


def step(turn, prompt, reused, tokens):
    return StepData(
        turn=turn,
        observation_data=ObservationData(),
        action_taken={"type": "text"},
        sampling=Sampling(),
        policy_logprobs=PolicyLogprobs(
            prompt_ids_reused=reused, prompt_token_ids=prompt, token_ids=tokens,
            logprobs=(-1.0,) * len(tokens), finish_reason="stop", versions=((0, 0),),
        ),
    )  # fmt: skip


def credited(observation):
    """Columns of one conversation whose second prompt brings `observation`; a value is the token's own id."""
    segments = segments_of([step(1, (1, 2), 0, (5, 6, 7)), step(2, observation, 5, (8, 9))], rollout_id="r")
    own = [[float(segment.token_ids[i]) for i in segment.sampled_positions] for segment in segments]
    values = values_of_episode(segments, own, level="token")
    rewards = EpisodeRewards("r", "g", [1.0, 2.0], values_T=values.firsts_T, token_values=values)
    config = AlgorithmTable(gamma=0.5, gae_lambda=0.5, gae_token_lambda=0.5)
    found = gae_token([rewards], config).per_token[0]
    assert len(segments) == 1, "the second decision continues the first"
    return column_of(segments[0], {"r": found}, "advantage").tolist()


@given(st.lists(st.integers(1, 400), min_size=1, max_size=30))
def test_no_span_of_observation_tokens_changes_an_advantage(observation):
    assert credited(tuple(observation)) == credited((3,))


def test_values_of_decisions_alone_are_not_enough():
    with pytest.raises(AdvantageError, match="rollout r-7: no values of its tokens; gae_token needs"):
        gae_token([EpisodeRewards("r-7", "g", [1.0], values_T=[0.5])], AlgorithmTable(gamma=1.0))


def test_a_value_that_is_not_finite_is_refused_by_the_name_of_its_token():
    with pytest.raises(AdvantageError, match="rollout r, turn 2, token 1: the value is nan"):
        gae_token([episode([0.0, 0.0], [[1.0], [1.0, math.nan]])], AlgorithmTable(gamma=1.0))
    with pytest.raises(AdvantageError, match="rollout r, turn 1: the value is inf"):
        gae([EpisodeRewards("r", "g", [0.0], values_T=[math.inf])], AlgorithmTable(gamma=1.0))


def test_what_the_values_foretold_is_told_before_they_have_learned_from_it():
    # returns 3, 2 (gamma 1); V misses both by 1: it explains their spread and not their mean
    found = foretold([EpisodeRewards("r", "g", [1.0, 2.0], values_T=[2.0, 1.0])], gamma=1.0)
    assert (found["value/mean"], found["value/return_mean"], found["value/explained_variance"]) == (
        1.5,
        2.5,
        1.0,
    )
    flat = foretold([EpisodeRewards("r", "g", [0.0, 2.0], values_T=[2.0, 1.0])], gamma=1.0)
    assert "value/explained_variance" not in flat, "equal returns leave nothing to explain"
