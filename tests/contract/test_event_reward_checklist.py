"""The sanity checklist at the end of source 1, over the real HTTP path: process, client, dispatcher."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shared_schemas.rewards import StepRewards, reward_vector
from shared_schemas.trajectory import Trajectory
from tests.conftest import at_the_task_app, rows_of, tiny_job
from trainer_backend import job_parts
from trainer_backend.collect.dispatcher import Dispatcher
from trainer_backend.start import describe_switches

OFF = StepRewards()
DISABLED_STEPWISE = StepRewards(enabled=False, mode="decision_stepwise")
ENABLED_OFF = StepRewards(enabled=True, mode="off")
STEPWISE = StepRewards(enabled=True, mode="decision_stepwise")
SPARSE = StepRewards(enabled=True, mode="env_sparse")
SWITCHES = (OFF, DISABLED_STEPWISE, ENABLED_OFF, STEPWISE, SPARSE)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[StepRewards, list[Trajectory]]:
    """The same teacher in the same worlds under each setting of the switches."""
    folder = tmp_path_factory.mktemp("checklist")
    return asyncio.run(_play(folder))


async def _play(folder: Path) -> dict[StepRewards, list[Trajectory]]:
    job = tiny_job(rollout__max_turns=25, warmup__episodes=3)
    found = {}
    async with job_parts.task_apps(at_the_task_app(job), folder / "task_app.log") as apps:
        dispatcher = Dispatcher(apps, timeout_s=120)
        for number, switches in enumerate(SWITCHES):
            requests = [
                request.model_copy(update={"step_rewards": switches})
                for request in job_parts.planner(job, f"checklist-{number}").warmup()
            ]
            batch = await dispatcher.collect(requests)
            assert not batch.failed
            found[switches] = [item.trajectory for item in batch.rollouts if item.trajectory is not None]
    return found


def credited(trajectory: Trajectory, **switches: Any) -> list[float]:
    return reward_vector(trajectory.steps, trajectory.outcome_reward, StepRewards(**switches))


def records(trajectory: Trajectory) -> list[Any]:
    return [step.metadata.decision_rewards for step in trajectory.steps]


def test_with_the_switches_off_only_the_outcome_is_used_and_no_decision_metadata_is_read(played):
    for switches in (OFF, DISABLED_STEPWISE, ENABLED_OFF):
        for trajectory in played[switches]:
            assert records(trajectory) == [None] * len(trajectory.steps)
            rewards = credited(trajectory, **switches.model_dump())
            assert rewards == [0.0] * (len(rewards) - 1) + [trajectory.outcome_reward]
            assert trajectory.outcome_reward > 0
    assert credited(played[STEPWISE][0]) == credited(played[OFF][0])


def test_decision_stepwise_emits_a_record_for_every_decision_and_the_kind_says_which_delta_is_r_t(played):
    is_reached_twice = False
    for trajectory in played[STEPWISE]:
        found = records(trajectory)
        assert [record.turn for record in found] == list(range(1, len(trajectory.steps) + 1))
        assert sum(record.unique_delta for record in found) == trajectory.outcome_reward
        for kind, name in (("unique", "unique_delta"), ("absolute", "ach_delta")):
            rewards = credited(trajectory, enabled=True, mode="decision_stepwise", kind=kind)
            assert rewards == [float(getattr(record, name)) for record in found]
        assert all(record.unique_delta <= record.ach_delta for record in found)
        is_reached_twice |= any(record.unique_delta < record.ach_delta for record in found)
    assert is_reached_twice


def test_env_sparse_has_no_decision_payload_and_uses_the_environments_rewards(played):
    for trajectory in played[SPARSE]:
        assert records(trajectory) == [None] * len(trajectory.steps)
        rewards = credited(trajectory, enabled=True, mode="env_sparse")
        assert rewards == [sum(step.env_rewards) for step in trajectory.steps]
        assert all(
            step.next_observation.reward_last_step == step.env_rewards[-1] for step in trajectory.steps
        )


def test_the_switches_change_no_episode(played):
    def story(trajectories: Sequence[Trajectory]) -> list[Any]:
        return [[(s.action_taken, s.env_rewards) for s in item.steps] for item in trajectories]

    assert all(story(played[switches]) == story(played[OFF]) for switches in SWITCHES)


def test_the_logs_show_a_non_zero_sum_of_r(trained):
    directory, reporter, _ = trained
    rows = rows_of(directory, "iteration")
    assert all(row["reward/sum"] == row["decision/unique_sum"] for row in rows)
    assert sum(row["reward/sum"] for row in rows) > 0
    assert sum(row["decision/nonzero"] for row in rows) > 0
    assert any("step_rewards_mode=decision_stepwise" in line for line in reporter.lines)


def test_mode_and_flags_are_echoed():
    job = tiny_job(training__event_rewards_kind="absolute")
    line = describe_switches(job.training, job.algorithm)
    assert line.startswith("step_rewards_enabled=true step_rewards_mode=decision_stepwise ")
    assert "event_rewards_kind=absolute" in line
