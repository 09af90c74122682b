"""What holds of every estimator on the plug board, whatever it makes of rewards."""

import math
import operator
import random as randomness
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from itertools import chain

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared_schemas.rounding import add_up
from tests.trainer_backend.core.exact_estimators import mean, normed, return_to_go
from trainer_backend.core.advantages.derivation import PARTS, substitution
from trainer_backend.core.advantages.episodes import EpisodeRewards
from trainer_backend.core.advantages.spread import SCALES
from trainer_backend.core.critic import ByToken
from trainer_backend.errors import AdvantageError
from trainer_backend.job.training_table import AlgorithmTable
from trainer_backend.plugins import ESTIMATORS

CONFIG = AlgorithmTable(gamma=0.75, gae_lambda=0.5, gae_token_lambda=0.25, omega=0.25)
CRITICS = {"gae", "gae_token"}
EACH = pytest.mark.parametrize("name", ESTIMATORS)
HALF_AS_MANY = settings(max_examples=50)  # where an example runs every estimator
# reward in eighths, state, values of its one to three tokens, returns of branches from before it
DECISION = st.tuples(
    st.integers(-8, 8).map(lambda eighths: eighths / 8),
    st.sampled_from("abc"),
    st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=3),
    st.lists(st.integers(-4, 4).map(float), max_size=2),
)
TEXTS_T = ["a tree to the north", "a tree to the south", ""]
TEXTS = dict(zip("abc", TEXTS_T, strict=True))
EPISODE = st.tuples(st.sampled_from(["g", "h"]), st.lists(DECISION, min_size=1, max_size=4))
BATCH = st.lists(EPISODE, min_size=1, max_size=6)
SCORES = st.lists(st.integers(-200, 200).map(lambda n: n / 7), min_size=1, max_size=8)


def episode(index, group, decisions):
    rewards_T, keys_T, rows_T, branches_T = zip(*decisions, strict=True)
    values = ByToken(rows_T)
    return EpisodeRewards(
        f"r-{index}", group, rewards_T, state_keys_T=keys_T, texts_T=[TEXTS[key] for key in keys_T],
        values_T=values.firsts_T, token_values=values, branch_returns_T=branches_T,
    )  # fmt: skip


def make_batch(drawn):
    return [episode(index, group, decisions) for index, (group, decisions) in enumerate(drawn)]


def single(scores, group="g"):
    """Episodes of one decision, all in one state."""
    return [episode(index, group, [(score, "a", [0.0], [])]) for index, score in enumerate(scores)]


def computed(name, episodes, config=CONFIG):
    return ESTIMATORS[name].compute(episodes, config.read(ESTIMATORS[name].keys, name))


@HALF_AS_MANY
@given(
    drawn=BATCH,
    after=st.integers(-8, 8),
    changes=st.sampled_from([{}, {"fnorm": "one"}, {"context_depth": 1}, {"episode_baseline": "step"}]),
)
def test_each_decision_has_one_finite_advantage_that_the_equations_of_its_derivation_give_back(
    drawn, after, changes
):
    episodes = [replace(item, truncated=True, value_after=float(after)) for item in make_batch(drawn)]
    config = CONFIG.model_copy(update=dict(bootstrap_truncated=True, step_advantage_w=0.75, **changes))
    for name, plug in ESTIMATORS.items():
        found = computed(name, episodes, config)
        assert found.parts.keys() <= PARTS.keys(), name
        assert all(math.isfinite(value) for value in found.diagnostics.values()), name
        for part in (found.per_episode, *found.parts.values()):
            assert [len(row_T) for row_T in part] == [len(item.rewards_T) for item in episodes], name
        for i, item in enumerate(episodes):
            for t, reward in enumerate(item.rewards_T):
                numbers = {part: rows[i][t] for part, rows in found.parts.items() if rows[i][t] is not None}
                numbers["reward"] = reward
                numbers["advantage"] = found.per_episode[i][t]
                assert all(map(math.isfinite, numbers.values())), (name, numbers)
                for given_by_parts, number in equated(plug.derivation, numbers):
                    largest = max(1.0, *map(abs, numbers.values()))
                    assert abs(given_by_parts - number) <= 1e-12 * largest, (name, numbers)


