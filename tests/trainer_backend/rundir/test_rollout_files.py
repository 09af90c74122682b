"""Rollouts on disk: what is read back is what was collected."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from shared_schemas.rollouts import RolloutFailure
from shared_schemas.trajectory import PolicyLogprobs
from tests.trainer_backend.pages.hand_made import COW, FIRST, WOOD, rollout
from trainer_backend.core.critic import ByToken
from trainer_backend.core.experts import write_experts
from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.rollout_files import (
    Credit,
    finished_rows,
    read_decisions,
    read_rollout,
    read_rollouts,
    read_token_scores,
    read_values,
    rollout_ids,
    write_rollouts,
)
from trainer_backend.rundir.rollout_index import read_credits, read_index, rollout_files

ROOT = Path(__file__).parents[3]
READERS = (
    read_rollouts,
    read_values,
    read_token_scores,
    rollout_ids,
    lambda path: read_rollout(path, FIRST[0].rollout_id),
    lambda path: read_decisions(path, FIRST[0].rollout_id),
    lambda path: finished_rows(path, ["rollout_id", "outcome_reward"]),
    read_index,
    read_credits,
)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def overwritten(path: Path) -> None:
    """As a bad disk leaves it: the footer, which says where all lies, is whole."""
    data = path.read_bytes()
    path.write_bytes(data[:4] + b"\xff" * (len(data) // 2) + data[4 + len(data) // 2 :])


def write_another_table(path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), path)


@pytest.mark.parametrize("damage", [cut_short, overwritten, write_another_table])
def test_every_reader_tells_a_damaged_file_by_its_name(tmp_path: Path, damage):
    path = tmp_path / "iteration_1.parquet"
    write_rollouts(path, FIRST)
    assert all(reader(path) is not None for reader in READERS)
    damage(path)
    for reader in READERS:
        with pytest.raises(RunDirectoryError, match=f"^{path} (cannot be read: |holds no rollouts)"):
            reader(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_index(path)


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


def test_the_experts_of_tokens_are_stored_where_an_update_may_have_learned_from_them(tmp_path: Path):
    tokens = PolicyLogprobs(
        token_ids=[5], logprobs=[-1.0], prompt_token_ids=[3], prompt_ids_reused=0, versions=[(0, 1)],
        finish_reason="stop",
        experts=write_experts(np.array([[1, 2]], np.uint16), 0),
    )  # fmt: skip
    steps = [FIRST[0].trajectory.steps[0].model_copy(update={"policy_logprobs": tokens})]
    item = FIRST[0].model_copy(
        update={"trajectory": FIRST[0].trajectory.model_copy(update={"steps": tuple(steps)})}
    )
    found = []
    for credits in (None, [Credit([1.0], [1.0])]):
        write_rollouts(tmp_path / "a.parquet", [item], credits)
        found.append(read_rollouts(tmp_path / "a.parquet")[0].trajectory.steps[0].policy_logprobs)
    assert found == [tokens.model_copy(update={"experts": None}), tokens]


def test_a_folder_of_rollouts_says_which_files_are_train_and_test(tmp_path: Path):
    def splits() -> dict[str, list[str]]:
        _, header, _ = (tmp_path / "README.md").read_text().split("---\n")
        (config,) = yaml.safe_load(header)["configs"]
        return {
            row["split"]: sorted(path.name for path in tmp_path.glob(row["path"]))
            for row in config["data_files"]
        }

    write_rollouts(tmp_path / "warmup.parquet", FIRST)
    assert not (tmp_path / "README.md").exists()
    write_rollouts(tmp_path / "iteration_0.parquet", FIRST)
    assert splits() == {"train": ["iteration_0.parquet"]}  # a split without a file makes datasets refuse all
    write_rollouts(tmp_path / "iteration_1.parquet", FIRST)
    write_rollouts(tmp_path / "evaluation_0.parquet", FIRST)
    assert splits() == {
        "train": ["iteration_0.parquet", "iteration_1.parquet"],
        "test": ["evaluation_0.parquet"],
    }


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


def test_a_critics_values_come_back_as_they_were_by_decision_or_by_token(tmp_path: Path):
    path, third = tmp_path / "a.parquet", 1.0 / 3.0
    by_decision, by_token, without = (
        rollout(seed, [WOOD, COW]).model_copy(update={"rollout_id": name})
        for seed, name in ((1, "decision"), (2, "token"), (3, "without"))
    )
    values = ByToken([[third, 2.0], [3.0]])
    credits = [
        Credit([1.0, 2.0], [0.5, -0.5], parts={"value": [third, -2.0]}),
        Credit(
            [1.0, 2.0], [0.5, -0.5], parts={"value": values.firsts_T},
            token_advantages=ByToken([[0.25, 0.75], [-0.5]]), token_values=values,
        ),
        Credit([1.0, 2.0], [0.5, -0.5]),
    ]  # fmt: skip
    write_rollouts(path, [by_decision, by_token, without, failed(FIRST[0])], credits)
    assert read_values(path) == {"decision": [third, -2.0], "token": values}
    (_, row, _) = finished_rows(path, ["decisions"])
    assert [decision["token_advantages"] for decision in row["decisions"]] == [[0.25, 0.75], [-0.5]]


def test_the_parts_of_advantages_are_stored_with_their_estimator_and_missing_ones_are_null(tmp_path: Path):
    path = tmp_path / "a.parquet"
    parts = {"return": [1.0, 0.1], "compared": [None, 3.0], "value": [0.25, 0.5]}
    item = rollout(1, [WOOD, COW])
    write_rollouts(path, [item], [Credit([1.0, 2.0], [0.5, -0.5], estimator="branch", parts=parts)])
    first, second = read_decisions(path, item.rollout_id)
    assert first["estimator"] == second["estimator"] == "branch"
    stored = [
        {name: value for name, value in decision["advantage_parts"].items() if value is not None}
        for decision in (first, second)
    ]
    assert stored == [{"return": 1.0}, {"return": 0.1, "compared": 3.0}]
    assert (first["value"], second["value"]) == (0.25, 0.5), "in its own column, where recredit reads it"


def test_the_page_of_data_sets_lists_every_column(tmp_path: Path):
    write_rollouts(tmp_path / "a.parquet", FIRST)
    schema = pq.read_schema(tmp_path / "a.parquet")
    _, _, section = (ROOT / "docs/data.md").read_text(encoding="utf-8").partition("## Columns of stored")
    table = [line for line in section.partition("\nA column")[0].splitlines() if line.startswith("| ")]
    listed = re.findall(r"`(\w+)`", "\n".join(table))
    of_decisions = [child.name for child in schema.field("decisions").type.value_type]
    assert sorted(listed) == sorted([*schema.names, *of_decisions])


def test_a_file_of_a_version_without_parts_or_critics_has_no_estimator_and_no_values(tmp_path: Path):
    path = tmp_path / "a.parquet"
    rows = [{"rollout_id": "r", "status": "finished", "decisions": [{"turn": 1, "episode_advantage": 0.5}]}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert read_decisions(path, "r") == [{"turn": 1, "episode_advantage": 0.5, "estimator": None}]
    assert read_values(path) == {}


# What an index reads of them: which files are a run's, and their flat columns.


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
        [rollout(1, [WOOD, COW]), failed(FIRST[0]), rollout(2, [()])],
        [Credit([1.0, 0.5], [0.0, 0.0])],
    )
    rows = read_index(path)
    assert [(row["rollout_id"], row["decision_count"], row["reward"]) for row in rows] == [
        ("r/g0/1/0", 2, 1.5),
        ("lost", None, None),
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
