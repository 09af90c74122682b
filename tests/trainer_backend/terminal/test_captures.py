"""`turnwise import`: saved captures become a run, or nothing is written."""

import json
from pathlib import Path

import pytest

from service_kit.errors import ServiceError
from tests.trainer_backend.pages.hand_made import COW, PROMPT, WOOD, rollout
from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.rollout_files import read_decisions, read_rollouts
from trainer_backend.terminal.captures import import_captures, job_of_captures


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
