"""The learning studies: their jobs load, arms are paired by seed, and two run in their short version."""

import dataclasses
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench import studies, study_results, study_runs
from bench.kit import ROOT
from bench.study_results import Study
from bench.study_truth import rescored
from trainer_backend import job_parts
from trainer_backend.collect.plan import Inference
from trainer_backend.core.truth import Departures, TrueAdvantage, measure_noise
from trainer_backend.job.load import load_job
from trainer_backend.plugins import ESTIMATORS
from trainer_backend.run.beginning import Stopped

STUDIES = tuple(studies.NAMES.values())
# An iteration of 40 decisions, and a warm start that has seen next to nothing.
TINY = ("warmup.episodes=8", "warmup.epochs=1", "evaluation.instances=2", "training.threads=1")


def run(*values: float) -> dict[str, Any]:
    """The curve of an arm that was evaluated every 4 iterations."""
    evaluations = [{"iteration": 4 * i, "m": value} for i, value in enumerate(values)]
    return {"evaluations": evaluations, "training": [{"decisions": 7, "steps": 3}], "iteration_s": 1.5}


def summary(runs: dict[str, Any]) -> dict[str, Any]:
    return study_results.summary(runs, against="a", measure="m")


def test_arms_start_from_one_checkpoint_and_one_that_is_run_later_only_adds(tmp_path: Path, services: str):
    quick = (*studies.CREDIT.quick, *TINY, "training.iterations=1", services)
    shorter = dataclasses.replace(studies.CREDIT, quick=quick)

    def study(arm: str) -> dict[str, Any]:
        results = tmp_path / "credit.json"
        words = ("--quick", "--arms", arm, "--out", str(tmp_path / "runs"), "--results", str(results))
        assert study_runs.main(shorter, words) == 0
        assert results.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        return json.loads(results.read_text())

    before, found = study("grpo"), study("branch")
    assert found["arms"]["grpo"] == before["arms"]["grpo"]
    grpo, branch = (found["arms"][arm]["0"] for arm in ("grpo", "branch"))
    # the shared warm start plays the same worlds with the same seeds
    assert grpo["evaluations"][0] == branch["evaluations"][0]
    assert [row["iteration"] for row in grpo["evaluations"]] == [0, 1]
    assert [row["iteration"] for row in grpo["training"]] == [1]
    # 8 episodes, in which no player dies within 5 decisions
    assert found["summary"]["grpo"]["decisions"] == [40]
    # 2 of the turns 2 to 5 have 2 branches each, of 2.5 decisions on average: as many again, twice
    assert found["summary"]["branch"]["decisions"][0] / (20 * 5) == pytest.approx(3.0, rel=0.15)
    assert found["summary"]["branch_minus_grpo"]["seeds"] == 1

    def elsewhere(
        *further: str, study: Study = studies.CREDIT, earlier: dict[str, Any] = found
    ) -> dict[str, Any]:
        """The arms that are collected on another machine."""
        settings = (*found["settings"], *further)
        return study_results.collect(study, tmp_path / "elsewhere", settings, earlier)["arms"]

    assert elsewhere() == found["arms"], "of a machine where nothing has run"
    assert elsewhere("training.learning_rate=1") == {}
    runs = {"grpo": {"0": {name: item for name, item in grpo.items() if name != "machine"}}}
    old = elsewhere(earlier={**found, "arms": {**found["arms"], **runs}, "machine": "of an older file"})
    assert old["grpo"]["0"]["machine"] == "of an older file"
    assert old["branch"] == found["arms"]["branch"]
    shutil.copytree(tmp_path / "runs" / "seed_0" / "grpo", tmp_path / "elsewhere" / "seed_0" / "grpo")
    assert elsewhere().keys() == {"grpo"}, "arms that share a warm start are of one machine"
    assert elsewhere(study=dataclasses.replace(studies.CREDIT, from_the_start=True)) == found["arms"]


