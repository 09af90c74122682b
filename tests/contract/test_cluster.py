"""A job with [cluster]: learner and gateway are processes of their own, and one of them is killed."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import rows_of, train_job
from tests.contract.test_killed_and_resumed import actions_of, exact_job, paths, plan_of
from trainer_backend.job.load import dump_job
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.spool import read_ledger
from trainer_backend.rundir.state import read_state

SHORT = {"lora": None, "training__iterations": 2, "evaluation__every_n_iters": 2}


@pytest.mark.timeout(480)  # five processes start, each with an import of torch
def test_a_run_whose_learner_is_killed_in_an_update_is_the_run_of_one_process_bit_for_bit(tmp_path: Path):
    whole, _, _ = train_job(exact_job(**SHORT), tmp_path / "whole")
    job = tmp_path / "job.toml"
    job.write_text(dump_job(exact_job(**SHORT, cluster={"launcher": "local"})))
    command = [
        sys.executable,
        "-m",
        "tests.contract.cluster_run",
        str(job),
        str(tmp_path / "run"),
        "update 2",
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("torch: False\n"), "the orchestrator needs none"
    lost = "the learner's process has ended in the call 'update'; the last line of its log, "
    assert lost in done.stdout and "the run goes on from its newest checkpoint (1 of 3)" in done.stdout
    states = [line.removeprefix("learner: ") for line in done.stdout.splitlines() if "learner: " in line[:9]]
    assert states == ["starting", "serving", "lost", "starting", "serving"]
    run = open_run(tmp_path / "run")
    for number in (1, 2):
        assert plan_of(run, number) == plan_of(whole, number)
        assert actions_of(run, number) == actions_of(whole, number)
    for name in (
        "model.safetensors",
        "training_state/optimizer.safetensors",
        "training_state/rng.safetensors",
    ):
        ours, expected = (load_file(item.checkpoints / "iteration_2" / name) for item in (run, whole))
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[key], expected[key]) for key in expected), name
    lines, others = read_ledger(run.path), read_ledger(whole.path)
    assert [paths(line.rollout_ids) for line in lines] == [paths(line.rollout_ids) for line in others]
    state = read_state(run.path)
    assert state is not None
    processes = sorted((one.role, one.name, one.state, one.version) for one in state.processes)
    assert processes[:2] == [("gateway", "gateway_0", "serving", 2), ("learner", "learner", "serving", None)]
    rows = rows_of(run, "iteration")
    assert [row["recovery/resumes"] for row in rows] == [0.0, 1.0]
    assert [row["recovery/rollouts_reused"] for row in rows] == [0.0, 4.0], "nothing is played twice"
    assert all(row["mismatch/logprob_max"] < 1e-4 for row in rows)
