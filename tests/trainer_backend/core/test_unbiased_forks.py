"""Which objective do trained continuations have the gradient of? Exact, on the chain of `test_unbiased`.

A parent is played, a rule forks one of its decisions, and two continuations play on from there. With fixed
denominators the expected gradient is that of V(start) + sum over states of P(fork there) * 2 * V(state),
where the chances of forks are held fixed.
"""

from collections.abc import Mapping
from itertools import product
from math import log, prod

import pytest

from tests.trainer_backend.core.test_unbiased import (
    EPISODES,
    GO,
    STOP,
    TOKENS,
    P,
    continuations,
    earn,
    first_token_weights,
    probability,
    score,
)
from trainer_backend.core.advantages.episodes import EpisodeRewards
from trainer_backend.core.forks import FORK_RULES, Parent, compare_at_forks, cut_rest
from trainer_backend.core.rewards import discounted_returns
from trainer_backend.job.training_table import AlgorithmTable
from trainer_backend.plugins import ESTIMATORS

VALUES = [4.0, -1.5, 0.25]  # of a critic that is right about nothing
K = 2
KEYS = AlgorithmTable(gamma=1.0, gae_lambda=1.0)


def an_episode(name: str, group: str, actions, done: int = 0) -> EpisodeRewards:
    """What is played on after `done` decisions of the chain."""
    rewards_T = earn((GO,) * done + actions)[done:]
    return EpisodeRewards(name, group, rewards_T, values_T=VALUES[done : done + len(rewards_T)])


def fork_chances(rule: str, actions, p: float) -> Mapping[int, float]:
    """P(decision t of this episode is forked), by t from 0, for one fork an episode."""
    if rule == "uniform":
        return {t: 1 / 3 for t in range(len(actions))}
    if rule == "surprise":
        weights = [-log(p if action == STOP else 1 - p) for action in actions]
    else:
        after = [*VALUES[1 : len(actions)], 0.0]
        weights = [abs(r + then - v) for r, then, v in zip(earn(actions), after, VALUES, strict=False)]
    return {t: weight / sum(weights) for t, weight in enumerate(weights)}


def fork_advantages(estimator: str, rule: str, parent, t: int, played) -> list[list[float]]:
    """As `CreditAssignment` does it."""
    episodes = [an_episode(str(k), "fork", actions, t) for k, actions in enumerate(played)]
    rests = [] if FORK_RULES[rule].reads_samples else [cut_rest(parent, t + 1, "fork")]
    found = ESTIMATORS[estimator].compute([*episodes, *rests], KEYS)
    return compare_at_forks(found, episodes, rests, 1.0).per_episode


def value_gradient(t: int, p: float) -> float:
    """d/dp of what is expected after t decisions."""
    return float(
        sum(
            probability(actions, p) * sum(score(action, p) for action in actions)
            * sum(earn((GO,) * t + actions)[t:])
            for actions in continuations(t)
        )
    )  # fmt: skip


def expected_gradient(estimator: str, rule: str, aggregation: str, p: float) -> float:
    """E over parents, forks and continuations of the sum of weight * score * advantage."""
    total = 0.0
    for actions in EPISODES:
        parent = an_episode("parent", "start", actions)
        own = ESTIMATORS[estimator].compute([parent], KEYS).per_episode
        forks = fork_chances(rule, actions, p)
        for t, chance in {**forks, None: 1 - sum(forks.values())}.items():
            # In the uniform rule's draw of three turns, those that are not reached are dropped.
            groups = [()] if t is None else list(product(continuations(t), repeat=K))
            for played in groups if chance > 1e-12 else ():
                rows = [*own, *(fork_advantages(estimator, rule, parent, t, played) if played else [])]
                every = [actions, *played]
                weights = first_token_weights(aggregation, [[TOKENS[one] for one in row] for row in every])
                gradient = sum(
                    score(action, p) * advantage * weight
                    for row, advantages, of_row in zip(every, rows, weights, strict=True)
                    for action, advantage, weight in zip(row, advantages, of_row, strict=True)
                )
                weight = probability(actions, p) * chance * prod(probability(one, p) for one in played)
                total += float(weight * gradient)
    return total


def objective_gradient(estimator: str, rule: str, p: float) -> float:
    """Of V(start), which a lone parent by `stepwise` adds nothing to, and of the forks' states."""
    at_forks = sum(
        float(probability(actions, p)) * chance * K * value_gradient(t, p)
        for actions in EPISODES
        for t, chance in fork_chances(rule, actions, p).items()
    )
    return at_forks + (value_gradient(0, p) if estimator == "gae" else 0.0)


CASES = [(estimator, rule) for estimator in ("gae", "stepwise") for rule in FORK_RULES]


