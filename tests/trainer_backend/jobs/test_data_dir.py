"""The folder of a service: whose it is, which runs lie in it, what is deleted, and what stays when something
gets in between."""

import asyncio
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from service_kit.settings import typer_option
from tests.conftest import tiny_job
from tests.trainer_backend.jobs.rows import job
from trainer_backend.errors import RunDirectoryError
from trainer_backend.job.load import dump_job
from trainer_backend.jobs.data_dir import FORGOTTEN, SERVICE, Sweeper, forget_job, open_data_dir, sweep
from trainer_backend.jobs.settings import Settings
from trainer_backend.rundir.layout import create_run
from trainer_backend.rundir.lock import run_lock
from trainer_backend.store import jobs
from trainer_backend.store.database import JobConflict, UnknownJob
from trainer_backend.store.rows import Job


def test_a_copy_is_told_and_one_that_was_moved_is_still_itself(tmp_path: Path):
    with open_data_dir(tmp_path / "a", runs_jobs=True) as first:
        pass
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with (
        pytest.raises(RunDirectoryError, match=r"/b is a copy of .*/a, which is still there"),
        open_data_dir(tmp_path / "b", runs_jobs=True),
    ):
        pass
    with open_data_dir(tmp_path / "b", runs_jobs=False) as shown:
        assert shown.home == first.home
    (tmp_path / "b" / ".service" / "home").unlink()
    with open_data_dir(tmp_path / "b", runs_jobs=True) as second:
        assert second.home != first.home
    (tmp_path / "a").rename(tmp_path / "c")
    with open_data_dir(tmp_path / "c", runs_jobs=True) as moved:
        assert moved.home == first.home


def test_one_service_at_a_time_runs_jobs_in_it_and_any_number_shows_them(data):
    with (
        pytest.raises(RunDirectoryError, match="another trainer service runs jobs"),
        open_data_dir(data.path, runs_jobs=True),
    ):
        pass
    with open_data_dir(data.path, runs_jobs=False) as second:
        assert second == data


def test_runs_are_found_where_the_command_line_makes_them(data):
    plain = create_run(tiny_job(), data.path / "tiny").path
    seed = create_run(tiny_job(), data.path / "tiny-seeds" / "seed_0").path
    create_run(tiny_job(), data.path / "a" / "b" / "too_deep")
    assert data.runs() == [plain, seed]
    (seed / FORGOTTEN).touch()
    assert data.runs() == [plain]


def posted(path: Path, **changed):
    return job(run_dir=str(path), config=dump_job(tiny_job()), **changed)


def test_a_run_directory_is_made_once_and_again_where_a_kill_left_half_of_it(data):
    path = data.new_run_dir("tiny")
    (path / "rollouts").mkdir(parents=True)
    (path / "job.toml").write_text("half")
    run = data.prepare_run(posted(path))
    assert run.job() == tiny_job()
    assert data.prepare_run(posted(path)) == run == data.prepare_run(posted(path, run_id=run.run_id))


@pytest.mark.parametrize("name", ["checkpoints/iteration_3", "notes.txt"])
def test_what_a_kill_does_not_leave_is_not_overwritten(data, name):
    path = data.new_run_dir("tiny")
    (path / "checkpoints").mkdir(parents=True)
    (path / name).mkdir() if "/" in name else (path / name).touch()
    with pytest.raises(RunDirectoryError, match=rf"holds '{name.split('/')[0]}' and no run\.json"):
        data.prepare_run(posted(path))
    assert (path / name).exists()


def test_a_job_whose_run_is_gone_does_not_start_over(data):
    path = data.new_run_dir("tiny")
    with pytest.raises(RunDirectoryError, match="its run is not there any more"):
        data.prepare_run(posted(path, run_id="tiny.1"))
    assert not path.exists()


def test_a_job_of_a_data_directory_that_was_moved_does_not_train_in_the_old_place(data, tmp_path: Path):
    for path in (tmp_path / "old" / "tiny-1", data.path, data.path / ".." / "tiny-1"):
        with pytest.raises(RunDirectoryError, match="is not below the data directory"):
            data.prepare_run(posted(path))
    assert not (tmp_path / "old").exists()


