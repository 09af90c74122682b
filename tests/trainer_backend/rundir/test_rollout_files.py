"""Rollouts on disk: what is read back is what was collected."""

from pathlib import Path

import pytest

from shared_schemas.rollouts import RolloutFailure
from tests.trainer_backend.report.hand_made import COW, FIRST, WOOD, rollout
from tests.trainer_backend.rundir.disk import full_disk
from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.rollout_files import (
    Credit,
    finished_rows,
    read_rollout,
    read_rollouts,
    write_rollouts,
)


def failed(item):
    failure = RolloutFailure(code="inference_unavailable", detail="gone")
    return item.model_copy(
        update={"status": "failed", "trajectory": None, "failure": failure, "rollout_id": "lost"}
    )


def test_rollouts_come_back_exactly_failed_ones_too(tmp_path: Path):
    path = tmp_path / "rollouts" / "a.parquet"
    stored = [*FIRST, failed(FIRST[0])]
    write_rollouts(path, stored)
    assert read_rollouts(path) == stored
    assert read_rollout(path, "lost") == stored[2]


def test_the_flat_columns_say_what_each_decision_achieved_and_earned(tmp_path: Path):
    path = tmp_path / "a.parquet"
    stored = [rollout(7, [WOOD, COW]), failed(FIRST[0])]
    write_rollouts(path, stored, [Credit([1.0, 2.0], [0.5, -0.5])])
    (row,) = finished_rows(path, ["seed", "unique_achievements", "decisions"])
    assert (row["seed"], row["unique_achievements"]) == (7, 2)
    assert [(d["turn"], d["unique"], d["reward"], d["advantage"]) for d in row["decisions"]] == [
        (1, ["collect_wood"], 1.0, 0.5),
        (2, ["eat_cow"], 2.0, -0.5),
    ]


def test_a_full_disk_is_told_with_the_file_and_what_was_there_stays(tmp_path: Path):
    path = tmp_path / "a.parquet"
    write_rollouts(path, FIRST[:1])
    with full_disk(100), pytest.raises(RunDirectoryError, match=r"a\.parquet cannot be written"):
        write_rollouts(path, FIRST)
    assert read_rollouts(path) == list(FIRST[:1])
