"""`turnwise export`, and `turnwise import` of captures: whole, or the reason is told."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from service_kit.errors import ServiceError
from shared_schemas.rollouts import Rollout
from tests.trainer_backend.pages.hand_made import COW, PROMPT, TABLE, WOOD, rollout
from tests.trainer_backend.store.runs import CREDITS, failed, new_run
from tests.trainer_backend.terminal import atif_schema
from trainer_backend.__main__ import app
from trainer_backend.errors import JobError, RunDirectoryError
from trainer_backend.rundir.layout import RunDirectory, open_run
from trainer_backend.rundir.rollout_files import read_decisions, read_rollouts, write_rollouts
from trainer_backend.terminal.captures import import_captures, job_of_captures
from trainer_backend.terminal.export import Choice, export_run


def spoken(item: Rollout, *, model: str = "", rollout_id: str) -> Rollout:
    steps = tuple(
        step.model_copy(update={"action_taken": {"type": "text", "content": "é"}})
        for step in item.trajectory.steps
    )
    trajectory = item.trajectory.model_copy(update={"steps": steps, "model": model})
    return item.model_copy(update={"trajectory": trajectory, "rollout_id": rollout_id})


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Two episodes and a failure of training, one of the warm-up, one of an evaluation."""
    found = new_run(tmp_path / "run")
    played = [
        spoken(rollout(1, [WOOD, (), COW]), model="tiny/actor", rollout_id="two"),
        spoken(rollout(2, [(), ()]), model="tiny/actor", rollout_id="none"),
    ]
    write_rollouts(found.rollouts_file("iteration_1"), [*played, failed(1)], CREDITS)
    teacher = spoken(rollout(3, [WOOD, TABLE, COW]), rollout_id="teacher")
    write_rollouts(found.rollouts_file("warmup"), [teacher])
    write_rollouts(
        found.rollouts_file("evaluation_1"), [spoken(rollout(2**30, [WOOD]), rollout_id="held out")]
    )
    return found


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def sessions(path: Path) -> list[str]:
    return list(dict.fromkeys(row["metadata"]["session_id"] for row in lines(path)))


def test_by_default_all_is_exported_but_what_measures_the_policy(run: RunDirectory, tmp_path: Path):
    told = export_run(run, tmp_path / "out/all.jsonl", Choice())
    assert sessions(tmp_path / "out/all.jsonl") == ["two", "none", "teacher"]
    assert (told.rows, told.episodes) == (3 + 2 + 3, 3)
    assert str(told) == "8 rows of 3 episodes; left out: 1 not finished (task_app_lost)"


def test_each_option_narrows(run: RunDirectory, tmp_path: Path):
    for choice, left in (
        (Choice(min_reward=2.0), ["two", "teacher"]),
        (Choice(achievements=["place_table"]), ["teacher"]),
        (Choice(achievements=["collect_wood", "eat_cow"]), ["two", "teacher"]),
        (Choice(policy="actor"), ["two", "none"]),
        (Choice(policy="openai"), ["teacher"]),
        (Choice(stages=["evaluation"]), ["held out"]),
    ):
        path = tmp_path / f"{'-'.join(left)}.jsonl"
        export_run(run, path, choice)
        assert sessions(path) == left, choice
        path.unlink()


def test_a_parquet_file_and_a_folder_hold_the_same_rows(run: RunDirectory, tmp_path: Path):
    for name in ("x.jsonl", "x.parquet", "x"):
        export_run(run, tmp_path / name, Choice())
    rows = lines(tmp_path / "x.jsonl")
    found = pq.read_table(tmp_path / "x.parquet").to_pylist()
    assert found == pq.read_table(tmp_path / "x/data/train-00000-of-00001.parquet").to_pylist()
    assert [row["metadata"] for row in found] == [row["metadata"] for row in rows]
    assert [json.loads(row["tools"]) for row in found] == [row["tools"] for row in rows]
    messages = [
        [{key: value for key, value in item.items() if value is not None} for item in row["messages"]]
        for row in found
    ]
    assert messages == [row["messages"] for row in rows]
    card = (tmp_path / "x/README.md").read_text(encoding="utf-8")
    assert "path: data/train-*" in card and "8 rows of 3 episodes" in card


def test_each_episode_is_a_file_of_atif_with_its_credit(run: RunDirectory, tmp_path: Path):
    told = export_run(run, tmp_path / "x", Choice(), form="atif")
    assert str(told) == "3 files of 3 episodes; left out: 1 not finished (task_app_lost)"
    documents = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "x").iterdir()}
    assert sorted(documents) == ["none", "teacher", "two"]
    for document in documents.values():
        atif_schema.check(document)
    credit = [item["extra"].get("advantage") for item in documents["two"]["steps"] if "extra" in item]
    assert credit == list(CREDITS[0].advantages_T)


def test_what_cannot_be_exported_is_refused(run: RunDirectory, tmp_path: Path):
    (tmp_path / "mine.jsonl").write_text("mine")
    for name, form, told in (
        ("x", "sharegpt", "--form is 'sharegpt'; known: messages, atif"),
        ("x.jsonl", "atif", r"--to is .*x.jsonl; --form atif writes a folder"),
        ("mine.jsonl", "messages", "exists; nothing is replaced"),
        ("x.csv", "messages", r"--to is .*x.csv; known"),
    ):
        with pytest.raises((JobError, RunDirectoryError), match=told):
            export_run(run, tmp_path / name, Choice(), form=form)
    with pytest.raises(JobError, match="--stage is 'training'; known: train, warmup"):
        Choice(stages=["training"])
    assert (tmp_path / "mine.jsonl").read_text() == "mine"