def test_a_mixture_makes_its_models_and_names_no_path_of_this_machine(tmp_path: Path, services: str):
    study = studies.MIXTURE
    assert study.models is studies.fixed_policies
    settings = (*study.quick, *TINY, "warmup.episodes=1", services)
    made = studies.fixed_policies(study, tmp_path, settings)
    assert made == {"good": str(tmp_path / "good/checkpoints/iteration_0"), "bad": str(tmp_path / "bad")}
    tokenizers = [Path(folder, "tokenizer.json").read_bytes() for folder in made.values()]
    assert tokenizers[0] == tokenizers[1]
    weights = [Path(folder, "model.safetensors").read_bytes() for folder in made.values()]
    assert len(weights[0]) == len(weights[1]) and weights[0] != weights[1]
    for arm in ("good", "bad"):
        switches = (*settings, *study_runs.named(study.arms[arm].switches, made))
        job = study_runs.arm_job(study, study_runs.named(switches, made), tmp_path / "warm")
        assert [table.model_path for table in job.fixed_policies] == [Path(made[arm])]
    found = study_results.collect(study, tmp_path, study.quick, {})
    assert str(tmp_path) not in json.dumps(found)


def test_a_stop_before_anything_is_saved_is_told_without_a_traceback(tmp_path: Path, capsys):
    def stopped(*_: object) -> dict[str, str]:
        raise Stopped("before anything was played")

    study = dataclasses.replace(studies.REWARD_MODES, models=stopped)
    assert study_runs.main(study, ["--quick", "--out", str(tmp_path)]) == 130
    assert "the same command goes on from there" in capsys.readouterr().out


def test_the_job_of_every_arm_of_every_study_loads():
    for study in STUDIES:
        assert study.against in study.arms
        for settings in (study.settings, study.quick):
            for arm in study.arms.values():
                load_job(ROOT / study.job, [*settings, *arm.switches])


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


def test_all_estimators_may_sample_about_as_many_decisions_and_take_as_many_steps():
    study = studies.CREDIT
    # `dr_grpo` is `grpo_no_std` with another aggregation.
    assert {*ESTIMATORS} - {*study.arms} == {"dr_grpo"}
    for arm, table in study.arms.items():
        job = load_job(ROOT / study.job, [*study.settings, *table.switches]).config
        requests = job_parts.planner(job, "run", Inference("http://127.0.0.1:9", "m", None)).training(1)
        longest, forks = job.rollout.max_turns, job.algorithm.branches_per_episode
        # where every episode lasts, and a continuation has half of it left
        whole = len(requests) * longest
        sampled = whole
        if arm.startswith("branch"):
            sampled += len(requests) * forks * job.algorithm.branch_rollouts * longest / 2
        trained = sampled if job.algorithm.train_branches else whole
        iterations = job.training.iterations - (arm.startswith("gae") and job.training.critic_warmup)
        assert sampled == pytest.approx(3200, rel=0.1), arm
        steps = iterations * trained / job.training.batch_decisions
        assert steps == pytest.approx(15 * 3200 / 256, rel=0.1), arm


RESULTS = ROOT / "bench" / "results" / "truth.json"


def test_figures_follow_from_the_decisions():
    truths = [
        TrueAdvantage(f"r{n}", 1, 0.0, float(n % 2), 0.25, None, 4, 0, 2, 9, Departures(16, 8.0, 2, 1.0))
        for n in range(4)
    ]
    columns = {name: [asdict(item)[name] for item in truths] for name in asdict(truths[0])}
    seed = json.loads(RESULTS.read_text(encoding="utf-8"))["whole"]["seeds"]["0"]
    advantages = {"gae": [1.0, 2.0, 3.0, 4.0], "gae, lambda 0": [0.0, 2.0, 0.0, 2.0]}
    groups = {item.rollout_id: "a" for item in truths}
    found = rescored(seed, {"truths": columns, "advantages": advantages, "groups": groups})
    assert found["noise"] == {**asdict(measure_noise(truths)), "ratio": measure_noise(truths).ratio}
    # T is 0 or 1: variance 0.25, of which 0.0625 is noise; A, twice T, has std 1
    other = found["estimators"]["gae, lambda 0"]
    assert (other["correlation"], other["std"]) == (pytest.approx(1.0), 1.0)
    assert other["unbiased"] == pytest.approx(0.1875 / 0.5)
    assert other["gradient_cosine"] == seed["estimators"]["gae, lambda 0"]["gradient_cosine"]
