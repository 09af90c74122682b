"""The study of reward modes in its 20-second version: every part runs, no figure is looked at."""

import json
import signal
import subprocess
import sys

from tests.bench.scripts import BENCH, script


def test_both_arms_start_from_one_checkpoint_and_leave_their_curves(tmp_path):
    results = tmp_path / "found.json"
    done = script("study_reward_modes.py", "--quick", "--out", tmp_path / "runs", "--results", results)
    assert done.returncode == 0, done.stderr
    found = json.loads(results.read_text())
    arms = {name: by_seed["0"] for name, by_seed in found["arms"].items()}
    assert set(arms) == {"decision_stepwise", "off"}
    for arm in arms.values():
        assert [row["iteration"] for row in arm["evaluations"]] == [0, 1, 2]
        assert [row["iteration"] for row in arm["training"]] == [1, 2]
    # the shared warm start plays the same worlds with the same seeds
    assert arms["decision_stepwise"]["evaluations"][0] == arms["off"]["evaluations"][0]
    assert found["summary"]["off"]["final"]["seeds"] == 1
    assert results.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_before_anything_is_saved_is_told_without_a_traceback(tmp_path):
    study = str(BENCH / "study_reward_modes.py")
    command = [sys.executable, study, "--quick", "--out", str(tmp_path / "runs")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "task app: " in line:  # the warm-up's episodes are about to be collected
                break
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 130, rest
    assert "the same command goes on from there" in rest
    assert "Traceback" not in rest
