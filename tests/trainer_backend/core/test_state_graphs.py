"""Estimators that compare decisions by their states: by hand, by identity and against exact arithmetic."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.trainer_backend.core.exact_estimators import (
    exact_g2po,
    exact_gagpo,
    exact_gigpo,
    exact_gigpo_soft,
    exact_graphgpo,
)
from trainer_backend.core.advantages.episodes import EpisodeRewards
from trainer_backend.core.advantages.g2po import g2po
from trainer_backend.core.advantages.gagpo import gagpo
from trainer_backend.core.advantages.gigpo import gigpo, gigpo_additive
from trainer_backend.core.advantages.gigpo_soft import gigpo_soft
from trainer_backend.core.advantages.graphgpo import GraphgpoKeys, graphgpo
from trainer_backend.job.training_table import AlgorithmTable

ONE = AlgorithmTable(gamma=0.95, fnorm="one")
HALF = AlgorithmTable(gamma=0.5, gae_lambda=0.5, fnorm="one", distance_discount=0.5)
ON_GRAPHS = [g2po, gagpo, graphgpo]
ALL = [*ON_GRAPHS, gigpo_soft]
TEXTS = {"a": "Tree 1 north", "b": "tree 2 north, water 1", "c": "water 1 1 south", "d": "  "}
STEP = st.tuples(st.integers(-8, 8).map(lambda eighths: eighths / 8), st.sampled_from("abcd"))
EPISODE = st.tuples(st.sampled_from("ggh"), st.booleans(), st.lists(STEP, min_size=1, max_size=5))
BATCH = st.lists(EPISODE, min_size=1, max_size=6)
FEW = settings(max_examples=25)
CONFIG = st.builds(
    AlgorithmTable,
    gamma=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    gae_lambda=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    omega=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    fnorm=st.sampled_from(["std", "one"]),
    episode_baseline=st.sampled_from(["trajectory", "step"]),
    step_advantage_w=st.sampled_from([0.0, 0.5, 1.0]),
    distance_discount=st.sampled_from([0.1, 0.5]),
    goal_score=st.sampled_from([None, 0.5]),
    similarity_temperature=st.sampled_from([0.1, 1.0]),
)


def episode(name, rewards, keys, group="g", truncated=False):
    texts = [TEXTS.get(key, key) for key in keys]
    return EpisodeRewards(name, group, rewards, state_keys_T=list(keys), texts_T=texts, truncated=truncated)


def make_batch(drawn):
    return [
        episode(f"r-{i}", [reward for reward, _ in steps], [key for _, key in steps], group, truncated)
        for i, (group, truncated, steps) in enumerate(drawn)
    ]


def exact_batch(episodes, texts=False):
    return [
        (e.group_id, [Fraction(r) for r in e.rewards_T], e.texts_T if texts else e.state_keys_T)
        for e in episodes
    ]


def step_parts(episodes, config=ONE):
    return gigpo(episodes, config).parts["step_advantage"]


def test_a_decision_is_compared_with_others_made_in_the_same_state():
    # The paper's figure 3: the goal is reached from "results" by the first item, later by the second, and
    # missed by the next page. G there: 0.95^3 = 0.857375, 0.95 and 0; their mean: 0.602458...
    won = episode("won", [0, 0, 0, 1.0], ["results", "item2", "results", "item1"])
    lost = episode("lost", [0, 0.0], ["results", "page2"])
    of_won, of_lost = step_parts([won, lost])
    assert of_won == pytest.approx([0.254917, 0.0, 0.347542, 0.0], abs=1e-6)
    assert of_lost == pytest.approx([-0.602458, 0.0], abs=1e-6)


def test_scores_are_averaged_over_trajectories_or_over_steps():
    # a success of one step and a failure of nine
    short, long = episode("short", [1.0], "a"), episode("long", [0.0] * 9, "bcdefghij")
    of_trajectories = gigpo([short, long], ONE).parts["episode_advantage"]
    assert (of_trajectories[0][0], of_trajectories[1][0]) == (0.5, -0.5)
    of_steps = gigpo([short, long], ONE.model_copy(update=dict(episode_baseline="step"))).parts[
        "episode_advantage"
    ]
    assert (of_steps[0], of_steps[1][0]) == (pytest.approx([0.9]), pytest.approx(-0.1))


def test_contexts_weigh_more_the_longer_they_are_and_separate_what_the_state_alone_mixes():
    episodes = [
        episode("r-0", [0.0, 6.0], "xa"),
        episode("r-1", [0.0, 2.0], "xa"),
        episode("r-2", [0.0, 1.0], "ya"),
    ]
    config = AlgorithmTable(gamma=1.0, fnorm="one", context_depth=1)
    # a: k = 0 has mean 3: 3, -1, -2; k = 1: 2, -2 and none. (3 + 2*2) / 3, (-1 - 2*2) / 3, -2.
    # The two x begin an episode and have no context, so k = 0 alone counts there.
    expected = [[2.0, 7 / 3], [-2.0, -5 / 3], [0.0, -2.0]]
    assert step_parts(episodes, config) == [pytest.approx(row_T) for row_T in expected]


def test_what_the_anchors_were_is_counted():
    episodes = [episode("r-0", [1.0, 0.0], "ab"), episode("r-1", [0.0, 0.0], "ac")]
    found = gigpo(episodes, ONE).diagnostics
    assert found["anchors/groups"] == 3.0 and found["anchors/singleton_frac"] == 0.5
    assert found["anchors/mean_size"] == pytest.approx(4 / 3) and found["anchors/max_size"] == 2.0
    assert found["anchors/sign_agreement"] == 1.0
    # scores 1 and 0, so 1/2 in size at all four; the two a differ by 1, the others are alone
    assert found["anchors/episode_advantage_mean"] == 0.5
    assert (found["anchors/step_advantage_mean"], found["anchors/step_advantage_zero_frac"]) == (0.25, 0.5)
    assert found["anchors/met_after_start_frac"] == 0.0


def test_a_reward_of_every_step_counts_for_the_steps_and_not_for_the_episodes():
    # returns at a: 1 + 0.95, and 1
    table = ONE.model_copy(update=dict(default_step_reward=1.0))
    found = gigpo([episode("r-0", [0.0, 0.0], "ab"), episode("r-1", [0.0], "a")], table)
    assert found.parts["step_advantage"] == [[pytest.approx(0.475), 0.0], [pytest.approx(-0.475)]]
    assert found.parts["episode_advantage"] == [[0.0, 0.0], [0.0]]


@given(BATCH, st.sampled_from([0.25, 0.5, 0.8]))
def test_the_convex_sum_is_omega_times_the_papers(drawn, omega):
    episodes = make_batch(drawn)
    convex = gigpo(episodes, AlgorithmTable(gamma=0.95, omega=omega)).per_episode
    additive = gigpo_additive(
        episodes, AlgorithmTable(gamma=0.95, step_advantage_w=(1 - omega) / omega)
    ).per_episode
    for left, right in zip(convex, additive, strict=True):
        assert left == pytest.approx([omega * value for value in right], abs=1e-12)


def won_and_lost():
    """Two siblings go the same way, and part at the second decision: one is rewarded at the end."""
    return [episode("won", [0.0, 0.0, 1.0], "smg"), episode("lost", [0.0, 0.0, 0.0], "smx")]


def test_values_are_the_mean_returns_of_a_state_and_td_errors_lie_between_them():
    # gamma 1/2, G: 1/4, 1/2, 1 and 0, 0, 0. So V(s) = 1/8, V(m) = 1/4, V(g) = 1, V(x) = 0, and the decision
    # at m is the only one that changed anything: 1/2 * 1 - 1/4 and 1/2 * 0 - 1/4.
    for estimator in (g2po, gagpo):
        parts = estimator(won_and_lost(), HALF).parts
        assert parts["state_value"] == [[0.125, 0.25, 1.0], [0.125, 0.25, 0.0]]
        assert parts["next_value"] == [[0.25, 1.0, 0.0], [0.25, 0.0, 0.0]]
        assert parts["td_error"] == [[0.0, 0.25, 0.0], [0.0, -0.25, 0.0]]
        assert parts["compared"] == [[1.0, 1.0, 0.0]] * 2


def test_gagpo_carries_td_errors_back_by_gamma_and_lambda():
    assert gagpo(won_and_lost(), HALF).per_episode == [[0.0625, 0.25, 0.0], [-0.0625, -0.25, 0.0]]
    # in sample standard deviations of all six: sqrt(2 * (1/256 + 1/16) / 5)
    std = math.sqrt(2 * (1 / 256 + 1 / 16) / 5)
    found = gagpo(won_and_lost(), HALF.model_copy(update=dict(fnorm="std"))).per_episode
    assert found[0] == pytest.approx([0.0625 / std, 0.25 / std, 0.0], rel=1e-15)


def test_g2po_adds_the_comparison_in_a_state_and_over_the_graph_to_that_of_episodes():
    # A_E is 1/2 and -1/2; the TD errors of 1/4 and -1/4 differ from a mean of 0, at m and over all six
    assert g2po(won_and_lost(), HALF).per_episode == [[0.5, 1.0, 0.5], [-0.5, -1.0, -0.5]]


def test_rounding_errors_of_td_errors_are_measured_by_the_values_that_they_lie_between():
    # V(x) is 2^18, where floats lie 2^-34 apart: half of that is rounded down, and its next float up
    half = 2.0**-35
    rewards = [[half, 0.0], [math.nextafter(half, 1.0), 0.0]]
    episodes = [episode(name, row_T, "sx") for name, row_T in zip("ab", rewards, strict=True)]
    found = g2po(
        [*episodes, episode("c", [0.0, 3 * 2.0**18], "yx")],
        HALF.model_copy(update=dict(gamma=1.0, fnorm="std")),
    )
    (low, _), (high, _), _ = found.parts["td_error"]
    assert 2.0**18 - 2.0**-34 < low < high < 2.0**18 + 2.0**-34
    assert found.parts["scale"][0][0] == 1.0, "the two differ by rounding alone"


def test_g2po_is_what_the_authors_code_gives_at_gamma_1():
    # Nala-YN/G2PO at b8ffaf5, compute_step_level_advantage in mode mean_std_norm, on V of gamma 1: success is
    # worth 10 there, and its 1e-6 in the std accounts for the tolerance.
    episodes = [
        episode("won", [0.0, 0.0, 10.0], "sab"),
        episode("lost", [0.0, 0.0, 0.0], "sca"),
        episode("again", [0.0, 10.0], "sa"),
    ]
    of_won, of_lost, of_again = g2po(episodes, AlgorithmTable(gamma=1.0)).parts["step_advantage"]
    assert of_won == pytest.approx([0.577350, 1.284457, 0.0], abs=1e-5)
    assert of_lost == pytest.approx([-2.568913, 1.414213, -2.568913], abs=1e-5)
    assert of_again == pytest.approx([0.577350, 1.284457], abs=1e-5)


def test_a_state_that_is_not_met_again_has_a_value_of_its_own_and_changes_nothing():
    apart = [episode("r-0", [0.5, 1.0, 2.0], "suv"), episode("r-1", [0.25, 3.0], "sw")]
    for estimator in (g2po, gagpo):
        td_errors = estimator(apart, HALF).parts["td_error"]
        assert [row[1:] for row in td_errors] == [[0.0, 0.0], [0.0]]
    for share in (0.0, 0.5, 1.0):
        found = gagpo(apart, HALF.model_copy(update=dict(gae_lambda=share))).per_episode
        assert found == [[-0.125, 0.0, 0.0], [0.125, 0.0]], "G of 1.5 and 1.75 at s, whatever lambda is"
    assert gagpo(apart, HALF).diagnostics["anchors/met_after_start_frac"] == 0.0
    assert g2po(won_and_lost(), HALF).diagnostics["anchors/met_after_start_frac"] == 0.5


def won_beside_a_detour():
    """b lies before the goal, a before b. The lost episode comes to a by way of c, and then goes astray."""
    return [episode("won", [0.0, 0.0, 1.0], "sab"), episode("lost", [0.0, 0.0, 0.0], "sca")]


def test_graphgpo_compares_by_the_distance_to_the_goal_of_where_a_decision_led():
    found = graphgpo(won_beside_a_detour(), HALF)
    # 3 decisions from s, 2 from a, 1 from b; 3 from c, by way of a. The end of "lost" is one farther.
    assert found.parts["distance"] == [[3.0, 2.0, 1.0], [3.0, 3.0, 2.0]]
    assert found.parts["next_distance"] == [[2.0, 1.0, 0.0], [3.0, 2.0, 4.0]]
    assert found.parts["closeness"] == [[0.25, 0.5, 1.0], [0.125, 0.25, 0.0625]]
    # at s half of 1/4 - 1/8, at a half of 1/2 - 1/16; b and c are alone
    assert found.parts["step_advantage"] == [[0.0625, 0.21875, 0.0], [-0.0625, 0.0, -0.21875]]
    assert found.per_episode == [[0.5625, 0.71875, 0.5], [-0.5625, -0.5, -0.71875]]
    assert found.diagnostics["graph/groups_with_goal"] == found.diagnostics["graph/path_frac"] == 1.0


def test_nobody_knows_where_the_last_decision_of_a_truncated_episode_led():
    won, lost = won_beside_a_detour()
    found = graphgpo([won, replace(lost, truncated=True)], HALF).parts
    assert found["closeness"][1] == [0.125, 0.25, None]
    assert found["step_advantage"] == [[0.0625, 0.0, 0.0], [-0.0625, 0.0, 0.0]]


def test_the_goal_is_the_best_score_of_the_group_or_any_that_is_high_enough():
    short, long = episode("short", [1.0], "s"), episode("long", [0.0, 1.0], "sa")
    equal = graphgpo([short, long], HALF)
    assert equal.diagnostics["graph/groups_with_goal"] == 0.0
    assert equal.per_episode == [[0.0], [0.0, 0.0]], "no score is the best"
    reached = graphgpo([short, long], HALF.model_copy(update=dict(goal_score=1.0))).per_episode
    assert reached == [[0.25], [-0.25, 0.0]], "both reached it, the first at once: 1 against 1/2"
    missed = graphgpo(won_beside_a_detour(), HALF.model_copy(update=dict(goal_score=2.0)))
    assert missed.parts["closeness"] == [[None] * 3] * 2
    assert missed.parts["step_advantage"] == [[0.0] * 3] * 2


@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_a_discount_that_tells_no_distances_apart_is_refused(discount):
    with pytest.raises(ValidationError, match="distance_discount"):
        GraphgpoKeys(distance_discount=discount)


def soft(texts, rewards, temperature, **config):
    episodes = [
        EpisodeRewards(f"r-{i}", "g", [reward], texts_T=[text])
        for i, (text, reward) in enumerate(zip(texts, rewards, strict=True))
    ]
    table = AlgorithmTable(similarity_temperature=temperature, **config)
    return gigpo_soft(episodes, table)


def test_unlike_states_count_by_the_temperature():
    # No common term: cos = 0 and k = exp(-1 / temperature), here a third. A_S = (1 - 0) * (1/3) / (4/3)
    found = soft(["tree", "water"], [1.0, 0.0], 1 / math.log(3))
    assert found.parts["step_advantage"] == [[pytest.approx(0.25)], [pytest.approx(-0.25)]]
    assert found.parts["compared"][0] == [pytest.approx(16 / 10 - 1)], "1 / (9/16 + 1/16), less itself"
    assert soft(["tree", "water"], [1.0, 0.0], 0.0).parts["step_advantage"] == [[0.0], [0.0]]
    assert soft(["tree", "tree"], [1.0, 0.0], 0.0).parts["step_advantage"] == [[0.5], [-0.5]]
    everywhere = soft(["tree", "water", ""], [1.0, 0.0, 2.0], 1e15).parts["step_advantage"]
    assert everywhere == [[pytest.approx(0.0)], [pytest.approx(-1.0)], [pytest.approx(1.0)]]
    # The same terms in another order: their cosine is 1, or rounded to more, whose exp would be infinite.
    near = soft(["tree 1", "1 tree", "water"], [1.0, 0.0, 0.0], 1e-20).parts["step_advantage"]
    assert all(abs(value) <= 0.5 for (value,) in near)


def test_the_effective_number_of_others_by_hand():
    # k is 1 between the two trees and a third to the water. Sums 7/3 and 5/3, of squares 19/9 and 11/9.
    found = soft(["tree", "tree", "water"], [1.0, 0.0, 0.0], 1 / math.log(3))
    trees, water = 49 / 19 - 1, 25 / 11 - 1
    assert found.parts["compared"] == [[pytest.approx(number)] for number in (trees, trees, water)]
    assert found.diagnostics["anchors/effective_others"] == pytest.approx((2 * trees + water) / 3)
    assert found.parts["baseline"][2] == [pytest.approx((1 / 3) / (5 / 3))]


def test_more_texts_than_are_held_at_a_time_or_have_terms_are_compared_alike():
    # each of 1,100 texts has a term of its own: k = exp(-1) with every other, also where the term is left out
    count, k = 1_100, math.exp(-1)
    rewards = [float(i % 7) for i in range(count)]
    found = soft([f"t{i}" for i in range(count)], rewards, 1.0).parts["step_advantage"]
    total = math.fsum(rewards)
    expected = [own - (own + k * (total - own)) / (1 + k * (count - 1)) for own in rewards]
    assert [row[0] for row in found] == pytest.approx(expected, abs=1e-12)


def test_the_terms_that_most_decisions_have_are_kept():
    texts = [*(f"t{i}" for i in range(1_100)), "z a", "z a", "z b", "z b"]
    found = soft(texts, [0.0] * 1_102 + [1.0, 1.0], 1.0)
    # z is in 4 of 1,104 decisions, a and b in 2, and each other term in one: of those not all are kept
    z, a, b = (1 + math.log(1105 / (1 + count)) for count in (4, 2, 2))
    cosine = z * z / math.sqrt((z * z + a * a) * (z * z + b * b))
    near, far = math.exp(cosine - 1), math.exp(-1)
    assert found.parts["baseline"][1_100] == [pytest.approx(2 * near / (2 + 2 * near + 1_100 * far))]


@FEW
@given(BATCH, CONFIG)
def test_at_temperature_0_it_is_gigpo_with_texts_for_state_keys(drawn, config):
    config = config.model_copy(update=dict(similarity_temperature=0.0, fnorm="one"))
    episodes = make_batch(drawn)
    groups = [e.group_id for e in episodes]
    found, expected = gigpo_soft(episodes, config), gigpo_additive(episodes, config)
    for group, row_T, expected_T in zip(groups, found.per_episode, expected.per_episode, strict=True):
        assert row_T == pytest.approx(
            expected_T if groups.count(group) > 1 else [0.0] * len(row_T), abs=1e-12
        )


def exactly(estimator, episodes, config):
    """Advantages by the oracle of an estimator."""
    gamma, w = Fraction(config.gamma), Fraction(config.step_advantage_w)
    levels = {"baseline": config.episode_baseline, "w": w}
    batch = exact_batch(episodes, texts=estimator is gigpo_soft)
    if estimator is g2po:
        return exact_g2po(batch, gamma=gamma, fnorm=config.fnorm, **levels)
    if estimator is gigpo:
        weighed = {"baseline": config.episode_baseline, "omega": Fraction(config.omega)}
        return exact_gigpo(batch, gamma=gamma, fnorm=config.fnorm, **weighed)
    if estimator is gagpo:
        return exact_gagpo(batch, gamma=gamma, share=Fraction(config.gae_lambda), fnorm=config.fnorm)
    if estimator is gigpo_soft:
        return exact_gigpo_soft(
            batch, gamma=gamma, temperature=Fraction(config.similarity_temperature), **levels
        )
    goal = None if config.goal_score is None else Fraction(config.goal_score)
    discount = Fraction(config.distance_discount)
    cut = [e.truncated for e in episodes]
    return exact_graphgpo(batch, cut, discount=discount, goal_score=goal, fnorm=config.fnorm, **levels)


@pytest.mark.parametrize("estimator", [*ALL, gigpo])
@FEW
@given(drawn=BATCH, config=CONFIG)
def test_they_equal_exact_arithmetic(estimator, drawn, config):
    episodes = make_batch(drawn)
    found = estimator(episodes, config).per_episode
    largest = max(1.0, *(math.fsum(map(abs, e.rewards_T)) for e in episodes))
    for row_T, exact_T in zip(found, exactly(estimator, episodes, config), strict=True):
        assert row_T == pytest.approx(list(map(float, exact_T)), abs=1e-12 * largest)