def equated(derivation, numbers):
    """Both sides of each equation whose numbers are known; the last one's are."""
    for equation in derivation.equations:
        result, right = equation.split(" = ")
        try:
            arithmetic = substitution(right, lambda name: f"({numbers[name]!r})")
        except KeyError:
            assert equation != derivation.equations[-1], "the advantage always follows"
            continue
        yield eval(arithmetic, {"__builtins__": {}}), numbers[result]


# Two siblings that begin in one state, the first with a second decision, and an episode of another group.
BY_SIBLINGS, BY_STATES = [[1.0, 1.0], [1.0], [0.0]], [[1.0, 0.0], [1.0], [0.0]]
BY_BATCH = [[3.0, 3.0], [3.0], [3.0]]


@EACH
def test_it_says_how_many_others_a_decision_is_compared_with(name):
    first, second = (1.0, "a", [0.0], []), (0.5, "b", [0.0], [])
    episodes = make_batch([("g", [first, second]), ("g", [(0.0, "a", [0.0], [])]), ("h", [first])])
    found = computed(name, episodes, CONFIG.model_copy(update=dict(similarity_temperature=0.0)))
    plug = ESTIMATORS[name]
    expected = BY_STATES if plug.needs_state_keys or plug.needs_texts else BY_SIBLINGS
    expected = expected if plug.compares_siblings else BY_BATCH
    assert found.parts.get("compared", expected) == expected
    assert "compared" in found.parts or "{compared}" not in str(plug.derivation)


@EACH
def test_a_critic_alone_has_the_part_that_is_stored_as_the_critics_values(name):
    parts = computed(name, single([1.0, 0.0])).parts
    assert ("value" in parts) == (ESTIMATORS[name].needs_values is not None)


@EACH
def test_it_says_whether_it_compares_siblings(name):
    decisions = [
        [(1.0, "a", [0.5], []), (0.5, "b", [0.0], [])],
        [(0.0, "a", [0.0], [])],
        [(0.25, "a", [1.0], [])],
    ]
    together, apart = (
        computed(name, make_batch(zip(groups, decisions, strict=True))) for groups in ("ggg", "ggh")
    )
    assert (together.per_episode != apart.per_episode) == ESTIMATORS[name].compares_siblings


@HALF_AS_MANY
@given(drawn=BATCH, seed=st.integers(0, 99))
def test_neither_the_order_of_episodes_nor_any_name_changes_a_bit(drawn, seed):
    episodes = make_batch(drawn)
    order = list(range(len(episodes)))
    randomness.Random(seed).shuffle(order)
    renamed = [
        replace(
            item,
            rollout_id=f"other {item.rollout_id}",
            group_id={"g": "zz", "h": "aa"}[item.group_id],
            state_keys_T=[f"1:{key}" for key in item.state_keys_T],
        )
        for item in episodes
    ]
    for name in ESTIMATORS:
        expected = computed(name, episodes).per_episode
        found = computed(name, [renamed[i] for i in order]).per_episode
        for row_T, i in zip(found, order, strict=True):
            assert row_T == expected[i], name


@st.composite
def episodes_equal_but_for_rounding(draw):
    """Siblings that earn the same at every decision, in sums whose terms come in another order."""
    terms = st.lists(st.integers(-30, 30).map(lambda n: n / 10), min_size=1, max_size=4)
    terms_T = draw(st.lists(terms, min_size=1, max_size=3))
    sums_G = draw(st.lists(st.tuples(*map(st.permutations, terms_T)), min_size=1, max_size=6))
    return along_one_path([[rounded_sum(terms) for terms in permuted_T] for permuted_T in sums_G])


