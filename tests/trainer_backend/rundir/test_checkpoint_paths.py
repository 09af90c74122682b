"""Which checkpoint is the latest, which the best, and which may go."""

import os
from pathlib import Path

import pytest

from tests.trainer_backend.rundir.disk import full_disk
from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.checkpoint_paths import (
    STATE_FILE,
    BestMark,
    best_checkpoint,
    best_mark,
    latest_checkpoint,
    mark_best,
    prune_checkpoints,
)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Iterations 0, 5, 10, 15, 20, and what must not count: a folder aside, a copy, an unfinished one."""
    for number in (0, 5, 10, 15, 20):
        (tmp_path / f"iteration_{number}").mkdir()
        (tmp_path / f"iteration_{number}" / STATE_FILE).write_text("{}")
    for name in (".iteration_25.tmp", "iteration_5_backup"):
        (tmp_path / name).mkdir()
        (tmp_path / name / STATE_FILE).write_text("{}")
    return tmp_path


def always(iteration: int) -> bool:
    return True


def names(checkpoints: Path) -> set[str]:
    return {path.name for path in checkpoints.glob("iteration_*")}


def test_the_latest_is_the_highest_number_that_is_finished(checkpoints: Path, tmp_path: Path):
    (checkpoints / "iteration_100").mkdir()
    found = latest_checkpoint(checkpoints)
    assert found is not None and found.name == "iteration_20"  # as numbers: not "5"
    assert latest_checkpoint(tmp_path / "none") is None


def test_the_best_is_what_was_marked_and_else_the_latest(checkpoints: Path):
    assert best_checkpoint(checkpoints) == checkpoints / "iteration_20"
    mark_best(BestMark(checkpoints / "iteration_5", 0.5))
    mark_best(BestMark(checkpoints / "iteration_10", 0.5))
    assert best_checkpoint(checkpoints) == checkpoints / "iteration_10"
    assert best_mark(checkpoints) == BestMark(checkpoints / "iteration_10", 0.5)
    for of_no_checkpoint in ("iteration_99\n0.5\n", "", "iteration_10\n", "iteration_10\nhigh\n"):
        (checkpoints / "best").write_text(of_no_checkpoint)
        assert best_checkpoint(checkpoints) == checkpoints / "iteration_20"


def test_pruning_keeps_the_newest_the_best_the_first_and_what_is_not_ours(checkpoints: Path):
    mark_best(BestMark(checkpoints / "iteration_5", 0.5))
    prune_checkpoints(checkpoints, 1, stays=always)
    assert names(checkpoints) == {"iteration_0", "iteration_5", "iteration_20", "iteration_5_backup"}


def test_what_was_only_made_for_a_resume_goes_when_a_newer_one_is_there_and_is_not_counted(tmp_path: Path):
    for number in range(13):
        (tmp_path / f"iteration_{number}").mkdir()
        (tmp_path / f"iteration_{number}" / STATE_FILE).write_text("{}")
    prune_checkpoints(tmp_path, 2, stays=lambda iteration: iteration % 5 == 0)
    assert names(tmp_path) == {"iteration_0", "iteration_5", "iteration_10", "iteration_12"}


def test_a_removal_that_was_killed_leaves_no_checkpoint_behind_and_is_finished_by_the_next(checkpoints: Path):
    os.rename(checkpoints / "iteration_10", checkpoints / ".iteration_10.gone")
    prune_checkpoints(checkpoints, 9, stays=always)
    assert not list(checkpoints.glob(".*.gone"))
    assert names(checkpoints) == {
        "iteration_0",
        "iteration_5",
        "iteration_15",
        "iteration_20",
        "iteration_5_backup",
    }


def test_a_full_disk_leaves_the_best_as_it_was(checkpoints: Path):
    mark_best(BestMark(checkpoints / "iteration_5", 0.5))
    with full_disk(), pytest.raises(RunDirectoryError, match="best cannot be written"):
        mark_best(BestMark(checkpoints / "iteration_20", 0.5))
    assert best_checkpoint(checkpoints) == checkpoints / "iteration_5"


def test_a_folder_that_cannot_be_removed_is_named(checkpoints: Path):
    (checkpoints / "iteration_1").write_text("a file, which rmtree refuses")
    with pytest.raises(RunDirectoryError, match=r"iteration_1\.gone cannot be written"):
        prune_checkpoints(checkpoints, 1, stays=always)
