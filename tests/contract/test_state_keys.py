"""State keys from the environment to the advantage, over the real task app."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import rows_of, tiny_job, train_job, warmed_up
from trainer_backend import job_parts
from trainer_backend.credit.recredit import recredited, stored_iterations
from trainer_backend.errors import JobError
from trainer_backend.rundir.rollout_files import finished_rows


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
