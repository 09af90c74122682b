"""Continuations that are trained, for real: HTTP, replays, engine, credit, files."""

import math
from itertools import pairwise

import pytest

from tests.conftest import ListReporter, decisions_by_turn, rows_of, tiny_job, train_job, warmed_up
from trainer_backend.core.rewards import discounted_returns
from trainer_backend.credit.recredit import recredit_run
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.rundir.spool import read_ledger

GAMMA = 0.9
FORKS = {"algorithm__train_branches": True, "algorithm__branches_per_episode": 2}


def forked(trained, path, **overrides):
    job = tiny_job(
        **{
            **warmed_up(trained), **FORKS, "algorithm__gamma": GAMMA, "rollout__episodes_per_batch": 4,
            "training__iterations": 1, "evaluation__instances": 1, **overrides,
        }
    )  # fmt: skip
    return train_job(job, path)


@pytest.fixture(scope="module")
def run(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "forks"
    directory, _, progress = forked(trained, folder, algorithm__fork_rule="surprise")
    assert progress.iteration == 1
    return directory


def stored(directory, name):
    return read_rollouts(directory.rollouts_file(name))


def test_continuations_are_trained_with_leave_one_out_at_the_fork(run):
    branches = stored(run, "branches_1")
    credits = decisions_by_turn(run.rollouts_file("branches_1"))
    assert branches
    for one, other in list(pairwise(branches))[::2]:
        assert one.group_id == other.group_id and one.trajectory.parent_turn >= 1
        returns = []
        for item in (one, other):
            rewards_T = [step.metadata.decision_rewards.unique_delta for step in item.trajectory.steps]
            returns.append(discounted_returns(rewards_T, GAMMA)[0])
        first = credits[one.rollout_id, 1]
        assert first["advantage"] == pytest.approx(returns[0] - returns[1])
        assert first["advantage_parts"]["continuations"] == 1.0
        assert one.trajectory.steps[0].observation_data.messages == (
            other.trajectory.steps[0].observation_data.messages
        )
    (line,) = read_ledger(run.path)
    whole = stored(run, "iteration_1")
    assert set(line.rollout_ids) == {item.rollout_id for item in (*whole, *branches)}
    [row] = rows_of(run, "iteration")
    after = sum(len(item.trajectory.steps) for item in branches)
    before = sum(len(item.trajectory.steps) for item in whole)
    assert row["forks/rollouts"] == len(branches) == row["branch/rollouts"]
    assert row["forks/share"] == after / (after + before)
    assert row["rollout/finished"] == 4.0, "whole episodes are counted apart"
    assert math.isfinite(row["forks/gain"])


def test_recredit_gives_the_same_advantages_to_what_was_trained(run, tmp_path):
    names = ["stepwise", "branch", "rloo"]
    recredit_run(run.path, names, [], None, tmp_path, (), reporter=ListReporter())
    again = decisions_by_turn(tmp_path / "stepwise.parquet")
    first = decisions_by_turn(run.rollouts_file("iteration_1"))
    first |= decisions_by_turn(run.rollouts_file("branches_1"))
    assert {place: item["advantage"] for place, item in again.items()} == {
        place: item["advantage"] for place, item in first.items()
    }
    assert (tmp_path / "rloo.parquet").exists()
    assert not (tmp_path / "branch.parquet").exists(), "its baselines would be chosen by their own samples"


def test_a_critic_s_values_choose_and_train_forks_of_iterations_that_are_collected_ahead_too(
    trained, tmp_path
):
    """These are forked when they are waited for."""
    directory, _, progress = forked(
        trained, tmp_path / "run", training__iterations=2, training__max_staleness=1,
        algorithm__advantage="gae", algorithm__fork_rule="critic",
    )  # fmt: skip
    assert progress.iteration == 2
    for row in rows_of(directory, "iteration"):
        assert row["forks/rollouts"] > 0 and row["optim/steps"] > 0 and row["policy/staleness_max"] <= 1
        decisions = decisions_by_turn(directory.rollouts_file(f"branches_{row['iteration']}")).values()
        assert all(item["advantage"] is not None for item in decisions)
