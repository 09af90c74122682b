"""What [retention] keeps: a rule that is worked by hand, and what a sync makes of it."""

from pathlib import Path

import pytest

from tests.trainer_backend.store.runs import evaluate, finish
from trainer_backend.errors import JobError, RunDirectoryError
from trainer_backend.job.load import load_job
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_index import RolloutFile
from trainer_backend.store import jobs, reads_rollouts
from trainer_backend.store.database import Store
from trainer_backend.store.retention import RetentionTable, remove_old_files
from trainer_backend.store.rows import Job
from trainer_backend.store.sync import sync_run


def test_the_newest_iterations_and_all_evaluations_stay(tmp_path: Path):
    files = [
        RolloutFile(tmp_path / f"{stage}_{iteration}", "", stage, iteration, 0, 0)
        for iteration in (1, 2, 3)
        for stage in ("train", "branches", "evaluation", "warmup", "prompts")
    ]
    for file in files:
        file.path.touch()
    rest = remove_old_files(RetentionTable(rollout_files_iterations=2), files)
    assert {file.path for file in rest} == {*tmp_path.iterdir()}
    assert {file.path.name for file in files} - {file.path.name for file in rest} == {"train_1", "branches_1"}
    assert remove_old_files(RetentionTable(rollout_files_iterations=3), rest) == rest


def test_files_of_old_iterations_are_deleted_only_where_that_is_asked(store: Store, run: RunDirectory):
    job = jobs.create(store, Job(name="a", config="", home="here"))[0].id
    for iteration in (1, 2, 3):
        finish(run, iteration)
    evaluate(run, 1, 3.0)
    sync_run(store, job, run)
    assert len(list(run.rollouts.glob("*.parquet"))) == 4
    run.replace_job(run.job().model_copy(update={"retention": RetentionTable(rollout_files_iterations=2)}))
    assert sync_run(store, job, run)
    left = {"evaluation_1.parquet", "iteration_2.parquet", "iteration_3.parquet"}
    assert {path.name for path in run.rollouts.glob("*.parquet")} == left
    assert {Path(row.file).name for row in reads_rollouts.rollouts(store, job).items} == left


def test_a_retention_that_cannot_be_read_deletes_nothing(store: Store, run: RunDirectory):
    job = jobs.create(store, Job(name="a", config="", home="here"))[0].id
    for iteration in (1, 2):
        finish(run, iteration)
    (run.path / "job.toml").write_text("[retention]\nrollout_files_iterations = 0\n")
    with pytest.raises(RunDirectoryError, match=r"job.toml: \[retention\] cannot be read"):
        sync_run(store, job, run)
    assert len(run.iteration_files()) == 2


def test_a_run_of_a_version_that_bounded_decisions_is_read_and_a_new_job_is_told_why_it_cannot(
    store: Store, run: RunDirectory, tmp_path: Path
):
    job = jobs.create(store, Job(name="a", config="", home="here"))[0].id
    text = (run.path / "job.toml").read_text().replace("[retention]", "[retention]\ndecisions_iterations = 3")
    (run.path / "job.toml").write_text(text)
    finish(run, 1)
    assert sync_run(store, job, run)
    assert run.job().retention == RetentionTable()
    (tmp_path / "new.toml").write_text(text)
    with pytest.raises(JobError, match=r"retention.decisions_iterations is not a key.*holds no decisions"):
        load_job(tmp_path / "new.toml")
