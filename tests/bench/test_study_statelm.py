"""The study of context editing in its quick version: both arms warm up, learn and are compared."""

import json

from tests.bench.scripts import script


def test_each_arm_has_a_warm_start_of_its_own_and_both_are_compared(tmp_path):
    results = tmp_path / "found.json"
    done = script("study_statelm.py", "--quick", "--out", tmp_path / "runs", "--results", results)
    assert done.returncode == 0, done.stderr
    assert results.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(results.read_text())
    assert found["job"] == "configs/documents_statelm.toml"
    assert list(found["arms"]) == ["editing", "no_editing"]
    for arm in found["arms"]:
        assert (tmp_path / "runs" / "seed_0" / f"{arm}_warm" / "run.json").exists()
        rows = found["arms"][arm]["0"]["evaluations"]
        assert [row["iteration"] for row in rows] == [0, 1, 2]
        assert all(0 <= row["outcome_reward"] <= 1 for row in rows)
        assert found["summary"][arm]["before"]["mean"] == rows[0]["outcome_reward"]
    assert found["summary"]["editing_minus_no_editing"]["seeds"] == 1
    assert "success rate, held out" in done.stdout and "may not" in done.stdout
