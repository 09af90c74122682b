"""`turnwise new env`: what it writes works as it is: its own tests, over HTTP, and in a training run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import rows_of
from tests.task_app.test_service_process import collected, task_app
from tests.trainer_backend.test_command_line import turnwise
from trainer_backend.errors import JobError
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.terminal.templates import write_environment

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("elsewhere")
    files = write_environment("lost_key", parent)
    names = ["src/lost_key/__init__.py", "test_lost_key.py", "job.toml", "pyproject.toml"]
    assert [str(path.relative_to(parent / "lost_key")) for path in files] == names
    return parent / "lost_key"


@pytest.fixture(scope="module")
def path(folder: Path) -> str:
    """PYTHONPATH of a Python in which the package is installed."""
    site = folder.parent / "site"
    # Without a network: setuptools is here, and the package needs nothing but Turnwise.
    options = ("-q", "--no-deps", "--no-build-isolation", "--target", str(site))
    python("-m", "pip", "install", *options, "-e", ".", cwd=folder)
    (site / "sitecustomize.py").write_text(f"import site; site.addsitedir({str(site)!r})")
    return f"{ROOT}{os.pathsep}{site}"


def python(*arguments: str, cwd: Path, path: str = str(ROOT)) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=200,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_environment_teacher_frame_and_test_are_80_lines_of_code(folder: Path):
    texts = [file.read_text() for file in folder.rglob("*.py")]
    assert sum(bool(line.strip()) for text in texts for line in text.splitlines()) <= 80


def test_its_own_tests_pass_and_hold_the_contract(folder: Path):
    told = python("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder)
    assert "14 passed" in told  # thirteen of the contract, one of its own


def test_it_is_served_and_plays_a_random_episode_with_its_frames_over_http(path: str):
    request = {
        "rollout_id": "a",
        "run_id": "r",
        "start": {"seed": 5},
        "env": {"env_name": "lost_key", "config": {"length": 4}},
        "policy": {"policy_name": "random", "config": {"seed": 1, "max_actions": 1}},
        "step_rewards": {"enabled": True, "mode": "decision_stepwise"},
        "limits": {"max_decisions": 500},
    }
    with task_app(PYTHONPATH=path) as (_, client):
        made = client.post("/env/create", json={"env_name": "lost_key", "seed": 3}).json()
        assert made["observation"]["achievements_counts"] == {"take_key": 0, "open_door": 0}
        frame = client.get(f"/env/{made['env_id']}/frame", params={"width": 48})
        assert (frame.status_code, frame.headers["content-type"]) == (200, "image/png")
        assert client.post("/rollouts", json={"rollouts": [request]}).status_code == 202
        played = collected(client, 1)["a"]
    trajectory = played["trajectory"]
    assert (trajectory["terminated"], trajectory["outcome_reward"]) == (True, 2.0)
    records = [step["metadata"]["decision_rewards"] for step in trajectory["steps"]]
    assert [record["unique"] for record in records if record["unique"]] == [["take_key"], ["open_door"]]
    assert not any(step["step_info"]["invalid_reason"] for step in trajectory["steps"])


def test_its_job_trains_also_from_the_parent_folder_which_has_a_folder_of_its_name(folder, path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", path)
    small = (
        "training.iterations=1", "training.group_size=2", "rollout.episodes_per_batch=4",
        "rollout.max_turns=3", "warmup.episodes=8", "evaluation.instances=2", "training.threads=1",
        'rollout.state_keys=["place"]',
    )  # fmt: skip
    changed = [word for setting in small for word in ("--set", setting)]
    done = turnwise(
        "train", "lost_key/job.toml", "--run", "lost_key/run", "--no-report", *changed, cwd=folder.parent
    )
    assert done.returncode == 0, done.stderr
    assert "1 iterations done" in done.stdout
    run = open_run(folder / "run")
    assert [row["iteration"] for row in rows_of(run, "evaluation")] == [0, 1]
    stored = read_rollouts(run.rollouts_file("iteration_1"))
    assert {item.trajectory.env_name for item in stored} == {"lost_key"}
    assert all(
        "place" in step.observation_data.state_keys for item in stored for step in item.trajectory.steps
    )


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path):
    (tmp_path / "maze").mkdir()
    with pytest.raises(JobError, match="maze is there already; nothing was written"):
        write_environment("maze", tmp_path)
    assert list((tmp_path / "maze").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Lost-Key", r"a letter first\. Did you mean 'lost_key'\?$"),
        ("3d", r"a letter first\. Did you mean 'd'\?$"),
        ("class", "a letter first$"),
        ("", "a letter first$"),
        ("json", "there is a module 'json' already"),
        ("sokoban", "'sokoban' is an environment of Turnwise"),
        ("body", "makes the class Body, and src/body/__init__.py uses this name already"),
        ("tool_request", "makes the class ToolRequest, and test_tool_request.py uses this name"),
        ("none", "makes a class that Python does not allow"),
    ],
)
def test_a_name_that_cannot_be_imported_or_means_something_else_already_is_refused(tmp_path, name, reason):
    with pytest.raises(JobError, match=reason):
        write_environment(name, tmp_path)
    assert list(tmp_path.iterdir()) == []
