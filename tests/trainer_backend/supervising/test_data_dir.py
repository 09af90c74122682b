"""The folder of a service: whose it is, which runs lie in it, what is deleted and what is not."""

from pathlib import Path

import pytest

from tests.conftest import tiny_job
from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.layout import create_run
from trainer_backend.supervising.data_dir import open_data_dir


@pytest.fixture
def data(tmp_path: Path):
    with open_data_dir(tmp_path / "runs", runs_jobs=True) as found:
        yield found


def test_a_folder_has_its_own_name_and_keeps_it(tmp_path: Path):
    with open_data_dir(tmp_path / "a", runs_jobs=True) as first:
        pass
    with (
        open_data_dir(tmp_path / "a", runs_jobs=True) as again,
        open_data_dir(tmp_path / "b", runs_jobs=True) as b,
    ):
        assert first.home == again.home != b.home


def test_one_service_at_a_time_runs_jobs_in_it_and_any_number_shows_them(data):
    with (
        pytest.raises(RunDirectoryError, match="another trainer service runs jobs"),
        open_data_dir(data.path, runs_jobs=True),
    ):
        pass
    with open_data_dir(data.path, runs_jobs=False) as beside:
        assert beside == data


def test_runs_are_found_where_the_command_line_makes_them(data):
    plain = create_run(tiny_job(), data.path / "tiny").path
    seed = create_run(tiny_job(), data.path / "tiny-seeds" / "seed_0").path
    create_run(tiny_job(), data.path / "a" / "b" / "too_deep")
    assert data.runs() == [plain, seed]
    data.forget(seed)
    assert data.runs() == [plain]


def test_two_jobs_of_one_name_get_a_folder_each(data):
    first, second = data.new_run_dir("tiny"), data.new_run_dir("tiny")
    assert first != second and first.parent == data.path


def test_a_run_directory_is_made_once_and_again_where_a_kill_left_half_of_it(data):
    path = data.new_run_dir("tiny")
    (path / "rollouts").mkdir(parents=True)
    (path / "job.toml").write_text("half")
    run = data.run_for(path, tiny_job())
    assert run.job() == tiny_job()
    assert data.run_for(path, tiny_job()) == run


def test_only_run_directories_of_its_own_are_deleted(data, tmp_path: Path):
    mine = create_run(tiny_job(), data.path / "mine").path
    other = create_run(tiny_job(), tmp_path / "other").path
    (data.path / "link").symlink_to(other)
    (data.path / "no_run").mkdir()
    for path in (other, data.path / "link", data.path / "no_run", data.path, data.path / ".." / "other"):
        with pytest.raises(RunDirectoryError, match="is no run directory in"):
            data.remove(path)
    data.remove(mine)
    data.remove(mine)  # which is gone
    assert not mine.exists() and other.exists() and (data.path / "no_run").exists()
