"""What the shell offers after a tab, asked as a shell asks: with the words so far in the environment."""

import os
import subprocess
import sys
from pathlib import Path

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


def test_a_shell_is_offered_commands_presets_and_estimators(tmp_path: Path):
    assert {"train", "init", "new", "report"} <= set(offered("turnwise ", tmp_path))
    assert offered("turnwise init --preset tiny-0.8", tmp_path) == ["tiny-0.8m"]
    assert offered("turnwise recredit --advantage rl", tmp_path) == ["rloo"]
    assert offered("turnwise report ", tmp_path) == [], "the shell completes paths itself"
