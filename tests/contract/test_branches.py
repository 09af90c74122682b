"""A job that measures decisions by playing on from before them, and one that compares states."""

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from tests.conftest import (
    ListReporter,
    decisions_by_turn,
    rows_of,
    tiny_job,
    train_job,
    warmed_up,
    with_its_plugins,
)
from trainer_backend import job_parts
from trainer_backend.collect.plan import Inference
from trainer_backend.collect.trial import try_job
from trainer_backend.core.rewards import discounted_returns
from trainer_backend.credit.recredit import recredit_run, recredited, stored_iterations
from trainer_backend.errors import JobError
from trainer_backend.job.schema import CurriculumTable
from trainer_backend.rundir.rollout_files import finished_rows, read_rollouts

GAMMA = 0.9


@pytest.fixture(scope="module")
def run(trained, tmp_path_factory):
    job = tiny_job(
        **warmed_up(trained),
        algorithm__advantage="branch", algorithm__gamma=GAMMA, algorithm__branches_per_episode=3,
        algorithm__branch_rollouts=2, rollout__episodes_per_batch=4, training__iterations=1,
        evaluation__instances=1,
    )  # fmt: skip
    directory, reporter, progress = train_job(job, tmp_path_factory.mktemp("runs") / "branch")
    assert progress.iteration == 1
    return directory, reporter


def stored(directory, name):
    return read_rollouts(directory.rollouts_file(name))


def test_branches_are_what_is_left_of_their_parents_under_the_same_policy_version(run):
    directory, _ = run
    parents = {rollout.rollout_id: rollout.trajectory for rollout in stored(directory, "iteration_1")}
    branches = stored(directory, "branches_1")
    assert len(branches) >= 2 * len(parents), "two from each of three decisions, as far as episodes went"
    for branch in branches:
        episode = branch.trajectory
        parent = parents[episode.parent_rollout_id]
        left = parent.steps[episode.parent_turn]
        assert left.turn > 1, "the first turn's branches are the siblings"
        assert left.snapshot is None, "world and actions lead there again; it is not stored"
        assert episode.steps[0].observation_data == left.observation_data.model_copy(
            update={"state_keys": {}}
        )
        assert len(episode.steps) <= 8 - episode.parent_turn
        assert episode.steps[0].policy_logprobs.versions == parent.steps[0].policy_logprobs.versions
    assert len({branch.trajectory.steps[0].sampling.seed for branch in branches}) == len(branches)


def test_the_advantage_of_a_measured_decision_is_its_return_less_the_mean_of_its_branches(run):
    directory, _ = run
    returns = {}
    for branch in stored(directory, "branches_1"):
        rewards_T = [step.metadata.decision_rewards.unique_delta for step in branch.trajectory.steps]
        place = (branch.trajectory.parent_rollout_id, branch.trajectory.parent_turn + 1)
        returns.setdefault(place, []).append(discounted_returns(rewards_T, GAMMA)[0])
    decisions = decisions_by_turn(directory.rollouts_file("iteration_1"))
    assert {place for place, found in decisions.items() if found["branch_returns"]} == set(returns)
    for place, found in returns.items():
        decision = decisions[place]
        assert decision["branch_returns"] == found
        assert decision["advantage"] == decision["return_to_go"] - math.fsum(found) / 2


def test_a_row_of_metrics_counts_them_apart(run):
    directory, reporter = run
    [row] = rows_of(directory, "iteration")
    branches = stored(directory, "branches_1")
    assert row["branch/rollouts"] == len(branches)
    assert row["branch/decisions"] == sum(len(item.trajectory.steps) for item in branches)
    assert row["branch/failed"] == 0.0
    assert row["rollout/finished"] == 4.0, "branches are not among the episodes that are learned from"
    assert row["advantages/branched"] == len(branches) / 2
    assert ("branches 1", len(branches), len(branches)) in reporter.stages


