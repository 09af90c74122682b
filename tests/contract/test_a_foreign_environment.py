"""A job on an environment of gymnasium, with an estimator of the operator's: HTTP, r_t, recredit."""

import json
import re

import gymnasium
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.conftest import rows_of, tiny_job, train_job
from trainer_backend.__main__ import app
from trainer_backend.operator_plugins import load_plugins
from trainer_backend.rundir.rollout_files import read_rollouts

ENV_ID, MOVES = "Taxi-v4", ("south", "north", "east", "west", "pickup", "dropoff")
MINE = """
from trainer_backend.operator_plugins import estimator


@estimator("own_reward")
def own_reward(episodes, config):
    return [[float(reward) for reward in episode.rewards_T] for episode in episodes]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    file = folder / "mine.py"
    file.write_text(MINE)
    job = tiny_job(
        job__trainer_plugins=[str(file)], algorithm__advantage="own_reward",
        rollout={"env_name": f"gymnasium:{ENV_ID}", "max_turns": 6, "max_tokens": 12, "episodes_per_batch": 4,
                 "env_config": {"action_names": MOVES, "instructions": ""}},
        warmup={"policy_name": "random", "episodes": 24, "min_outcome_reward": -60.0, "epochs": 4,
                "batch_decisions": 12, "learning_rate": 6e-3},
        training__group_size=2, training__iterations=1, training__batch_decisions=24,
        training__step_rewards_mode="env_sparse", evaluation__instances=1,
    )  # fmt: skip
    directory, _, progress = train_job(job, folder / "run")
    assert progress.iteration == 1
    yield directory
    load_plugins([])


def decisions_of(path):
    """Each stored episode's decisions by its rollout."""
    return {row["rollout_id"]: row["decisions"] for row in pq.read_table(path).to_pylist()}


def paid_by_gymnasium(trajectory):
    """What the environment itself pays for the same calls in the same world; 0 where there was none."""
    world = gymnasium.make(ENV_ID)
    world.reset(seed=trajectory.seed)
    rewards_T = []
    for step in trajectory.steps:
        is_call = step.step_info.invalid_reason is None
        move = MOVES.index(step.action_taken["arguments"]["action"]) if is_call else None
        rewards_T.append(0.0 if move is None else world.step(move)[1])
    return rewards_T


def test_the_reward_of_each_call_reaches_its_decision(run):
    decisions = decisions_of(run.rollouts_file("iteration_1"))
    rewards = set()
    for rollout in read_rollouts(run.rollouts_file("iteration_1")):
        expected_T = paid_by_gymnasium(rollout.trajectory)
        own = decisions[rollout.rollout_id]
        assert [decision["reward"] for decision in own] == expected_T
        assert [decision["advantage"] for decision in own] == expected_T, (
            "the operator's estimator credits it"
        )
        rewards.update(expected_T)
    assert {-1.0, -10.0} <= rewards, "a move costs 1, and a refused pickup or drop-off 10"


def test_the_learner_finds_the_log_probs_that_were_sampled(run):
    (row,) = rows_of(run, "iteration")
    assert row["decision/count"] == 24
    assert row["mismatch/logprob_max"] < 1e-4


def test_recredit_scores_the_operators_estimator_next_to_ours(run, tmp_path):
    names = ("own_reward", "stepwise", "rloo")
    options = [word for name in names for word in ("--advantage", name)]
    done = CliRunner().invoke(app, ["recredit", str(run.path), *options, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures["estimators"]) == set(names) and not figures["refused"]
    stored = decisions_of(run.rollouts_file("iteration_1"))
    mine = decisions_of(tmp_path / "own_reward.parquet")
    assert mine == stored
    rewards = [decision["reward"] for decisions in stored.values() for decision in decisions]
    mean = sum(rewards) / len(rewards)
    assert figures["estimators"]["own_reward"]["mean"] == pytest.approx(mean)
    assert re.search(r"own_reward +\S+ +\S+", done.output)
