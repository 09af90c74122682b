"""The soak study in its short version: clients are killed, the task app too, and nothing is lost."""

import json

from bench import study_soak


def test_clients_and_the_task_app_are_killed_and_no_step_is_lost_or_doubled(tmp_path):
    results = tmp_path / "soak.json"
    assert study_soak.main(["--quick", "--results", str(results)]) == 0, results.read_text()
    found = json.loads(results.read_text())
    assert found["wrong"] == []
    assert all(found["holds"].values())
    assert found["counts"]["clients_killed"] > 0
    assert found["counts"]["app_killed"] > 0
    assert found["counts"]["asked_twice"] > 0
    assert found["counts"]["steps"] > 50
