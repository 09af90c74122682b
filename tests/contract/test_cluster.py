"""A job with [cluster]: learner and gateway are processes of their own, and one of them is killed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import rows_of, train_job
from tests.contract.test_killed_and_resumed import actions_of, exact_job, paths, plan_of
from tests.exact_server import exact_server
from trainer_backend.job.load import dump_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import ClusterTable
from trainer_backend.rundir.layout import FIXED_RECORD, open_run
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.rundir.spool import read_ledger
from trainer_backend.rundir.state import read_state

SHORT = {"lora": None, "training__iterations": 2, "evaluation__every_n_iters": 2}
# Half of the rollouts are of a fixed policy here. The one elsewhere is tried, and as good as never asked.
MIXED = {
    "rollout_allocation_schedule": {"type": "constant", "alpha": 0.5, "unit": "rollout"},
    "rollout__allow_truncated_sampling": True,
}


def fixed_policies(folder: Path, url: str) -> list[dict[str, Any]]:
    elsewhere = {"name": "far", "inference_url": url, "model": "their/model-1", "weight": 1e-9}
    return [{"name": "near", "model_path": str(folder)}, elsewhere]


@pytest.mark.timeout(480)  # five processes start, each with an import of torch
def test_a_run_whose_learner_is_killed_in_an_update_is_the_run_of_one_process_bit_for_bit(
    trained: Any, tmp_path: Path
):
    """Its fixed policies are loaded and served by the gateway's process."""
    with exact_server(trained[0].checkpoints / "iteration_2") as server:
        near = trained[0].checkpoints / "iteration_2"
        _compared(exact_job(**SHORT, **MIXED, rollout_only=fixed_policies(near, server.url)), tmp_path)


def _compared(mixed: JobConfig, tmp_path: Path) -> None:
    whole, _, _ = train_job(mixed, tmp_path / "whole")
    job = tmp_path / "job.toml"
    inference = mixed.inference.model_copy(update={"own_process": True})
    job.write_text(dump_job(mixed.model_copy(update={"cluster": ClusterTable(), "inference": inference})))
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
    lost = "the learner's process has ended with SIGKILL (often the system, short of memory) in the call "
    assert lost in done.stdout and "the run goes on from its newest checkpoint (1 of 3)" in done.stdout
    assert "gateway_0 ended with exit code 1, and is started again" in done.stdout, "its engine was killed"
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
    stored = [item for number in (1, 2) for item in read_rollouts(run.rollouts_file(f"iteration_{number}"))]
    models = {item.trajectory.model for item in stored if item.trajectory is not None}
    assert models == {"tiny/actor", "tiny/near"}
    records = [(item.path / FIXED_RECORD).read_text() for item in (run, whole)]
    assert records[0] == records[1] and '"near"' in records[0]
    assert "gateway_0: fixed policy 'far': their/model-1" in done.stdout
    assert "gateway_0: fixed policy 'near': its weights are as they were loaded" in done.stdout
    state = read_state(run.path)
    assert state is not None
    processes = sorted((one.role, one.name, one.state, one.version) for one in state.processes)
    assert processes[:2] == [("gateway", "gateway_0", "serving", 2), ("learner", "learner", "serving", None)]
    rows = rows_of(run, "iteration")
    assert [row["recovery/resumes"] for row in rows] == [0.0, 1.0]
    assert [row["recovery/rollouts_reused"] for row in rows] == [0.0, 4.0], "nothing is played twice"
    assert all(row["mismatch/logprob_max"] < 1e-4 for row in rows)
