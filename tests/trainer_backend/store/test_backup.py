"""A backup holds what is there only once, jobs and run directories; a restore gives all back, or nothing."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from tests.trainer_backend.store.runs import new_run
from trainer_backend.errors import JobError, RunDirectoryError
from trainer_backend.jobs import backup
from trainer_backend.jobs.data_dir import open_data_dir
from trainer_backend.store import jobs
from trainer_backend.store.database import open_store
from trainer_backend.store.rows import Job


def filled(folder: Path, url: str):
    """A data directory with a posted job and its run, a run of a sweep, and a job that has no run yet."""
    with open_data_dir(folder, runs_jobs=True) as data:
        store = open_store(url)
        run = new_run(data.path / "a-1")
        run.metrics_file.write_text('{"iteration": 1}\n')
        new_run(data.path / "b-seeds" / "seed_0")
        (run.path / ".state.json.tmp").write_text("half")
        (run.path / "lock").write_text("{}")
        given = {"run_dir": str(run.path), "run_id": run.run_id, "tags": {"k": "v"}}
        first, _ = jobs.create(store, Job(name="a", config='x = "é"', home=data.home, **given))
        jobs.transition(store, first, state="running", started=store.clock())
        jobs.create(store, Job(name="c", config="", home=data.home, idempotency_key="one", body_hash="h"))
        jobs.create(store, Job(name="of another service", config="", home="elsewhere"))
        store.close()
    return run.path


def archive_of(folder: Path, url: str) -> io.BytesIO:
    archive = io.BytesIO()
    assert backup.back_up(folder, url, archive) == (2, 2)
    archive.seek(0)
    return archive


def test_what_was_backed_up_is_there_again_in_another_folder_and_database(tmp_path: Path, url: str):
    old = filled(tmp_path / "old", f"sqlite:///{tmp_path}/old.db")
    archive = archive_of(tmp_path / "old", f"sqlite:///{tmp_path}/old.db")
    new = tmp_path / "new"
    assert backup.restore(new, url, archive) == (2, 2)

    def files(folder: Path) -> set[Path]:
        found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        return {path for path in found if path.parts[0] != ".service"}

    kept = {path for path in files(old.parent) if path.name not in ("lock", ".state.json.tmp")}
    assert files(new) == kept
    assert all((new / name).read_bytes() == (old.parent / name).read_bytes() for name in kept)
    assert (new / "a-1").stat().st_mode & 0o77 == (new / "a-1" / "run.json").stat().st_mode & 0o77 == 0
    before, after = open_store(f"sqlite:///{tmp_path}/old.db"), open_store(url)
    with open_data_dir(new, runs_jobs=True) as data:
        found = {job.name: job for job in jobs.find(after).items}
        assert [job.name for job in jobs.find(after).items] == ["c", "a"], "in the order of before"
        for job in jobs.find(before).items:
            if job.home != "elsewhere":
                run_dir = None if job.run_dir is None else str(new / "a-1")
                own = {"home": data.home, "run_dir": run_dir, "number": found[job.name].number}
                expected = job.model_copy(update=own)
                assert found[job.name] == expected
        assert jobs.job_of_request(after, data.home, "one", "h") == found["c"], "a retry makes no second job"
    before.close()
    after.close()


def test_files_that_change_while_they_are_read_are_as_they_were(tmp_path: Path, monkeypatch):
    url = f"sqlite:///{tmp_path}/store.db"
    run = filled(tmp_path / "runs", url)
    add = backup._add

    def meanwhile(tar, name, *content):
        add(tar, name, *content)
        if name != backup.JOBS:
            return
        (run / "run.json.new").write_text("replaced")
        (run / "run.json.new").replace(run / "run.json")
        run.joinpath("job.toml").unlink()
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"iteration": 2}\n')

    names = (run / "run.json").read_text(), (run / "job.toml").read_text()
    killed = tmp_path / "runs" / ".service" / "backup-of-yesterday"
    killed.mkdir()
    os.utime(killed, (0, 0))
    monkeypatch.setattr(backup, "_add", meanwhile)
    with tarfile.open(fileobj=archive_of(tmp_path / "runs", url)) as tar:
        read = {
            name: tar.extractfile(f"runs/a-1/{name}").read().decode() for name in ("run.json", "job.toml")
        }
        assert tuple(read.values()) == names
        assert tar.extractfile("runs/a-1/metrics.jsonl").read().startswith(b'{"iteration": 1}\n')
    assert [path.name for path in (tmp_path / "runs" / ".service").iterdir() if path.is_dir()] == []


def tar_of(*names: str) -> io.BytesIO:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    data.seek(0)
    return data


def test_a_restore_that_is_refused_leaves_nothing_behind(tmp_path: Path):
    url, folder = f"sqlite:///{tmp_path}/store.db", tmp_path / "runs"
    filled(folder, url)
    archive = archive_of(folder, url)
    with pytest.raises(RunDirectoryError, match="holds runs, such as a-1"):
        backup.restore(folder, url, archive)
    new = tmp_path / "new"
    with pytest.raises(JobError, match=r"has job \w{32} already"):
        backup.restore(new, url, archive)
    whole = archive.getvalue()
    half = io.BytesIO(whole[: len(whole) // 2])  # the end of an archive is padding
    for broken in (half, io.BytesIO(b"no tar"), tar_of("runs/x"), tar_of(backup.JOBS, "runs/../../evil")):
        with pytest.raises(JobError, match="no archive of `turnwise backup`"):
            backup.restore(new, f"sqlite:///{tmp_path}/other.db", broken)
    assert [path.name for path in new.iterdir()] == [".service"]
    assert not (tmp_path / "evil").exists()
    store = open_store(f"sqlite:///{tmp_path}/other.db")
    assert jobs.find(store).items == ()
    store.close()
    with (
        open_data_dir(new, runs_jobs=True),
        pytest.raises(RunDirectoryError, match="another trainer service"),
    ):
        backup.restore(new, url, archive)
    with pytest.raises(RunDirectoryError, match="no data directory"):
        backup.back_up(tmp_path / "none", url, io.BytesIO())