def rounded_sum(terms):
    """Rounded after each term, as `sum` no longer does, but 0 where all cancels, as in a reward vector."""
    return add_up([reduce(operator.add, terms[:-1], 0.0), terms[-1]])


def along_one_path(rewards_GT):
    return [
        EpisodeRewards(
            f"r-{index}", "g", rewards_T, state_keys_T="abc"[: len(rewards_T)],
            texts_T=TEXTS_T[: len(rewards_T)], branch_returns_T=[()] * len(rewards_T),
        )
        for index, rewards_T in enumerate(rewards_GT)
    ]  # fmt: skip


@settings(max_examples=50)
@example(episodes=along_one_path([[0.3], [0.1 + 0.2]]), gamma=1.0)
@example(episodes=along_one_path([[0.3, -0.3], [0.1 + 0.2, -0.3]]), gamma=1.0)
@given(episodes=episodes_equal_but_for_rounding(), gamma=st.sampled_from([1.0, 0.75]))
def test_scores_equal_but_for_rounding_leave_nothing_to_learn_and_so_does_a_lone_episode(episodes, gamma):
    is_one_decision = len(episodes[0].rewards_T) == 1
    for name in set(ESTIMATORS) - CRITICS - (set() if is_one_decision else {"reinforce_pp"}):
        for fnorm in SCALES:
            config = CONFIG.model_copy(update=dict(gamma=gamma, fnorm=fnorm, similarity_temperature=0.0))
            found = computed(name, episodes, config)
            assert not any(value for row_T in found.per_episode for value in row_T), name
            assert found.diagnostics["advantages/groups_without_spread"] == (len(episodes) > 1), name


@settings(max_examples=30)
@given(rewards_T=st.permutations([0.1, 0.2, -0.3, 1e6, -999999.9]), more=st.permutations([0.1, 0.2, -0.2]))
def test_one_score_that_was_earned_at_other_decisions_is_no_spread_of_scores(rewards_T, more):
    # 0.1 in both, but for the rounding of numbers of 1e6; the best of two such scores is no goal either
    drawn = [("g", [(reward, "a", [0.0], []) for reward in row_T]) for row_T in (rewards_T, more)]
    episodes = make_batch(drawn)
    for name in ("grpo", "grpo_no_std", "rloo", "reinforce_pp_baseline"):
        assert not any(value for row_T in computed(name, episodes).per_episode for value in row_T), name
    for name in ("gigpo", "gigpo_soft", "g2po", "graphgpo"):
        for baseline in ("trajectory", "step"):
            found = computed(name, episodes, CONFIG.model_copy(update=dict(episode_baseline=baseline)))
            assert not any(v for row_T in found.parts["episode_advantage"] for v in row_T), name
    assert computed("graphgpo", episodes).diagnostics["graph/groups_with_goal"] == 0.0


@settings(max_examples=30)
@given(
    score=st.sampled_from([0.1, 0.7, 3.0, -0.3]), unit=st.integers(-9, 9), fnorm=st.sampled_from([*SCALES])
)
def test_a_true_difference_counts_in_full_however_small_it_is(score, unit, fnorm):
    score, config = score * 10.0**unit, CONFIG.model_copy(update=dict(fnorm=fnorm))
    difference = 1e-6 * score
    for name in set(ESTIMATORS) - CRITICS:
        found = computed(name, single([score, score + difference]), config).per_episode
        expected = computed(name, single([0.0, difference]), config).per_episode
        for own_T, other_T in zip(found, expected, strict=True):
            assert own_T == pytest.approx(other_T, rel=1e-6) and any(own_T), name


@HALF_AS_MANY
@given(scores=SCORES, constant=st.integers(-100, 100))
def test_a_constant_added_to_every_score_changes_nothing(scores, constant):
    for name in set(ESTIMATORS) - CRITICS:  # a critic would have to learn of it first
        moved = computed(name, single([score + constant for score in scores])).per_episode
        for (found,), (expected,) in zip(moved, computed(name, single(scores)).per_episode, strict=True):
            assert math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-9), name


