"""The learning studies: their jobs load, arms are paired by seed, and two run in their short version."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.scripts import BENCH, module, script
from trainer_backend.collect.plan import Inference, Planner
from trainer_backend.job import load_job
from trainer_backend.rundir.layout import open_run

STUDIES = ("study_credit", "study_dialogue", "study_mixture", "study_reward_modes", "study_statelm")
WHOLE_EPISODES = {"grpo", "stepwise", "gigpo", "gae"}


def run(*values: float) -> dict[str, Any]:
    """The curve of an arm that was evaluated every 4 iterations."""
    evaluations = [{"iteration": 4 * i, "m": value} for i, value in enumerate(values)]
    return {"evaluations": evaluations, "training": [{"decisions": 7, "steps": 3}]}


def summary(runs: dict[str, Any]) -> dict[str, Any]:
    return module("study_results").summary(runs, against="a", measure="m")


def test_arms_start_from_one_checkpoint_and_one_that_is_run_later_only_adds(tmp_path: Path):
    def study(arm: str) -> dict[str, Any]:
        results = tmp_path / "credit.json"
        places = ("--out", tmp_path / "runs", "--results", results)
        done = script("study_credit.py", "--quick", "--arms", arm, *places)
        assert done.returncode == 0, done.stderr
        assert results.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        return json.loads(results.read_text())

    before, found = study("grpo"), study("branch")
    assert found["arms"]["grpo"] == before["arms"]["grpo"]
    grpo, branch = (found["arms"][arm]["0"] for arm in ("grpo", "branch"))
    # the shared warm start plays the same worlds with the same seeds
    assert grpo["evaluations"][0] == branch["evaluations"][0]
    assert [row["iteration"] for row in grpo["evaluations"]] == [0, 1, 2]
    assert [row["iteration"] for row in grpo["training"]] == [1, 2]
    # 2 iterations of 8 episodes, in which nobody dies within 5 decisions
    assert found["summary"]["grpo"]["decisions"] == [80]
    # 2 of the turns 2 to 5 have 2 branches each, of 2.5 decisions on average: as many again, twice
    assert found["summary"]["branch"]["decisions"][0] / (2 * 20 * 5) == pytest.approx(3.0, rel=0.15)
    assert found["summary"]["branch_minus_grpo"]["seeds"] == 1


@pytest.mark.timeout(240)
def test_a_study_of_a_mixture_makes_its_models_and_names_no_path_of_this_machine(tmp_path: Path):
    results, runs = tmp_path / "found.json", tmp_path / "runs"
    done = script("study_mixture.py", "--quick", "--arms", "good", "--out", runs, "--results", results)
    assert done.returncode == 0, done.stderr
    found = json.loads(results.read_text())
    training = found["arms"]["good"]["0"]["training"]
    assert [row["mixture/alpha"] for row in training] == pytest.approx([0.25, 0.3])
    assert "{good}" in " ".join(found["settings"])
    assert found["locks"]["alone_hard"] == [None] * 3 and None not in found["locks"]["good"]
    fixed = open_run(runs / "seed_0" / "good").job().fixed_policies
    assert [table.model_path for table in fixed] == [runs / "good" / "checkpoints" / "iteration_0"]
    tokenizers = [folder / "tokenizer.json" for folder in (fixed[0].model_path, runs / "bad")]
    assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes()
    assert (runs / "bad" / "model.safetensors").exists()


def test_ctrl_c_before_anything_is_saved_is_told_without_a_traceback(tmp_path: Path):
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


def test_the_job_of_every_arm_of_every_study_loads():
    for study in (module(name).STUDY for name in STUDIES):
        assert len(study.arms) > 1
        for settings in (study.settings, study.quick):
            for arm in study.arms.values():
                load_job(BENCH.parent / study.job, [*settings, *arm.switches])


def test_the_difference_to_an_arm_is_paired_by_seed():
    found = summary(
        {
            "a": {"0": run(1, 2), "1": run(1, 3), "2": run(1)},
            "b": {"0": run(1, 5), "1": run(2, 8), "2": run(1, 9)},
        }
    )
    assert found["b_minus_a"]["mean"] == (3 + 5) / 2  # seed 2 of `a` has not got there
    assert found["b_minus_a"]["seeds"] == 2
    assert found["a"]["gain"]["mean"] == 1.5
    assert found["b"]["decisions"] == [7, 7, 7]
    assert (found["b"]["decisions_an_iteration"], found["b"]["steps_an_iteration"]) == (7, 3)


def test_a_level_is_reached_where_an_evaluation_is_as_good_as_the_last_of_the_arm_compared_with():
    found = summary(
        {
            "a": {"0": run(1, 2, 3), "1": run(1, 3, 2), "2": run(1, 4)},
            "b": {"0": run(1, 3, 2), "1": run(1, 1, 1), "2": run(5, 1)},
        }
    )
    assert found["a"]["reached"] == [8, 4, 4]
    assert found["b"]["reached"] == [4, None, 0]


def test_all_arms_may_sample_about_as_many_decisions_and_branch_trains_on_fewer():
    study, planned = module("study_credit").STUDY, {}
    for arm, table in study.arms.items():
        job = load_job(BENCH.parent / study.job, [*study.settings, *table.switches]).config
        requests = Planner(job, "run", Inference("http://127.0.0.1:9", "m", None)).training(1)
        longest, branches = job.rollout.max_turns, job.algorithm.branch_rollouts
        played_on = [longest - turn + 1 for request in requests for turn in request.snapshot_turns]
        planned[arm] = (len(requests) * longest, len(requests) * longest + branches * sum(played_on))
    # where every episode lasts: 20 of 50 decisions, and 2 * 2 branches of some 25 each, against 64 of 50
    assert set(planned) == {*WHOLE_EPISODES, "branch"}
    assert {planned[arm] for arm in WHOLE_EPISODES} == {(3200, 3200)}
    trained, sampled = planned["branch"]
    assert trained == 1000
    assert sampled / 3200 == pytest.approx(3000 / 3200, rel=0.1)
