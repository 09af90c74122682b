"""Which checkpoint is the latest, which the best, and which may go."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.checkpoint_paths import (
    STATE_FILE,
    BestMark,
    best_checkpoint,
    best_mark,
    latest_checkpoint,
    link_best,
    mark_best,
    model_in,
    prune_checkpoints,
)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Iterations 0, 5, 10, 15, 20, and what must not count: a folder aside, a copy, an unfinished one."""
    folder = tmp_path / "run" / "checkpoints"
    for number in (0, 5, 10, 15, 20):
        (folder / f"iteration_{number}").mkdir(parents=True)
        (folder / f"iteration_{number}" / STATE_FILE).write_text("{}")
    for name in (".iteration_25.tmp", "iteration_5_backup"):
        (folder / name).mkdir()
        (folder / name / STATE_FILE).write_text("{}")
    return folder


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
    of_no_checkpoint = '{"checkpoint": "iteration_99", "outcome_reward": 0.5}'
    without_score = of_no_checkpoint.replace("99", "10").replace("0.5", '"x"')
    for text in (of_no_checkpoint, "", "[]", "{}", without_score):
        (checkpoints / "best.json").write_text(text)
        assert best_checkpoint(checkpoints) == checkpoints / "iteration_20"


def test_the_link_leads_to_the_best_and_before_any_mark_to_the_latest_also_in_a_run_that_is_moved(
    checkpoints: Path, tmp_path: Path
):
    link = checkpoints / "best"
    link.write_text("iteration_10\n0.5\n")  # as it was before it was a link
    assert best_mark(checkpoints) == BestMark(checkpoints / "iteration_10", 0.5)
    link.unlink()
    (checkpoints.parent / "run.json").write_text("{}")
    link_best(checkpoints)
    assert link.resolve().name == "iteration_20"
    mark_best(BestMark(checkpoints / "iteration_5", 0.5))
    checkpoints.rename(tmp_path / "moved")
    link = tmp_path / "moved" / "best"
    assert link.resolve() == tmp_path / "moved" / "iteration_5"
    assert model_in(link) == tmp_path / "moved" / "iteration_5"
    copy = shutil.copytree(tmp_path / "moved", tmp_path / "copy")  # it follows links
    mark_best(BestMark(copy / "iteration_10", 0.6))
    assert (copy / "best").resolve() == copy / "iteration_10"


def test_a_disk_without_links_has_the_mark_alone(checkpoints: Path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    mark_best(BestMark(checkpoints / "iteration_5", 0.5))
    assert best_checkpoint(checkpoints) == checkpoints / "iteration_5"
    assert not (checkpoints / "best").exists()


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
    assert names(checkpoints) == {*(f"iteration_{n}" for n in (0, 5, 15, 20)), "iteration_5_backup"}


def test_a_folder_that_cannot_be_removed_is_named(checkpoints: Path):
    (checkpoints / "iteration_1").write_text("a file, which rmtree refuses")
    with pytest.raises(RunDirectoryError, match=r"iteration_1\.gone cannot be written"):
        prune_checkpoints(checkpoints, 1, stays=always)