def test_those_that_divide_by_a_standard_deviation_say_so():
    for name in set(ESTIMATORS) - CRITICS:
        once, twice = (computed(name, single(scores)).per_episode for scores in ([0, 1, 3], [0, 2, 6]))
        grown = 1.0 if ESTIMATORS[name].divides_by_std else 2.0
        for (own,), (other,) in zip(once, twice, strict=True):
            assert math.isclose(grown * own, other, rel_tol=1e-5, abs_tol=1e-9), name


@EACH
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_rollout_and_turn(name, bad):
    decision = (1.0, "a", [0.0], [])
    episodes = [episode(0, "g", [decision] * 2), episode(1, "g", [decision, (bad, "a", [0.0], [])])]
    with pytest.raises(AdvantageError, match=rf"rollout r-1, turn 2: the reward is {bad}"):
        computed(name, episodes)


BARE = EpisodeRewards("r-9", "g", [1.0, 0.0])
NAN = math.nan


@pytest.mark.parametrize(
    ("names", "bare", "told"),
    [
        (
            ["g2po", "gagpo", "graphgpo", "gigpo", "gigpo_additive"],
            BARE,
            "r-9: 0 state keys for 2 decisions; {name} compares",
        ),
        (["gigpo_soft"], BARE, "r-9: 0 texts for 2 decisions; gigpo_soft compares them"),
        (["branch"], BARE, "r-9: no branches were played from its decisions, which .* = 'branch' needs"),
        (["branch"], replace(BARE, branch_returns_T=[[], [NAN, 1.0]]), "r-9, turn 2: .* branches are .*nan"),
        (["gae"], BARE, "r-9: 0 values of a critic for 2 decisions"),
        (["gae"], replace(BARE, values_T=[0.0, math.inf]), "r-9, turn 2: the value is inf"),
        (["gae_token"], replace(BARE, values_T=[0.0, 0.0]), "r-9: no values of its tokens; gae_token needs"),
        (
            ["gae_token"],
            replace(BARE, values_T=[0.0, 0.0], token_values=ByToken([[0.0], [0.0, NAN]])),
            "r-9, turn 2, token 1: the value is nan",
        ),
        (
            ["gae", "gae_token"],
            replace(BARE, values_T=[0.0, 0.0], truncated=True, value_after=NAN),
            "r-9: the value after its last decision is nan",
        ),
    ],
)
def test_an_episode_without_what_the_estimator_needs_is_refused_by_name(names, bare, told):
    for name in names:
        with pytest.raises(AdvantageError, match=f"rollout {told.format(name=name)}"):
            computed(name, [bare, bare], CONFIG.model_copy(update=dict(bootstrap_truncated=True)))


@EACH
def test_an_empty_episode_is_refused_by_name(name):
    empty = EpisodeRewards("r-9", "g", [])
    with pytest.raises(AdvantageError, match=r"rollout r-9: no decision"):
        computed(name, [*single([1.0, 2.0]), empty])


@given(scores=SCORES)
def test_advantages_of_one_decision_agree_with_exact_arithmetic(scores):
    exact, size = list(map(Fraction, scores)), len(scores)
    deviations, in_stds = ([normed(score, exact, fnorm) for score in exact] for fnorm in ("one", "std"))
    expected = {
        "grpo_no_std": deviations,
        "rloo": [Fraction(size, max(size - 1, 1)) * deviation for deviation in deviations],
        "grpo": in_stds,
        "reinforce_pp": in_stds,
    }
    for name, exact_N in expected.items():
        for (own,), value in zip(computed(name, single(scores)).per_episode, exact_N, strict=True):
            assert abs(Fraction(own) - value) <= 1e-12 * max(1, *map(abs, scores)), name


BOOTSTRAP = CONFIG.model_copy(update=dict(bootstrap_truncated=True))


