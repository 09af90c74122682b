"""A run's folder: made once, opened again, and its metrics after a crash or a full disk."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import ListReporter, tiny_job
from tests.trainer_backend.rundir.disk import full_disk
from trainer_backend.errors import JobError, RunDirectoryError
from trainer_backend.run.reporters import RecordingReporter
from trainer_backend.rundir.fixed_record import FixedWeights, begin_record
from trainer_backend.rundir.layout import RunDirectory, create_run, open_run
from trainer_backend.rundir.lock import run_lock
from trainer_backend.terminal.templates import Choices, write_job


def test_a_run_is_opened_as_it_was_made_for_its_owner_alone(run: RunDirectory):
    opened = open_run(run.path)
    assert opened == run
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert opened.job() == tiny_job()
    assert opened.run_id.startswith("tiny.")
    assert {path.name for path in opened.path.iterdir()} == {
        "job.toml", "run.json", "rollouts", "checkpoints", "lock",
    }  # fmt: skip


def test_the_job_of_a_run_may_be_changed_but_for_its_name(tmp_path: Path):
    run = create_run(tiny_job(job__name="a.b"), tmp_path / "folder")
    assert run.job_with(["training.iterations=7"]).config.training.iterations == 7
    with pytest.raises(JobError, match=r"job.name is 'a.c', and .*folder holds rollouts of 'a.b'"):
        run.job_with(["job.name=a.c"])


def test_runs_of_one_name_get_a_number_and_those_that_start_together_a_folder_each(tmp_path: Path):
    job = tiny_job(job__runs_dir=tmp_path / "runs")
    runs = [create_run(job) for _ in range(3)]
    assert [run.path.name for run in runs] == ["tiny", "tiny-2", "tiny-3"]
    with ThreadPoolExecutor(8) as pool:
        runs += pool.map(lambda _: create_run(job), range(16))
    assert len({run.path for run in runs}) == len({run.run_id for run in runs}) == 19
    for folder in (runs[0].path, runs[0].rollouts, runs[0].checkpoints):
        assert folder.stat().st_mode & 0o777 == 0o700, "its owner alone reads it"


def test_a_folder_that_holds_a_run_is_not_taken_again(run: RunDirectory, tmp_path: Path):
    with pytest.raises(RunDirectoryError, match="holds a run already; `turnwise train --resume"):
        create_run(tiny_job(job__seed=9), tmp_path / "run")
    assert run.job().job.seed == 1


def test_what_a_killed_process_left_of_a_run_that_it_was_making_is_made_again(tmp_path: Path):
    create_run(tiny_job(job__seed=9), tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    assert create_run(tiny_job(), tmp_path / "run").job() == tiny_job()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, r"holds no run \(no run\.json in it\)"),
        ("{", "cannot be read"),
        ("[]", "names no run_id"),
        ('{"format": 1}', "names no run_id"),
        ('{"run_id": "r", "format": 2}', "written in format 2; this version reads 1"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, text: str | None, told: str):
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunDirectoryError, match=told):
        open_run(tmp_path)


def test_a_run_in_which_nothing_was_done_can_be_removed(tmp_path: Path):
    run = create_run(tiny_job(), tmp_path / "runs" / "run")
    run.forget_after(-1)  # what every start does
    for log in (run.task_app_log, run.path / "task_app_1.log"):
        log.write_text("starting\n")
    RecordingReporter(run, ListReporter()).say("run directory: here")
    begin_record(run, {"fixed": FixedWeights("/runs/a", "11" * 32)})
    assert not run.remove_if_unused(with_log=False)
    with run_lock(run.path):  # another process trains it
        assert not run.remove_if_unused(with_log=True)
    assert run.remove_if_unused(with_log=True)
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["rollouts/warmup.parquet", "checkpoints/iteration_0/state.json", "metrics.jsonl", "notes.txt", "a/b"],
)
def test_a_run_that_holds_anything_of_worth_stays_whole(run: RunDirectory, name: str):
    (run.path / name).parent.mkdir(exist_ok=True)
    (run.path / name).write_text("{}")
    assert not run.remove_if_unused(with_log=True)
    assert open_run(run.path).job() == tiny_job()
    assert (run.path / name).read_text() == "{}"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="file/run cannot be written"):
        create_run(tiny_job(), tmp_path / "file" / "run")
    with pytest.raises(RunDirectoryError, match="file/tiny cannot be written"):
        create_run(tiny_job(job__runs_dir=tmp_path / "file"))


def test_what_cannot_be_written_goes_on_with_resume_only_in_a_run(run: RunDirectory, tmp_path: Path):
    with full_disk(), pytest.raises(RunDirectoryError, match=r"untouched\. With .* goes on with --resume\."):
        run.append_metrics({"kind": "iteration", "iteration": 2})
    with pytest.raises(RunDirectoryError, match=r"gone/x\.toml cannot be written: .*untouched\.$"):
        write_job(tmp_path / "gone" / "x.toml", Choices())


def test_a_resumed_run_forgets_what_it_will_do_again(run: RunDirectory):
    for iteration in (0, 1, 2, 3):
        run.append_metrics({"kind": "iteration", "iteration": iteration})
    run.forget_after(1)
    run.append_metrics({"kind": "iteration", "iteration": 2, "again": True})
    assert [(row["iteration"], "again" in row) for row in run.metrics()] == [
        (0, False), (1, False), (2, True),
    ]  # fmt: skip


def test_a_spool_that_cannot_be_removed_is_an_error_of_the_run(run: RunDirectory):
    run.spool_file("iteration_1").mkdir()
    with pytest.raises(RunDirectoryError, match=r"iteration_1\.spool\.jsonl cannot be written"):
        run.remove_spools(1)
