"""Advantages measured by playing on, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_backend.core.advantages.branch import branch, branch_turns
from trainer_backend.core.advantages.episodes import EpisodeRewards
from trainer_backend.core.advantages.stepwise import stepwise
from trainer_backend.errors import AdvantageError
from trainer_backend.job.training_table import AlgorithmTable

HALF = AlgorithmTable(gamma=0.5)


def episode(rewards_T, branches, name="a", group="g"):
    return EpisodeRewards(name, group, rewards_T, branch_returns_T=branches)


def test_a_decision_is_held_against_the_mean_of_its_branches_and_the_others_against_siblings():
    # G of a: 1 + 2/2 + 4/4 = 3, 2 + 4/2 = 4, 4; of b: 2, 0.
    a = episode([1.0, 2.0, 4.0], [[], [1.0, 2.0], []])
    b = episode([2.0, 0.0], [[], []], name="b")
    found = branch([a, b], HALF)
    assert found.per_episode == [[3.0 - 2.0, 4.0 - 1.5, 4.0 - 0.0], [2.0 - 3.0, 0.0 - 4.0]]
    assert found.parts["baseline"] == [[2.0, 1.5, 0.0], [3.0, 4.0]]
    assert found.parts["branches"] == [[None, 2.0, None], [None, None]]
    assert found.parts["compared"] == [[1.0, None, 1.0], [1.0, 1.0]]
    assert found.diagnostics["advantages/branched"] == 1.0
    assert found.diagnostics["advantages/branched_share"] == 1 / 5
    assert found.diagnostics["advantages/branched_abs"] == 2.5
    assert found.diagnostics["advantages/branched_abs_stepwise"] == 4.0


def test_an_episode_without_siblings_has_advantages_where_it_has_branches():
    found = branch([episode([1.0, 1.0], [[0.5], []])], AlgorithmTable(gamma=1.0))
    assert found.per_episode == [[1.5, 0.0]]


@given(st.lists(st.lists(st.floats(-9, 9), min_size=1, max_size=4), min_size=1, max_size=4))
def test_without_a_single_branch_it_is_stepwise(rewards):
    episodes = [episode(row, [[] for _ in row], str(i)) for i, row in enumerate(rewards)]
    assert branch(episodes, HALF).per_episode == stepwise(episodes, HALF).per_episode


def test_what_was_played_without_branches_is_refused_by_name():
    with pytest.raises(AdvantageError, match=r"rollout a: no branches were played.*'branch' needs"):
        branch([EpisodeRewards("a", "g", [1.0])], HALF)


def test_the_return_of_a_branch_must_be_a_number():
    with pytest.raises(AdvantageError, match=r"rollout a, turn 2: the returns of its branches are .*nan"):
        branch([episode([1.0, 1.0], [[], [float("nan"), 1.0]])], HALF)


@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 12), st.integers(1, 2))
def test_turns_are_different_in_order_and_reproducible(seed, count, longest, first):
    turns = branch_turns(seed, count=count, max_decisions=longest, first=first)
    assert turns == branch_turns(seed, count=count, max_decisions=longest, first=first)
    assert list(turns) == sorted(set(turns)) and set(turns) <= set(range(first, longest + 1))
    assert len(turns) == min(count, longest - first + 1)


def test_every_turn_is_chosen_as_often_as_any_other():
    chosen = [turn for seed in range(6000) for turn in branch_turns(seed, count=2, max_decisions=6)]
    shares = [chosen.count(turn) / len(chosen) for turn in range(1, 7)]
    assert shares == pytest.approx([1 / 6] * 6, abs=0.01)
