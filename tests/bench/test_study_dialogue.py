"""The study of turn scores in its quick version: a real warm start, its arms, the comparison."""

import json

from tests.bench.scripts import script


def test_arms_learn_from_one_warm_start_and_are_compared(tmp_path):
    results = tmp_path / "found.json"
    places = ("--out", tmp_path / "runs", "--results", results)
    done = script("study_dialogue.py", "--quick", "--arms", "outcome", "turn_scores", *places)
    assert done.returncode == 0, done.stderr
    found = json.loads(results.read_text())
    assert list(found["arms"]) == ["outcome", "turn_scores"]
    first = [arm["0"]["evaluations"][0]["outcome_reward"] for arm in found["arms"].values()]
    assert first[0] == first[1], "one warm start"
    for arm in found["arms"].values():
        assert len(arm["0"]["interaction/score_by_turn"]) in (1, 2, 3), "turns of the last iteration"
    assert found["summary"]["turn_scores_minus_outcome"]["seeds"] == 1
    assert "sums answered right" in done.stdout
