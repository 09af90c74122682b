"""The fault study in its short version: a trainer is killed, and a task app, and both jobs end as if not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "study_faults.py"


@pytest.mark.timeout(240)
def test_jobs_whose_trainer_or_task_app_is_killed_end_as_if_not(tmp_path: Path):
    results = tmp_path / "faults.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--out", str(tmp_path), "--results", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text())
    assert [job["wrong"] for job in found["jobs"].values()] == [[], []]
    assert (found["counts"]["trainer_killed"], found["counts"]["task_app_killed"]) == (1, 1)
    assert (found["counts"]["starts"], found["counts"]["trained"]) == (3, 2 * 2 * 8)
    again = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (again.returncode, json.loads(results.read_text())) == (0, found), "what is there is not run again"
