"""The study of credit in its 20-second version: arms run, and one that comes later only adds."""

import json
from pathlib import Path

import pytest

from tests.bench.scripts import BENCH, script, value
from trainer_backend.collect.plan import Inference, Planner
from trainer_backend.job import load_job

# A start of a run takes longer than its quick iterations, so the suite runs three of the five.
FIRST, LATER = ["grpo", "gae"], ["branch"]
WHOLE_EPISODES = {"grpo", "stepwise", "gigpo", "gae"}


def study(folder: Path, arms: list[str]) -> tuple[dict, str]:
    results = folder / "found.json"
    places = ("--out", folder / "runs", "--results", results)
    done = script("study_credit.py", "--quick", "--arms", *arms, *places)
    assert done.returncode == 0, done.stderr
    assert results.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return json.loads(results.read_text()), done.stdout


def test_arms_start_from_one_checkpoint_and_one_that_is_run_later_only_adds(tmp_path):
    before, _ = study(tmp_path, FIRST)
    found, told = study(tmp_path, LATER)
    assert {arm: found["arms"][arm] for arm in FIRST} == before["arms"]
    assert list(found["arms"]) == [*FIRST, *LATER]
    arms = [by_seed["0"] for by_seed in found["arms"].values()]
    # the shared warm start plays the same worlds with the same seeds
    assert all(arm["evaluations"][0] == arms[0]["evaluations"][0] for arm in arms)
    assert [row["iteration"] for row in arms[0]["training"]] == [1, 2]
    # 2 iterations of 8 episodes, in which nobody dies within 5 decisions
    decisions = {arm: found["summary"][arm]["decisions"] for arm in found["arms"]}
    assert [decisions[arm] for arm in FIRST] == [[80]] * 2
    # 2 of the turns 2 to 5 have 2 branches each, of 2.5 decisions on average: as many again, twice
    assert decisions["branch"][0] / (2 * 20 * 5) == pytest.approx(3.0, rel=0.15)
    assert found["summary"]["branch"]["decisions_an_iteration"] == decisions["branch"][0] / 2
    assert found["summary"]["grpo"]["steps_an_iteration"] > 0
    assert found["summary"]["branch_minus_grpo"]["seeds"] == 1
    assert "minus grpo" in told and "gae" in told


def test_the_difference_to_an_arm_is_paired_by_seed():
    def run(*values: float) -> dict:
        evaluations = [{"iteration": i, "m": value} for i, value in enumerate(values)]
        return {"evaluations": evaluations, "training": [{"decisions": 7, "steps": 3}]}

    runs = {
        "a": {"0": run(1, 2), "1": run(1, 3), "2": run(1)},
        "b": {"0": run(1, 5), "1": run(2, 8), "2": run(1, 9)},
    }
    found = value("study_results", f"s.summary({runs}, against='a', measure='m')")
    assert found["b_minus_a"]["mean"] == (3 + 5) / 2  # seed 2 of `a` has not got there
    assert found["b_minus_a"]["seeds"] == 2
    assert found["a"]["gain"]["mean"] == 1.5
    assert found["b"]["decisions"] == [7, 7, 7]
    assert (found["b"]["decisions_an_iteration"], found["b"]["steps_an_iteration"]) == (7, 3)


def test_all_arms_may_sample_about_as_many_decisions_and_branch_trains_on_fewer():
    of_arms = "{name: [*s.STUDY.settings, *arm.switches] for name, arm in s.STUDY.arms.items()}"
    planned = {}
    for arm, switches in value("study_credit", of_arms).items():
        job = load_job(BENCH.parent / "configs" / "crafter_cpu.toml", switches).config
        requests = Planner(job, "run", Inference("http://127.0.0.1:9", "m", None)).training(1)
        longest, branches = job.rollout.max_turns, job.algorithm.branch_rollouts
        played_on = [longest - turn + 1 for request in requests for turn in request.snapshot_turns]
        planned[arm] = (len(requests) * longest, len(requests) * longest + branches * sum(played_on))
    # where every episode lasts: 20 of 50 decisions, and 2 * 2 branches of some 25 each, against 64 of 50
    assert set(planned) == {*WHOLE_EPISODES, *LATER}
    assert {planned[arm] for arm in WHOLE_EPISODES} == {(3200, 3200)}
    trained, sampled = planned["branch"]
    assert trained == 1000
    assert sampled / 3200 == pytest.approx(3000 / 3200, rel=0.1)
