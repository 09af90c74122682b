"""The notebook of the first hour runs from its first cell to its last, on a job of seconds."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trainer_backend.__main__ import app

ROOT = Path(__file__).parents[2]
CELLS = json.loads((ROOT / "examples/first_hour.ipynb").read_text(encoding="utf-8"))["cells"]
SMALL = {
    "rollout.max_turns": 6,
    "warmup.episodes": 8,
    "rollout.episodes_per_batch": 4,
    "training.group_size": 2,
    "training.iterations": 1,
    "evaluation.instances": 2,
}


def execute(cell: dict[str, Any], names: dict[str, Any], folder: Path) -> None:
    """A cell as IPython would: `%%writefile`, one `!` command with `{names}`, or Python."""
    text = "".join(cell["source"])
    if text.startswith("%%writefile "):
        first, _, rest = text.partition("\n")
        (folder / first.split()[1]).write_text(rest, encoding="utf-8")
    elif text.startswith("!"):
        program, *words = shlex.split(re.sub(r"\{(\w+)\}", lambda found: names[found[1]], text[1:]))
        assert program == "turnwise"
        answer = CliRunner().invoke(app, words)
        assert answer.exit_code == 0, answer.output
    else:
        exec(compile(text, cell["id"], "exec"), names)


@pytest.mark.usefixtures("own_boards")
def test_every_cell_runs_and_the_estimator_of_the_notebook_gives_credit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in (cell for cell in CELLS if cell["cell_type"] == "code"):
        if "sizes" in cell["metadata"].get("tags", ()):
            source = "".join(cell["source"])
            assert set(re.findall(r'"(\w+\.\w+)":', source)) == SMALL.keys()
            cell = cell | {"source": [re.sub(r"sizes = \{.*?\n\}", f"sizes = {SMALL}", source, flags=re.S)]}
        execute(cell, names, tmp_path)
    assert (tmp_path / "runs/first/report/report.html").exists()


def test_the_notebook_is_stored_without_output():
    assert all(not cell.get("outputs") for cell in CELLS)