@pytest.mark.parametrize(("estimator", "rule"), CASES)
def test_with_fixed_denominators_the_gradient_is_that_of_the_start_and_of_the_forks_states(estimator, rule):
    for p in (float(P), float(1 - P)):
        found = expected_gradient(estimator, rule, "constant", p)
        assert found == pytest.approx(objective_gradient(estimator, rule, p), rel=1e-9)


@pytest.mark.parametrize("aggregation", ["decision_mean", "episode_equal"])
@pytest.mark.parametrize(("estimator", "rule"), CASES)
def test_with_sampled_denominators_it_is_turned_whichever_the_rule(estimator, rule, aggregation):
    ratios = [
        expected_gradient(estimator, rule, aggregation, p) / objective_gradient(estimator, rule, p)
        for p in (float(P), float(1 - P))
    ]
    assert abs(ratios[0] / ratios[1] - 1) > 0.01


@pytest.mark.parametrize("rule", FORK_RULES)
def test_continuations_are_a_baseline_of_the_parent_only_where_the_rule_read_nothing_of_it(rule):
    # The refused job: the forked decision itself is compared with the continuations, whose mean is V in
    # expectation. What it is chosen by must not be its own sample.
    for p in (float(P), float(1 - P)):
        found = truth = 0.0
        for actions in EPISODES:
            returns = discounted_returns(earn(actions), 1.0)
            for t, chance in fork_chances(rule, actions, p).items():
                value = sum(
                    float(probability(rest, p)) * sum(earn((GO,) * t + rest)[t:]) for rest in continuations(t)
                )
                weight = float(probability(actions, p)) * chance
                found += weight * float(score(actions[t], p)) * (returns[t] - value)
                # Of the decision alone: what comes later is credited there.
                truth += weight * decision_gradient(t, p)
        is_biased = abs(found / truth - 1) > 0.01
        assert is_biased == FORK_RULES[rule].reads_samples


def decision_gradient(t: int, p: float) -> float:
    """d/dp of what is expected after t decisions, where p changes at the next decision alone."""
    return float(
        sum(
            probability(rest, p) * score(rest[0], p) * sum(earn((GO,) * t + rest)[t:])
            for rest in continuations(t)
        )
    )


def test_uniform_is_blind_and_the_others_draw_in_proportion():
    parent = Parent(1, 3, [log(2), 0.0, 3 * log(2)], [-3.0, 1.0, 0.0])
    drawn = {rule: [FORK_RULES[rule].choose(parent, 1, seed) for seed in range(4000)] for rule in FORK_RULES}
    shares = {rule: [turns.count((turn,)) / 4000 for turn in (1, 2, 3)] for rule, turns in drawn.items()}
    assert shares["uniform"] == pytest.approx([1 / 3] * 3, abs=0.03)
    assert shares["surprise"] == pytest.approx([1 / 4, 0, 3 / 4], abs=0.03)
    assert shares["critic"] == pytest.approx([3 / 4, 1 / 4, 0], abs=0.03)
    shorter = Parent(1, 3, [9.0], [9.0])
    assert all(FORK_RULES["uniform"].choose(shorter, 1, seed) in ((1,), ()) for seed in range(9))
    assert FORK_RULES["surprise"].choose(Parent(2, 3, [9.0, 1.0]), 5, 0) == (2,), "never before `first`"
    assert FORK_RULES["surprise"].choose(Parent(1, 3, [0.0, 0.0, 1.0]), 3, 0) == (3,), "none of weight 0"


def test_first_decisions_are_compared_by_leave_one_out_and_the_rest_as_the_estimator_says():
    # Two continuations that earn 1 + 2 and 0, and a parent's rest that earned 3 of its 7; gamma 1/2.
    one = EpisodeRewards("one", "f", [1.0, 2.0], values_T=[0.0, 5.0])
    two = EpisodeRewards("two", "f", [0.0], values_T=[0.0])
    rest = cut_rest(EpisodeRewards("p", "g", [4.0, 3.0], values_T=[0.0, 1.0]), 2, "f")
    assert (rest.rewards_T, rest.values_T, rest.group_id) == ([3.0], [1.0], "f")
    keys = AlgorithmTable(gamma=0.5, gae_lambda=1.0)
    found = compare_at_forks(ESTIMATORS["gae"].compute([one, two, rest], keys), [one, two], [rest], 0.5)
    assert found.per_episode == [[2.0 - 1.5, 2.0 - 5.0], [0.0 - 2.5]]
    assert [row[0] for row in found.parts["continuations"]] == [2.0, 2.0]
    assert found.parts["baseline"] == [[1.5, None], [2.5]]
    assert found.parts["value"] == [[None, 5.0], [None]]
