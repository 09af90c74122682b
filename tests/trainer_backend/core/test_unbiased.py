"""Is the policy gradient unbiased? An exact enumeration, where the policy chooses when to stop.

At each of at most three decisions the policy stops with probability p, or goes on. So lengths differ, and
the length is the policy's own doing: the case in which baselines per turn go wrong. With Fractions and
rewards that are multiples of 1/4 nothing is rounded, so "unbiased" is `==`.
"""

from collections import Counter
from fractions import Fraction
from functools import partial
from itertools import combinations_with_replacement, product
from math import factorial, hypot, prod

import pytest

from trainer_backend.core.advantages.branch import branch
from trainer_backend.core.advantages.episodes import EpisodeRewards
from trainer_backend.core.critic import ByToken
from trainer_backend.core.segments import Segment
from trainer_backend.job.training_table import AlgorithmTable
from trainer_backend.plugins import AGGREGATIONS, ESTIMATORS

STOP, GO = "stop", "go"
EPISODES = [(STOP,), (GO, STOP), (GO, GO, STOP), (GO, GO, GO)]
REWARD = {
    (0, STOP): 1.0, (0, GO): -0.5, (1, STOP): 3.0, (1, GO): 0.25, (2, STOP): 0.0, (2, GO): 2.5,
}  # fmt: skip


def earn(actions):
    return [REWARD[t, action] for t, action in enumerate(actions)]


def probability(actions, p):
    return prod(p if action == STOP else 1 - p for action in actions)


def score(action, p):
    """d log pi(action) / dp."""
    return 1 / p if action == STOP else -1 / (1 - p)


def true_gradient(p):
    """d/dp of the expected return, by the product rule over whole episodes."""
    return sum(
        probability(actions, p) * sum(score(action, p) for action in actions) * Fraction(sum(earn(actions)))
        for actions in EPISODES
    )


def sum_of_scores(group, advantages, p):
    """Of the group's decisions, each times its advantage."""
    return sum(
        score(action, p) * Fraction(advantage)
        for actions, row_T in zip(group, advantages, strict=True)
        for action, advantage in zip(actions, row_T, strict=True)
    )


def expected_gradient(estimator, size, p):
    """E over all groups of `size` episodes of the mean over them of sum_t score_{i,t} * A_{i,t}."""
    total = Fraction(0)
    for group in product(EPISODES, repeat=size):
        gradient = sum_of_scores(group, estimator([earn(actions) for actions in group]), p)
        total += prod(probability(actions, p) for actions in group) * gradient / size
    return total


def continuations(t):
    """What may follow once t decisions were made: the same policy, from that state."""
    return [actions[t:] for actions in EPISODES if len(actions) > t and actions[:t] == (GO,) * t]


def expected_branch_gradient(turns, size, p):
    """E over groups, and over one branch from before each chosen decision that an episode reaches.

    An advantage is linear in the returns of branches, so the expectation over one branch at a time is enough:
    for each combination of branch returns its probability.
    """
    total = Fraction(0)
    for group in product(EPISODES, repeat=size):
        reached = [(i, t) for i, actions in enumerate(group) for t in turns if t < len(actions)]
        weight = prod(probability(actions, p) for actions in group)
        for played in product(*(continuations(t) for _, t in reached)):
            returns = {
                place: sum(REWARD[place[1] + k, action] for k, action in enumerate(actions))
                for place, actions in zip(reached, played, strict=True)
            }
            episodes = [
                EpisodeRewards(
                    str(i), "g", earn(actions),
                    branch_returns_T=[
                        [returns[i, t]] if (i, t) in returns else [] for t in range(len(actions))
                    ],
                )
                for i, actions in enumerate(group)
            ]  # fmt: skip
            advantages = branch(episodes, AlgorithmTable(gamma=1.0)).per_episode
            gradient = sum_of_scores(group, advantages, p)
            chance = prod(probability(actions, p) for actions in played)
            total += weight * chance * gradient / size
    return total


P = Fraction(1, 3)


@pytest.mark.parametrize("turns", [(0,), (1,), (2,), (0, 2)])
def test_the_branch_gradient_is_unbiased_whichever_decisions_have_branches(turns):
    for p in (P, 1 - P):
        assert expected_branch_gradient(turns, 2, p) == true_gradient(p)
    # a lone episode has no other baseline: where every decision has a branch, that is unbiased too
    assert expected_branch_gradient((0, 1, 2), 1, P) == true_gradient(P)


STATES = ["turn 0", "turn 1", "turn 2"]


def on_the_board(name, group):
    """Any estimator at gamma and lambda 1 without a std; the state, and its text, is the number of decisions.

    The critic is right about nothing, and no branches were played.
    """
    episodes = [
        EpisodeRewards(
            str(i), "g", rewards_T, state_keys_T=STATES[: len(rewards_T)], texts_T=STATES[: len(rewards_T)],
            values_T=[4.0, -1.5, 0.25][: len(rewards_T)],
            token_values=ByToken([[4.0], [-1.5], [0.25]][: len(rewards_T)]),
            branch_returns_T=[[]] * len(rewards_T),
        )
        for i, rewards_T in enumerate(group)
    ]  # fmt: skip
    config = AlgorithmTable(gamma=1.0, gae_lambda=1.0, fnorm="one")
    plug = ESTIMATORS[name]
    return plug.compute(episodes, config.read(plug.keys, name)).per_episode


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_without_a_named_bias_has_the_policy_gradient_and_no_other_has(name):
    found = [
        float(expected_gradient(lambda group: on_the_board(name, group), 3, p) / true_gradient(p))
        for p in (P, 1 - P)
    ]
    if name == "gigpo_additive":  # a bias that changes with p, and not only a factor
        assert found == pytest.approx([1.1507, 1.4957], abs=5e-5)
    if ESTIMATORS[name].bias:
        assert all(abs(ratio - 1) > 0.01 for ratio in found)
    else:
        assert found == pytest.approx([1.0, 1.0], rel=1e-12)