def cut_short(decisions, after):
    return replace(episode(0, "g", decisions), truncated=True, value_after=float(after))


@given(drawn=st.lists(DECISION, min_size=1, max_size=5), after=st.integers(-8, 8))
def test_gae_token_agrees_with_exact_arithmetic_also_where_a_limit_cut_the_episode(drawn, after):
    # A token's advantage is the sum of all surprises from it on, each less by what lies between.
    gamma, between = Fraction(CONFIG.gamma), Fraction(CONFIG.gae_lambda)
    inside = Fraction(CONFIG.gae_token_lambda)
    tokens = [(t, j) for t, (_, _, row, _) in enumerate(drawn) for j in range(len(row))]
    values = [Fraction(drawn[t][2][j]) for t, j in tokens] + [Fraction(after)]
    last = [j == len(drawn[t][2]) - 1 for t, j in tokens]
    surprises = [
        (Fraction(drawn[t][0]) if ends else 0) + (gamma if ends else 1) * values[n + 1] - values[n]
        for n, ((t, _), ends) in enumerate(zip(tokens, last, strict=True))
    ]
    carried = [gamma * between if ends else inside for ends in last]
    expected = [
        sum(math.prod(carried[n:k], start=Fraction(1)) * surprises[k] for k in range(n, len(tokens)))
        for n in range(len(tokens))
    ]
    (found,) = computed("gae_token", [cut_short(drawn, after)], BOOTSTRAP).per_token
    assert all(abs(Fraction(a) - b) <= 1e-12 * 16 for a, b in zip(found.flat, expected, strict=True))


@given(drawn=st.lists(DECISION, min_size=1, max_size=8), after=st.integers(-8, 8))
def test_gae_is_gae_token_where_each_decision_has_one_token(drawn, after):
    cut = cut_short([(reward, state, row[:1], []) for reward, state, row, _ in drawn], after)
    by_decision, by_token = (computed(name, [cut], BOOTSTRAP) for name in ("gae", "gae_token"))
    assert by_decision.per_episode == by_token.per_episode


@given(drawn=BATCH)
def test_branch_agrees_with_exact_arithmetic(drawn):
    rewards = [[Fraction(reward) for reward, *_ in decisions] for _, decisions in drawn]
    gamma = Fraction(CONFIG.gamma)
    returns = [[return_to_go(row, t, gamma) for t in range(len(row))] for row in rewards]

    def baseline(i, t):
        branches = drawn[i][1][t][3]
        others = [row for j, row in enumerate(returns) if j != i and drawn[j][0] == drawn[i][0]]
        if branches:
            return sum(map(Fraction, branches)) / len(branches)
        return sum(row[t] for row in others if t < len(row)) / len(others) if others else returns[i][t]

    found = computed("branch", make_batch(drawn)).per_episode
    for i, row_T in enumerate(found):
        for t, own in enumerate(row_T):
            assert abs(Fraction(own) - (returns[i][t] - baseline(i, t))) <= 1e-12 * 8


@given(drawn=BATCH)
def test_reinforce_pp_baseline_agrees_with_exact_arithmetic(drawn):
    scores = [sum(Fraction(reward) for reward, *_ in decisions) for _, decisions in drawn]
    centred = []
    for i, (group, decisions) in enumerate(drawn):
        own = [score for score, (other, _) in zip(scores, drawn, strict=True) if other == group]
        centred += [scores[i] - mean(own)] * len(decisions)
    found = computed("reinforce_pp_baseline", make_batch(drawn)).per_episode
    for own, value in zip(chain.from_iterable(found), centred, strict=True):
        assert abs(Fraction(own) - normed(value, centred, "std")) <= 1e-12 * 8


@EACH
def test_an_empty_batch_has_no_advantages_and_finite_counts(name):
    found = computed(name, [])
    assert found.per_episode == []
    assert all(math.isfinite(value) for value in found.diagnostics.values())
