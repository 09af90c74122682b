"""What the shell offers after a tab, asked as a shell asks: with the words so far in the environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import tiny_job
from trainer_backend.rundir.layout import create_run
from trainer_backend.terminal.telling import run_directories, settings

COMMAND = "import sys; sys.argv[0] = 'turnwise'; from trainer_backend.__main__ import main; main()"


def offered(words: str, cwd: Path) -> list[str]:
    root = str(Path(__file__).resolve().parents[3])
    asked = {
        "_TURNWISE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMMAND], cwd=cwd, capture_output=True, text=True, check=False,
        env={**os.environ, **asked, "PYTHONPATH": root},
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done.stdout.split()


def test_a_shell_is_offered_commands_presets_and_keys(tmp_path: Path):
    assert {"train", "init", "new", "report"} <= set(offered("turnwise ", tmp_path))
    assert offered("turnwise init --preset tiny-0.8", tmp_path) == ["tiny-0.8m"]
    assert offered("turnwise train --set training.learning_rate_s", tmp_path) == [
        "training.learning_rate_schedule="
    ]


def test_runs_are_offered_and_folders_to_look_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    create_run(tiny_job(), Path("runs/first"))
    create_run(tiny_job(), Path("elsewhere/second"))
    assert run_directories("") == ["elsewhere/", "runs/", "runs/first"]
    assert run_directories("elsewhere/") == ["elsewhere/second"]
    assert run_directories("runs/f") == ["runs/first"]
    assert run_directories("nowhere/x") == []


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("algorithm.advantage=grpo", ["algorithm.advantage=grpo", "algorithm.advantage=grpo_no_std"]),
        ("model.preset=", ["model.preset=tiny-0.3m", "model.preset=tiny-0.8m"]),
        ("training.learning_rate_schedule=c", [
            "training.learning_rate_schedule=cosine", "training.learning_rate_schedule=constant",
        ]),
        ("model.tool_call_format=l", ["model.tool_call_format=llama"]),
        ("training.aggregation=t", ["training.aggregation=token_mean"]),
        ("training.skip_flat_groups=t", ["training.skip_flat_groups=true"]),
        ("training.group_size=", []),
        ("no.such.key=", []),
    ],
)  # fmt: skip
def test_a_key_that_takes_names_is_followed_by_them(typed: str, names: list[str]):
    assert settings(typed) == names
