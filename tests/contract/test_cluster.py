"""A job with [cluster]: its learner and its gateway are killed, at last the orchestrator."""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import rows_of, train_job
from tests.contract.test_killed_and_resumed import (
    FORKED,
    actions_of,
    advantages_of,
    exact_job,
    paths,
    plan_of,
)
from tests.exact_server import exact_server
from trainer_backend.job.load import dump_job
from trainer_backend.job.tables import ClusterTable
from trainer_backend.rundir.layout import FIXED_RECORD, RunDirectory, open_run
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.rundir.spool import read_ledger
from trainer_backend.rundir.state import read_state

SHORT = {"lora": None, "training__iterations": 2, "evaluation__every_n_iters": 2}
# Half of the rollouts are of a fixed policy here. The one elsewhere is tried, and as good as never asked.
MIXED = {
    "rollout_allocation_schedule": {"type": "constant", "alpha": 0.5, "unit": "rollout"},
    "rollout__allow_truncated_sampling": True,
    "training__learning_rate_schedule": "constant",  # any number of iterations begins alike
}


pytestmark = pytest.mark.timeout(480)  # six processes start, four of them with an import of torch
ROLES = ("learner.process", "processes.gateway_process", "task_app")
# The whole run ends with its second iteration, and the other one is killed in its third.
LONGER = {"training__iterations": 50, "evaluation__every_n_iters": 2}


class Seen(NamedTuple):
    """A run of one process, and one whose processes were killed, with what was left of those."""

    whole: RunDirectory
    run: RunDirectory
    lines: list[str]
    commands: list[str]
    left: list[str]


def fixed_policies(folder: Path, url: str) -> list[dict[str, Any]]:
    elsewhere = {"name": "far", "inference_url": url, "model": "their/model-1", "weight": 1e-9}
    return [{"name": "near", "model_path": str(folder)}, elsewhere]


@pytest.fixture(scope="module")
def seen(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Its fixed policies are loaded and served by the gateway's process."""
    folder, near = tmp_path_factory.mktemp("cluster"), trained[0].checkpoints / "iteration_2"
    with exact_server(near) as server:
        keys = SHORT | FORKED | MIXED | {"rollout_only": fixed_policies(near, server.url)}
        whole, _, _ = train_job(exact_job(**keys), folder / "whole")
        mixed = exact_job(**keys | LONGER)
        job = folder / "job.toml"
        job.write_text(dump_job(mixed.model_copy(update={"cluster": ClusterTable()})))
        lines, commands, left = killed(job, folder / "run")
    return Seen(whole, open_run(folder / "run"), lines, commands, left)


def killed(job: Path, run: Path) -> tuple[list[str], list[str], list[str]]:
    """What a run told until its third iteration, its processes then, and those left after it was killed."""
    command = [sys.executable, "-m", "tests.contract.cluster_run", str(job), str(run), "update 2"]
    with (
        run.with_name("stderr").open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith("stage: collect 3,"):
                break
        family = {}
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                family[child] = " ".join(child.cmdline())
        process.kill()
        _, alive = psutil.wait_procs(family, timeout=20)
    return lines, list(family.values()), [family[one] for one in alive]


def updates(rows: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if name.partition("/")[0] in ("loss", "optim")}
        for row in rows
    ]


def test_after_a_kill_no_process_of_a_run_is_left(seen: Seen):
    for role in ROLES:
        assert any(role in command for command in seen.commands), role
    assert seen.left == []


def test_a_run_whose_learner_is_killed_in_an_update_is_the_run_of_one_process_bit_for_bit(seen: Seen):
    whole, run, lines_told = seen.whole, seen.run, seen.lines
    told = "\n".join(lines_told)
    assert lines_told[-1].endswith("torch: False"), "the orchestrator needs none"
    lost = "the learner's process has ended with SIGKILL (often the system, short of memory) in the call "
    assert lost in told and "the run goes on from its newest checkpoint (1 of 3)" in told
    assert "gateway_0 ended with SIGKILL (often the system, short of memory), and is started again" in told
    states = [line.removeprefix("learner: ") for line in lines_told if line.startswith("learner: ")]
    assert states == ["starting", "serving", "lost", "starting", "serving"]
    for number in (1, 2):
        assert plan_of(run, number) == plan_of(whole, number)
        assert actions_of(run, number) == actions_of(whole, number)
        assert advantages_of(run, number) == advantages_of(whole, number) != {}, "of continuations"
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
    assert "gateway_0: fixed policy 'far': their/model-1" in told
    state = read_state(run.path)
    assert state is not None
    processes = sorted((one.role, one.name, one.state, one.version) for one in state.processes)
    assert processes[:2] == [("gateway", "gateway_0", "serving", 2), ("learner", "learner", "serving", None)]
    rows = rows_of(run, "iteration")
    assert [row["recovery/resumes"] for row in rows] == [0.0, 1.0]
    assert updates(rows) == updates(rows_of(whole, "iteration"))
    again = [0.0, rows[1]["rollout/finished"] + rows[1]["forks/rollouts"]]
    assert [row["recovery/rollouts_reused"] for row in rows] == again, "nothing is played twice"
    assert all(row["mismatch/logprob_max"] < 1e-4 for row in rows)