def test_recredit_gives_the_same_from_what_is_stored_and_other_rewards_too(run, tmp_path):
    directory, _ = run
    recredit_run(directory.path, ["branch"], [], None, tmp_path / "same", (), reporter=ListReporter())
    again = decisions_by_turn(tmp_path / "same" / "branch.parquet")
    first = decisions_by_turn(directory.rollouts_file("iteration_1"))
    assert [again[place]["advantage"] for place in first] == [item["advantage"] for item in first.values()]
    other = ["training.step_rewards_indicator_lambda=1"]  # so every first unlock is paid twice
    recredit_run(directory.path, ["branch"], [], None, tmp_path / "other", other, reporter=ListReporter())
    paid = decisions_by_turn(tmp_path / "other" / "branch.parquet")
    before = [found for item in first.values() for found in item["branch_returns"]]
    after = [found for place in first for found in paid[place]["branch_returns"]]
    assert any(before) and after == [2 * found for found in before]


FORGETFUL = """
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.plugins import EnvironmentPlugin


class Forgetful:
    def __init__(self, config):
        self._crafter = CrafterEnvironment(config)

    def __getattr__(self, name):
        if name in ("snapshot", "restore"):
            raise AttributeError(name)
        return getattr(self._crafter, name)


ENVIRONMENTS = {"forgetful": EnvironmentPlugin(CrafterConfig, Forgetful)}
"""


async def test_an_environment_that_cannot_be_kept_is_told_before_anything_is_played(tmp_path):
    plugins = tmp_path / "forgetful.py"
    plugins.write_text(FORGETFUL, encoding="utf-8")
    stepwise, branch = (
        tiny_job(
            rollout__env_name="forgetful",
            algorithm__advantage=estimator,
            services__task_plugins=[str(plugins)],
        )
        for estimator in ("stepwise", "branch")
    )
    gateway = Inference("http://127.0.0.1:9", "tiny/actor", SecretStr(""))
    frontier = stepwise.model_copy(update={"curriculum": CurriculumTable(share=0.5)})
    with with_its_plugins(branch) as there:
        async with job_parts.task_apps(there, tmp_path / "task_app.log") as apps:
            await try_job(job_parts.planner(stepwise, "run", gateway), apps, from_scratch=False)
            with pytest.raises(JobError, match=r"^algorithm\.advantage: .*no snapshot\(\) and restore\(\)"):
                await try_job(job_parts.planner(branch, "run", gateway), apps, from_scratch=False)
            with pytest.raises(JobError, match=r"^curriculum\.rule: .*'forgetful' has none"):
                await try_job(job_parts.planner(frontier, "run", gateway), apps, from_scratch=False)


def test_gigpo_compares_decisions_that_were_made_in_one_state(trained: Any, tmp_path: Path):
    job = tiny_job(
        **warmed_up(trained),
        algorithm__advantage="gigpo",
        rollout__state_keys=("text",),
        training__iterations=1,
        evaluation__instances=1,
    )
    directory, _, _ = train_job(job, tmp_path / "run")
    (row,) = rows_of(directory, "iteration")
    assert 0.0 <= row["anchors/singleton_frac"] < 1.0, "siblings share their first state"
    decisions = [
        decision
        for episode in finished_rows(directory.rollouts_file("iteration_1"), ["decisions"])
        for decision in episode["decisions"]
    ]
    assert all(decision["state_key"].startswith("1:") for decision in decisions)
    for decision in decisions:
        parts = decision["advantage_parts"]
        joined = (parts["episode_advantage"] + parts["step_advantage"]) / 2
        assert decision["advantage"] == pytest.approx(joined)
    algorithm = job.algorithm.model_copy(update={"state_hashing_function": "text"})
    by_text = job.model_copy(update={"algorithm": algorithm})
    found = recredited(job_parts.credit(by_text), stored_iterations(directory, []), ["gigpo"])
    assert not found.refused, "the job stored the text's keys too"


def test_a_state_key_that_the_task_app_does_not_know_is_told_before_anything_is_played(tmp_path: Path):
    # `turnwise check` refuses it; of a plug-in's environment it knows no names, and the task app is asked.
    job = tiny_job(algorithm__advantage="gigpo")
    algorithm = job.algorithm.model_copy(update={"state_hashing_function": "nearst"})
    told = r"algorithm.state_hashing_function: 'crafter' has no state key 'nearst'. Did you mean 'nearest'"
    with pytest.raises(JobError, match=told + r"\? Known: .* \(says the task app at"):
        train_job(job.model_copy(update={"algorithm": algorithm}), tmp_path / "run")
