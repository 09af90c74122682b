"""`gigpo` by hand, by identity and against exact arithmetic."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer_backend.core.exact_gigpo import exact_gigpo
from trainer_backend.core.advantages.episodes import EpisodeRewards
from trainer_backend.core.advantages.gigpo import gigpo, gigpo_additive
from trainer_backend.job.training_table import AlgorithmTable

ONE = AlgorithmTable(gamma=0.95, fnorm="one")
STEP = st.tuples(st.integers(-8, 8).map(lambda eighths: eighths / 8), st.sampled_from("abc"))
EPISODE = st.tuples(st.sampled_from(["g", "h"]), st.lists(STEP, min_size=1, max_size=5))
BATCH = st.lists(EPISODE, min_size=1, max_size=6)
CONFIG = st.builds(
    AlgorithmTable,
    gamma=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    omega=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    fnorm=st.sampled_from(["std", "one"]),
    episode_baseline=st.sampled_from(["trajectory", "step"]),
)


def episode(name, rewards, keys, group="g"):
    return EpisodeRewards(name, group, rewards, state_keys_T=list(keys))


def make_batch(drawn):
    return [
        episode(f"r-{i}", [reward for reward, _ in steps], [key for _, key in steps], group)
        for i, (group, steps) in enumerate(drawn)
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


def test_a_state_that_is_met_again_in_one_episode_is_an_anchor_too():
    # G: 0.857375, 0.9025, 0.95 at a, their mean 0.903292
    (of_steps,) = step_parts([episode("r", [0, 0, 0, 1.0], "aaab")])
    assert of_steps == pytest.approx([-0.045917, -0.000792, 0.046708, 0.0], abs=1e-6)


def test_scores_are_averaged_over_trajectories_or_over_steps():
    # a success of one step beside a failure of nine
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
    assert found["anchors/met_after_start_frac"] == 0.0


@given(BATCH, CONFIG)
def test_it_equals_exact_arithmetic(drawn, config):
    episodes = make_batch(drawn)
    exact = exact_gigpo(
        [(e.group_id, [Fraction(r) for r in e.rewards_T], e.state_keys_T) for e in episodes],
        gamma=Fraction(config.gamma),
        fnorm=config.fnorm,
        baseline=config.episode_baseline,
    )
    result = gigpo(episodes, config)
    largest = max(1.0, max(abs(math.fsum(e.rewards_T)) for e in episodes))
    for row_T, (of_episode, of_steps) in zip(result.per_episode, exact, strict=True):
        wanted = [config.omega * float(of_episode) + (1 - config.omega) * float(step) for step in of_steps]
        assert row_T == pytest.approx(wanted, abs=1e-12 * largest)


@given(BATCH, st.sampled_from([0.25, 0.5, 0.8]))
def test_the_convex_sum_is_omega_times_the_papers(drawn, omega):
    episodes = make_batch(drawn)
    convex = gigpo(episodes, AlgorithmTable(gamma=0.95, omega=omega)).per_episode
    additive = gigpo_additive(
        episodes, AlgorithmTable(gamma=0.95, step_advantage_w=(1 - omega) / omega)
    ).per_episode
    for left, right in zip(convex, additive, strict=True):
        assert left == pytest.approx([omega * value for value in right], abs=1e-12)
