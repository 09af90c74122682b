"""What an index reads of stored rollouts: which files are a run's, and their flat columns."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer_backend.pages.hand_made import COW, WOOD, rollout
from tests.trainer_backend.store.runs import failed
from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.rollout_files import Credit, write_rollouts
from trainer_backend.rundir.rollout_index import read_credits, read_index, rollout_files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rollouts/iteration_3.parquet"
    write_rollouts(path, [rollout(1, [WOOD, COW])])
    return path


def test_files_are_a_run_s_by_their_names_in_order_of_iterations(path: Path, tmp_path: Path):
    for name in ("iteration_12", "evaluation_3", "warmup", "iteration_3_old", "iteration", "Iteration_4"):
        (path.parent / f"{name}.parquet").write_bytes(b"")
    (path.parent / "iteration_5.tmp").write_bytes(b"")
    found = [(file.stage, file.iteration, file.name.rpartition("/")[2]) for file in rollout_files(tmp_path)]
    assert found == [
        ("train", 0, "iteration.parquet"),
        ("warmup", 0, "warmup.parquet"),
        ("evaluation", 3, "evaluation_3.parquet"),
        ("train", 3, "iteration_3.parquet"),
        ("train", 12, "iteration_12.parquet"),
    ]
    assert rollout_files(tmp_path / "nowhere") == []


def test_a_row_has_the_flat_columns_and_the_sum_of_the_rewards(path: Path):
    """The numbers of rewards differ: none for a failed rollout, one that is absent, and two that add up."""
    write_rollouts(
        path,
        [rollout(1, [WOOD, COW]), failed(1), rollout(2, [()])],
        [Credit([1.0, 0.5], [0.0, 0.0])],
    )
    rows = read_index(path)
    assert [(row["rollout_id"], row["decision_count"], row["reward"]) for row in rows] == [
        ("r/g0/1/0", 2, 1.5),
        ("run/train/1/0/2", None, None),
        ("r/g0/2/0", 1, None),
    ]
    assert "rollout" not in rows[0] and "decisions" not in rows[0]


def test_credits_are_read_by_their_places_from_any_row_group(path: Path):
    write_rollouts(path, [rollout(seed, [WOOD, ()] if seed % 2 else [COW]) for seed in range(5)])
    pq.write_table(pq.read_table(path), path, row_group_size=2)
    found = read_credits(path, [4, 1, 0])  # in the order of the file
    uniques = [[decision["unique"] for decision in of] for of in found]
    assert uniques == [[["eat_cow"]], [["collect_wood"], []], [["eat_cow"]]]
    assert read_credits(path)[1] == found[1]
    assert "token_logprobs" not in found[0][0]


def test_what_an_earlier_version_did_not_write_is_none(path: Path):
    rows = pq.read_table(path).to_pylist()
    for decision in rows[0]["decisions"]:
        del decision["state_key"], decision["return_to_go"]
    pq.write_table(pa.Table.from_pylist(rows), path)
    first = read_credits(path)[0][0]
    assert (first["state_key"], first["return_to_go"], first["unique"]) == (None, None, ["collect_wood"])


def test_a_file_that_is_none_of_ours_is_told_by_name(path: Path):
    path.write_bytes(b"nothing")
    with pytest.raises(RunDirectoryError, match=r"iteration_3.parquet cannot be read"):
        read_index(path)
    pq.write_table(pa.table({"other": [1]}), path)
    with pytest.raises(RunDirectoryError, match=r"iteration_3.parquet holds no rollouts"):
        read_index(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_index(path)