@pytest.mark.parametrize("name", ["data_dir", "roots"])
def test_the_command_line_leaves_it_to_the_service_to_say_what_cannot_be_read(name: str):
    assert typer_option(Settings, name).readable is False


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_what_its_user_cannot_read_is_named_with_its_owner_and_the_command_that_mends_it():
    with TemporaryDirectory() as name:
        folder, other = Path(name).resolve() / "runs", 12_345
        with open_data_dir(folder, runs_jobs=True) as data:
            run = create_run(tiny_job(), data.path / "a")
        for path in (Path(name), folder, *folder.rglob("*")):
            os.chown(path, other, other)
        shutil.chown(run.path, "root")
        os.seteuid(other)
        try:
            with (
                pytest.raises(
                    RunDirectoryError,
                    match=rf"/runs/a belongs to user 0, with mode 700, and user {other}, .*"
                    rf"chown -R {other}:\d+ {folder}",
                ),
                open_data_dir(folder, runs_jobs=True),
            ):
                pass
        finally:
            os.seteuid(0)


@pytest.fixture
def row(store, data):
    run = create_run(tiny_job(), data.path / "mine")
    new = Job(name="mine", config="", home=data.home, state="paused", run_dir=str(run.path))
    return jobs.create(store, new)[0]


def test_with_its_files_it_is_gone_at_once_and_they_are_removed_later(store, data, row):
    forget_job(store, data, row, files=True)
    with pytest.raises(UnknownJob):
        jobs.get(store, row.id)
    assert not Path(row.run_dir).exists() and data.runs() == []
    (aside,) = data.aside()
    assert (aside / "run.json").exists(), "moved as a whole"
    (aside / "forgotten").unlink()  # a kill in the middle of the removal
    assert data.runs() == []
    sweep(data)
    assert data.aside() == []


def test_a_row_that_stays_keeps_its_files(store, data, row):
    with pytest.raises(JobConflict):
        forget_job(store, data, row.model_copy(update={"state": "running"}), files=True)
    jobs.change(store, row.id, lambda job: {"state": "queued"})
    with pytest.raises(JobConflict):
        forget_job(store, data, row, files=True)
    held = jobs.change(store, row.id, lambda job: {"state": "paused"})
    with run_lock(Path(row.run_dir)), pytest.raises(JobConflict, match="is being trained by process"):
        forget_job(store, data, held, files=True)
    assert (Path(row.run_dir) / "run.json").exists() and data.aside() == []


def test_nothing_is_removed_whose_row_is_being_deleted_still(store, data, row):
    aside = Path(row.run_dir).rename(data.path / SERVICE / "deleted-1")
    with run_lock(aside):
        sweep(data)
        assert data.aside() == [aside]
    sweep(data)
    assert data.aside() == []


def test_only_run_directories_of_its_own_are_deleted(store, data, row, tmp_path: Path):
    other = create_run(tiny_job(), tmp_path / "other").path
    (data.path / "link").symlink_to(other)
    (data.path / "no_run").mkdir()
    for path in (other, data.path / "link", data.path / "no_run", data.path, data.path / ".." / "other"):
        with pytest.raises(RunDirectoryError, match="is no run directory in"):
            forget_job(store, data, row.model_copy(update={"run_dir": str(path)}), files=True)
    assert jobs.get(store, row.id) == row and other.exists() and (data.path / "no_run").exists()

    # A job without a run directory is deleted all the same.
    forget_job(store, data, row.model_copy(update={"run_dir": str(data.path / "never_made")}), files=True)
    with pytest.raises(UnknownJob):
        jobs.get(store, row.id)


async def test_the_next_start_removes_what_a_killed_service_has_left(store, data, row):
    forget_job(store, data, row, files=True)
    (aside,) = data.aside()
    sweeping = asyncio.ensure_future(Sweeper(data).run())
    async with asyncio.timeout(60):
        while data.aside():
            await asyncio.sleep(0.01)
    assert not aside.exists() and not sweeping.done(), "it looks again later"
    sweeping.cancel()
    await asyncio.gather(sweeping, return_exceptions=True)
