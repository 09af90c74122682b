"""Deleting jobs: what goes, what stays, and what is left of it when something gets in between."""

import asyncio
from pathlib import Path

import pytest

from tests.conftest import tiny_job
from trainer_backend.errors import RunDirectoryError
from trainer_backend.jobs.data_dir import SERVICE, Sweeper, forget_job, sweep
from trainer_backend.rundir.layout import create_run
from trainer_backend.rundir.lock import run_lock
from trainer_backend.store import jobs
from trainer_backend.store.database import JobConflict, UnknownJob
from trainer_backend.store.rows import Job


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
