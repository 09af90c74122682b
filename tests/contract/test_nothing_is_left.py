"""A run in processes whose orchestrator is killed, and a child of it at the same moment: nothing is left."""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.contract.test_cluster import SHORT
from tests.contract.test_killed_and_resumed import exact_job
from trainer_backend.job.load import dump_job
from trainer_backend.job.tables import ClusterTable

ROLES = ("learner.process", "processes.gateway_process", "processes.engine_process")


def children(process: psutil.Process) -> dict[psutil.Process, str]:
    """All processes below one, with their commands."""
    found = {}
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended, or its parent has not taken note of it
            found[child] = " ".join(child.cmdline())
    return found


def roles_of(run: int) -> tuple[dict[str, psutil.Process], dict[psutil.Process, str]]:
    """The processes of a run by role, once all are there, and all of them with their commands."""
    while True:
        family = children(psutil.Process(run))
        by_role = {role: one for role in ROLES for one, command in family.items() if role in command}
        if by_role.keys() == set(ROLES):
            return by_role, family
        time.sleep(0.02)


@pytest.mark.timeout(240)  # four processes start, three with an import of torch
def test_after_a_kill_no_process_of_a_run_is_left(tmp_path: Path):
    job = exact_job(**SHORT | {"training__iterations": 50})
    inference = job.inference.model_copy(update={"own_process": True})
    file = tmp_path / "job.toml"
    file.write_text(dump_job(job.model_copy(update={"cluster": ClusterTable(), "inference": inference})))
    command = [sys.executable, "-m", "tests.contract.cluster_run", str(file), str(tmp_path / "run"), ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert any(line == "stage: collect 2\n" for line in run.stdout)
        by_role, _ = roles_of(run.pid)
        before = [by_role[role] for role in ROLES[1:]]
        before[0].kill()  # the gateway alone; another one is started
        assert not psutil.wait_procs(before, timeout=5)[1]
        by_role, family = roles_of(run.pid)
        run.kill()
        by_role["processes.gateway_process"].kill()  # the parent of the engine
        _, alive = psutil.wait_procs(family, timeout=5)
        assert [family[one] for one in alive] == []