def test_an_export_without_a_row_leaves_nothing_and_says_why(run: RunDirectory, tmp_path: Path):
    before, told = set(tmp_path.iterdir()), "nothing to export: 0 rows of 0 episodes; left out: 3 --min-"
    for name in ("x.jsonl", "x.parquet", "x"):
        with pytest.raises(RunDirectoryError, match=told):
            export_run(run, tmp_path / name, Choice(min_reward=9.0))
    assert set(tmp_path.iterdir()) == before


def test_a_file_that_is_damaged_or_removed_meanwhile_is_named_and_not_the_one_that_is_written(run, tmp_path):
    broken = run.rollouts_file("warmup")
    broken.write_bytes(b"PAR1 but no more")
    with pytest.raises(RunDirectoryError, match=f"^{broken} cannot be read: "):
        export_run(run, tmp_path / "x.parquet", Choice())

    class Stages(tuple[str, ...]):
        def index(self, *stage: Any) -> int:
            """Asked when the files have been listed, and none was read."""
            run.rollouts_file("warmup").unlink(missing_ok=True)
            return super().index(*stage)

    with pytest.raises(RunDirectoryError, match=f"^{broken} was removed while it was exported"):
        export_run(run, tmp_path / "x.jsonl", Choice(stages=Stages(("train", "warmup"))))
    assert not (tmp_path / "x.jsonl").exists()


def test_what_a_killed_export_left_hinders_no_other(run: RunDirectory, tmp_path: Path):
    (tmp_path / ".x.tmp").mkdir()
    (tmp_path / ".x.tmp/half").write_text("")
    export_run(run, tmp_path / "x", Choice())
    assert not (tmp_path / ".x.tmp").exists()
    assert not (tmp_path / "x/half").exists()


def test_the_command_tells_what_it_wrote(run: RunDirectory, tmp_path: Path):
    to = tmp_path / "x.jsonl"
    done = CliRunner().invoke(
        app, ["export", str(run.path), "--to", str(to), "--min-reward", "1", "--stage", "train"]
    )
    assert done.exit_code == 0
    assert "3 rows of 1 episodes; left out: 1 --min-reward, 1 not finished" in " ".join(done.output.split())
    assert sessions(to) == ["two"]


def saved(folder: Path, name: str, seed: int, *decisions) -> Path:
    trajectory = json.loads(rollout(seed, list(decisions)).trajectory.model_dump_json())
    file = folder / f"{name}.json"
    file.write_text(json.dumps({"status": "ended", "trajectory": trajectory}))
    return file


def test_captures_of_one_start_are_siblings_and_are_credited_against_each_other(tmp_path):
    files = [saved(tmp_path, "a", 1, WOOD), saved(tmp_path, "b", 2, WOOD), saved(tmp_path, "c", 1, (), COW)]
    # What a model wrote is kept as it is.
    files[1].write_text(files[1].read_text().replace(PROMPT, f"{PROMPT}\\u0000"))
    path = import_captures(files, job_of_captures("mine", ["algorithm.gamma=1.0"]), tmp_path / "run").path
    run = open_run(path)
    file = run.rollouts_file("iteration_1")
    stored = read_rollouts(file)
    ids = [item.rollout_id.removeprefix(f"{run.run_id}/") for item in stored]
    assert ids == ["train/1/0/0", "train/1/1/0", "train/1/0/1"]
    assert [item.trajectory.seed for item in stored] == [1, 2, 1]
    assert stored[1].trajectory.steps[0].observation_data.messages[0].content == f"{PROMPT}\0"
    decisions = [read_decisions(file, item.rollout_id) for item in stored]
    first, _, second = [[decision["advantage"] for decision in one] for one in decisions]
    # Returns 1 and 1, 1 of one seed: an ended sibling has 0 at turn 2.
    assert (first, second) == ([0.0], [0.0, 1.0])
    assert run.job().job.name == "mine"
    with pytest.raises(
        RunDirectoryError, match="holds captures that were imported, and nothing that could be"
    ):
        run.job_with([])  # a resume would train over them


def test_what_is_no_ended_capture_is_refused_by_its_file_and_nothing_is_written(tmp_path):
    good = saved(tmp_path, "good", 1, WOOD)
    texts = {
        "open": ('{"status": "open", "calls": 1, "trajectory": null}', "is 'open' and has no trajectory"),
        "other": ('{"rollouts": []}', "holds no capture: env_name: Field required"),
        "list": ("[1]", "holds no capture: the whole"),
        "broken": ("{", "holds no JSON"),
    }
    for name, (text, sentence) in texts.items():
        file = tmp_path / name
        file.write_text(text)
        with pytest.raises(RunDirectoryError, match=name) as refused:
            import_captures([good, file], job_of_captures("mine", []), tmp_path / "run")
        assert sentence in str(refused.value)
    with pytest.raises(RunDirectoryError, match="cannot be read: No such file"):
        import_captures([tmp_path / "gone"], job_of_captures("mine", []), tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="hold the same capture"):
        import_captures([good, good], job_of_captures("mine", []), tmp_path / "run")
    needs_branches = job_of_captures("mine", ["algorithm.advantage=branch"])
    with pytest.raises(ServiceError, match="branches"):
        import_captures([good], needs_branches, tmp_path / "run")
    assert not (tmp_path / "run").exists()
