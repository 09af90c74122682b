"""The study of a mixture in its 20-second version: its models are made, arms run, and are told by policy."""

import json

import pytest

from tests.bench.scripts import script, value
from trainer_backend.rundir.layout import open_run


@pytest.mark.timeout(240)
def test_arms_begin_at_one_checkpoint_and_differ_in_who_samples(tmp_path):
    results, runs = tmp_path / "found.json", tmp_path / "runs"
    places = ("--out", runs, "--results", results)
    done = script("study_mixture.py", "--quick", "--arms", "alone", "good", *places)
    assert done.returncode == 0, done.stderr
    assert results.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(results.read_text())
    alone, good = (found["arms"][arm]["0"] for arm in ("alone", "good"))
    assert alone["evaluations"][0] == good["evaluations"][0], "the warm start is the same"
    assert [row["rollout/policy_choice"] for row in alone["training"]] == [1.0, 1.0]
    assert [row["mixture/alpha"] for row in good["training"]] == pytest.approx([0.25, 0.3])
    # 2 iterations of 8 episodes of 5 decisions, in which nobody dies, whoever samples
    assert found["summary"]["alone"]["decisions"] == found["summary"]["good"]["decisions"] == [80]
    assert "{good}" in " ".join(found["settings"]), "no path of this machine is kept"
    assert "reached after" in done.stdout
    assert found["locks"]["alone_hard"] == [None] * 3 and None not in found["locks"]["good"]
    fixed = open_run(runs / "seed_0" / "good").job().fixed_policies
    assert [table.model_path for table in fixed] == [runs / "good" / "checkpoints" / "iteration_0"]
    tokenizers = [folder / "tokenizer.json" for folder in (fixed[0].model_path, runs / "bad")]
    assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes()
    assert (runs / "bad" / "model.safetensors").exists()


def test_a_level_is_reached_where_an_evaluation_is_as_good_as_the_last_of_the_arm_compared_with():
    def run(*values: float) -> dict:
        evaluations = [{"iteration": 4 * i, "m": value} for i, value in enumerate(values)]
        return {"evaluations": evaluations, "training": [{"decisions": 7, "steps": 3}]}

    runs = {
        "a": {"0": run(1, 2, 3), "1": run(1, 3, 2), "2": run(1, 4)},
        "b": {"0": run(1, 3, 2), "1": run(1, 1, 1), "2": run(5, 1)},
    }
    found = value("study_results", f"s.summary({runs}, against='a', measure='m')")
    assert found["a"]["reached"] == [8, 4, 4]
    assert found["b"]["reached"] == [4, None, 0]