def answer(name, t, tokens):
    """A decision of so many sampled tokens behind a prompt of its own."""
    n = 1 + tokens
    return Segment.of(name, (1,) * n, (0.0,) * tokens, [(1, n, t, 0, 1.0)])


def first_token_weights(aggregation, group):
    """[G][T_i] weight of the first token of each decision, given how many tokens each has."""
    parts = [answer(str(i), t, tokens) for i, row in enumerate(group) for t, tokens in enumerate(row)]
    weights = iter(AGGREGATIONS[aggregation].weights(parts, None))
    return [[next(weights)[0] for _ in row] for row in group]


TOKENS = {STOP: 1, GO: 3}  # to stop is said in a word, and only the first token of an answer is a choice


def aggregated_gradient(estimator, aggregation, size, p):
    """E over all groups of sum_{i,t} w * score_{i,t} * A_{i,t}, with w as a loss weighs what it sums."""
    total = 0.0
    for group in product(EPISODES, repeat=size):
        weights = first_token_weights(
            aggregation, [[TOKENS[action] for action in actions] for actions in group]
        )
        advantages = estimator([earn(actions) for actions in group])
        total += float(prod(probability(actions, p) for actions in group)) * sum(
            float(score(action, p)) * advantage * weight
            for actions, row_T, of_row in zip(group, advantages, weights, strict=True)
            for action, advantage, weight in zip(actions, row_T, of_row, strict=True)
        )
    return total


@pytest.mark.parametrize(("name", "size"), [("stepwise", 3), ("rloo", 3), ("gae", 1)])
def test_constant_denominators_keep_every_unbiased_estimator_unbiased_and_sampled_ones_keep_none(name, size):
    estimator = partial(on_the_board, name)
    for p in (P, 1 - P):
        found = aggregated_gradient(estimator, "constant", size, p)
        assert found / size == pytest.approx(float(true_gradient(p)), rel=1e-12)
    biased = {name for name, plug in AGGREGATIONS.items() if plug.is_biased}
    assert biased == AGGREGATIONS.keys() - {"constant"}
    for aggregation in biased:
        ratios = [
            aggregated_gradient(estimator, aggregation, size, p) / float(true_gradient(p)) for p in (P, 1 - P)
        ]
        assert abs(ratios[0] / ratios[1] - 1) > 0.01, aggregation  # turned, and not only scaled


# One decision: probability, tokens and reward of its answers. Right and wrong, each short and long.
ANSWERS = [(0.25, 1, 0.0), (0.25, 6, 0.0), (0.25, 2, 1.0), (0.25, 6, 1.0)]


def logit_gradient(aggregation, size):
    """[4] expected gradient on the logits of ANSWERS by leave-one-out advantages, over all groups."""
    total = [0.0] * len(ANSWERS)
    for drawn in combinations_with_replacement(range(len(ANSWERS)), size):
        orders = factorial(size) / prod(factorial(n) for n in Counter(drawn).values())
        chance = orders * prod(ANSWERS[k][0] for k in drawn)
        advantages = on_the_board("rloo", [[ANSWERS[k][2]] for k in drawn])
        weights = first_token_weights(aggregation, [[ANSWERS[k][1]] for k in drawn])
        for k, (advantage,), (weight,) in zip(drawn, advantages, weights, strict=True):
            for j, (p, _, _) in enumerate(ANSWERS):
                total[j] += chance * weight * advantage * ((j == k) - p)
    return total


def cosine_to_truth(gradient):
    mean = sum(p * reward for p, _, reward in ANSWERS)
    truth = [p * (reward - mean) for p, _, reward in ANSWERS]
    return sum(a * b for a, b in zip(gradient, truth, strict=True)) / hypot(*gradient) / hypot(*truth)


def test_what_each_aggregation_does_to_the_direction_of_the_gradient():
    found = {
        name: [cosine_to_truth(logit_gradient(name, size)) for size in (2, 4, 8)] for name in AGGREGATIONS
    }
    assert found == {
        "token_mean": pytest.approx([0.9390, 0.9841, 0.9966], abs=5e-5),
        "decision_mean": pytest.approx([0.8222] * 3, abs=5e-5),
        "episode_equal": pytest.approx([0.8222] * 3, abs=5e-5),
        "constant": pytest.approx([1.0] * 3, abs=1e-12),
    }


@pytest.mark.parametrize("aggregation", ["decision_mean", "episode_equal"])
def test_means_over_answers_prefer_wrong_ones_long_and_right_ones_short(aggregation):
    # Equally right, equally likely: the true gradient does not tell long from short. An answer's advantage
    # is R_k - 1/2 in expectation, and each of 4 first tokens weighs 1 / (4 n_k): no sum over groups is needed
    found = logit_gradient(aggregation, 4)
    pulls = [p * (reward - 0.5) / tokens for p, tokens, reward in ANSWERS]
    assert found == pytest.approx(
        [pull - p * sum(pulls) for pull, (p, *_) in zip(pulls, ANSWERS, strict=True)], rel=1e-12
    )
    short_wrong, long_wrong, short_right, long_right = found
    assert short_wrong < long_wrong < 0 < long_right < short_right
