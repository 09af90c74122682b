"""Groups without anything to learn from: by their advantages, not by their totals."""

import pytest

from trainer_backend.core.advantages.episodes import Advantages, EpisodeRewards
from trainer_backend.core.advantages.grpo import grpo, grpo_no_std
from trainer_backend.core.advantages.spread import flat_groups
from trainer_backend.core.advantages.stepwise import stepwise
from trainer_backend.errors import AdvantageError
from trainer_backend.job.training_table import AlgorithmTable


def episodes(**groups: list[list[float]]) -> list[EpisodeRewards]:
    return [
        EpisodeRewards(f"{group}/{number}", group, rewards_T)
        for group, members in groups.items()
        for number, rewards_T in enumerate(members)
    ]


def flat(estimator, gamma: float = 1.0, **groups: list[list[float]]) -> list[str]:
    batch = episodes(**groups)
    found: Advantages = estimator(batch, AlgorithmTable(gamma=gamma))
    return flat_groups(batch, found.per_episode)


def test_equal_totals_earned_at_other_decisions_are_flat_for_grpo_and_not_for_stepwise():
    # both earn 1, one at its first decision, the other at its second:
    # stepwise returns-to-go (1, 0) and (1, 1) differ at t = 1
    groups = {"a": [[1.0, 0.0], [0.0, 1.0]], "b": [[1.0, 0.0], [0.0, 0.0]]}
    assert flat(grpo, **groups) == ["a"]
    assert flat(grpo_no_std, **groups) == ["a"]
    assert flat(stepwise, **groups) == []


def test_equal_siblings_and_lone_episodes_are_flat_for_all():
    groups = {"same": [[0.0, 2.0], [0.0, 2.0]], "lone": [[3.0]], "spread": [[1.0], [2.0]]}
    for estimator in (grpo, grpo_no_std, stepwise):
        assert flat(estimator, **groups) == ["same", "lone"]


def test_the_last_bit_of_a_mean_is_no_spread():
    # three times 0.1 is 0.30000000000000004 in floats, and half of what is left of it is not 0.1 again
    batch = episodes(a=[[0.1], [0.1], [0.1]])
    assert flat_groups(batch, [[0.1 - (0.1 + 0.1 + 0.1 - 0.1) / 2]] * 3) == ["a"]


def test_a_small_spread_is_one_whatever_the_unit_of_the_rewards():
    for unit in (1e-9, 1.0, 1e9):
        assert flat(stepwise, a=[[unit], [unit * (1 + 1e-9)]]) == []
        assert flat(grpo, a=[[unit], [unit * (1 + 1e-9)]]) == []


def test_standard_deviations_are_not_measured_by_the_unit_of_the_rewards():
    # a ten-thousandth of a standard deviation is something to learn from, whatever the rewards are counted in
    batch = episodes(a=[[1e9], [1e9]], b=[[1e9], [0.0]])
    assert flat_groups(batch, [[1e-4], [-1e-4], [1.0], [-1.0]]) == []
    assert flat_groups(batch, [[1e-17], [-1e-17], [1.0], [-1.0]]) == ["a"]


def test_what_no_estimator_would_take_is_refused_here_too():
    with pytest.raises(AdvantageError, match="the reward is nan"):
        flat_groups(episodes(a=[[float("nan")]]), [[0.0]])
