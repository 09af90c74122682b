"""A job that is trained on a user's reward function: a child process, r_t, metrics."""

import pytest

from shared_schemas.rewards import StepRewards, StepRewardsMode, reward_vector
from tests.conftest import rows_of, tiny_job, train_job, with_its_plugins
from trainer_backend.core.guards import refuse_lost_reward
from trainer_backend.credit.inspect import episode_view, find_rollout
from trainer_backend.rundir.rollout_files import finished_rows, read_rollouts

FILE = '''
from task_app.reward_functions import EvaluateResult, StepOutput, reward_function


@reward_function
def lively(messages, ground_truth=None, *, env_rewards, **kwargs):
    """100 and the env steps that an episode took; half a point for each of a decision, none for the last."""
    steps = tuple(StepOutput(step_index=t, base_reward=len(paid) / 2) for t, paid in enumerate(env_rewards))
    return EvaluateResult(score=100 + sum(map(len, env_rewards)), step_outputs=steps[:-1], reason="counted")


REWARD_FUNCTIONS = {"lively": lively}
'''


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged")
    file = folder / "lively.py"
    file.write_text(FILE)
    job = tiny_job(
        rollout__reward_function="lively", services__task_plugins=(str(file),),
        warmup__min_outcome_reward=101.0, warmup__epochs=1, training__step_rewards_enabled=False,
        training__iterations=1, evaluation__instances=2,
    )  # fmt: skip
    with with_its_plugins(job) as there:
        directory, _, progress = train_job(there, folder / "run")
    assert progress.iteration == 1
    return directory


def trajectories(directory, name="iteration_1"):
    found = [rollout.trajectory for rollout in read_rollouts(directory.rollouts_file(name))]
    assert all(found)
    return found


def test_the_score_is_what_the_last_decision_earned(run):
    for row in finished_rows(run.rollouts_file("iteration_1"), ["env_steps", "decisions"]):
        rewards_T = [decision["reward"] for decision in row["decisions"]]
        assert rewards_T == [0.0] * (len(rewards_T) - 1) + [100.0 + row["env_steps"]]


def test_no_mode_counts_anything_twice(run):
    # Every env step is in the score once, and at half a point in the base rewards of all decisions but one.
    def total(trajectory, mode: StepRewardsMode):
        config = StepRewards(enabled=True, mode=mode)
        rewards_T = reward_vector(trajectory.steps, trajectory.outcome_reward, config)
        refuse_lost_reward(trajectory, rewards_T, config, rollout_id="r")
        return sum(rewards_T)

    for trajectory in trajectories(run):
        counted = sum(len(step.env_rewards) for step in trajectory.steps[:-1]) / 2
        paid = sum(sum(step.env_rewards) for step in trajectory.steps)
        assert total(trajectory, "off") == 100.0 + trajectory.env_steps
        assert total(trajectory, "env_sparse") == pytest.approx(paid + counted)


def test_every_episode_of_the_job_is_judged_and_keeps_its_environments_outcome(run):
    for name in ("warmup", "iteration_1", "evaluation_0", "evaluation_1"):
        for trajectory in trajectories(run, name):
            said = trajectory.user_reward
            assert said is not None
            assert said.environment_outcome_reward == sum(map(bool, trajectory.achievements_counts.values()))
            assert len(trajectory.warnings) == 1, "the last step has no step_output"


def test_the_metrics_tell_both_outcomes_and_count_the_warnings(run):
    (row,) = rows_of(run, "iteration")
    found = trajectories(run)
    assert row["episode/outcome_reward"] == row["user_reward/score"] == 100.0 + row["episode/env_steps"]
    assert row["episode/environment_outcome_reward"] == row["episode/unique_achievements"]
    assert row["user_reward/warnings"] == len(found) == 8
    base = sum(step.base_reward or 0.0 for item in found for step in item.steps)
    assert row["user_reward/base_sum"] == pytest.approx(base / 8)
    for evaluation in rows_of(run, "evaluation"):
        assert evaluation["eval/outcome_reward"] > 100.0
        assert evaluation["eval/environment_outcome_reward"] == evaluation["eval/unique_achievements"]


def test_inspect_shows_what_was_said_and_what_did_not_fit(run, capsys):
    from rich.console import Console

    rollout, credits = find_rollout([run], "/train/1/0/0")
    Console(width=200).print(episode_view(rollout, credits, full=False))
    shown = capsys.readouterr().out
    assert "judged by lively: counted; by its environment" in shown
    assert "warning:" in shown and "no base_reward" in shown
