"""A job with [cluster]: its learner and its gateway are killed, at last the orchestrator.

With `launcher = "external"` another program starts the learner, and starts it again.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.conftest import ListReporter, at_the_task_app, free_port, rows_of, train_job
from tests.contract.test_killed_and_resumed import FORKED, assert_equal_runs, exact_job
from tests.exact_server import exact_server
from trainer_backend.job.load import dump_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import ClusterTable
from trainer_backend.learner.calls import LEARNER_KEY
from trainer_backend.rundir.layout import FIXED_RECORD, RunDirectory, create_run, open_run
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.rundir.state import read_state
from trainer_backend.start import run_job

Keys = dict[str, Any]

pytestmark = pytest.mark.timeout(480)  # six processes start, four of them with an import of torch
ROLES = ("learner.process", "processes.gateway_process", "task_app")


@pytest.fixture(scope="module")
def keys(trained: Any) -> Iterator[Keys]:
    """Overrides of the job: half of its rollouts are of a fixed policy that the gateway's process serves.

    The policy elsewhere is tried, and as good as never asked.
    """
    near = trained[0].checkpoints / "iteration_2"
    with exact_server(near) as server:
        yield {
            **FORKED,
            "lora": None,
            "training__iterations": 2,
            "evaluation__every_n_iters": 2,
            "rollout_only": [
                {"name": "near", "model_path": str(near)},
                {"name": "far", "inference_url": server.url, "model": "their/model-1", "weight": 1e-9},
            ],
            "rollout_allocation_schedule": {"type": "constant", "alpha": 0.5, "unit": "rollout"},
            "rollout__allow_truncated_sampling": True,
            "training__learning_rate_schedule": "constant",  # any number of iterations begins alike
        }


@pytest.fixture(scope="module")
def whole(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The run of one process."""
    return train_job(exact_job(**keys), tmp_path_factory.mktemp("whole") / "run")[0]


class Seen(NamedTuple):
    """A killed run, what it told, which processes it had, and which of them were left."""

    run: RunDirectory
    lines: list[str]
    commands: list[str]
    left: list[str]


@pytest.fixture(scope="module")
def seen(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Killed in its third iteration; the whole run ends with its second one."""
    folder = tmp_path_factory.mktemp("cluster")
    job, run = folder / "job.toml", folder / "run"
    longer = exact_job(**keys | {"training__iterations": 50})
    job.write_text(dump_job(longer.model_copy(update={"cluster": ClusterTable()})))
    command = [sys.executable, "-m", "tests.contract.cluster_run", str(job), str(run), "update 2"]
    with (
        (folder / "stderr").open("w") as errors,
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
    return Seen(open_run(run), lines, list(family.values()), [family[one] for one in alive])


def assert_run_of_one_process(run: RunDirectory, whole: RunDirectory) -> None:
    """Its learner was lost in the second update, and nothing was played twice."""
    assert_equal_runs(run, whole)
    found, expected = (
        [
            {name: value for name, value in row.items() if name.partition("/")[0] in ("loss", "optim")}
            for row in rows_of(one, "iteration")
        ]
        for one in (run, whole)
    )
    assert found == expected
    rows = rows_of(run, "iteration")
    again = [0.0, rows[1]["rollout/finished"] + rows[1]["forks/rollouts"]]
    assert [row["recovery/rollouts_reused"] for row in rows] == again


def test_after_a_kill_no_process_of_a_run_is_left(seen: Seen):
    for role in ROLES:
        assert any(role in command for command in seen.commands), role
    assert seen.left == []


def test_a_run_whose_learner_is_killed_in_an_update_is_the_run_of_one_process_bit_for_bit(
    seen: Seen, whole: RunDirectory
):
    run, told = seen.run, "\n".join(seen.lines)
    assert seen.lines[-1].endswith("torch: False"), "the orchestrator needs none"
    lost = "the learner's process has ended with SIGKILL (often the system, short of memory) in the call "
    assert lost in told and "the run goes on from its newest checkpoint (1 of 3)" in told
    assert "gateway_0 ended with SIGKILL (often the system, short of memory), and is started again" in told
    states = [line.removeprefix("learner: ") for line in seen.lines if line.startswith("learner: ")]
    assert states == ["starting", "serving", "lost", "starting", "serving"]
    assert_run_of_one_process(run, whole)
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
    assert all(row["mismatch/logprob_max"] < 1e-4 for row in rows)


class Node(ListReporter):
    """Starts a learner as a scheduler does, with a closed standard input and in another folder.

    It does so each time that the run waits for one, and kills it once, in the update of iteration 2.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._port, self._kills = folder, free_port(), 1
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def say(self, text: str) -> None:
        super().say(text)
        if text.startswith("waiting for the learner"):
            with (self._folder / "node.log").open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "trainer_backend.learner.process", "--port", str(self._port)],
                    cwd=self._folder, env=os.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip

    def stage(self, name: str, done: int, total: int) -> None:
        if name == "update 2" and self._kills:
            self._kills = 0
            self.kill()

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setenv(LEARNER_KEY, "of-both-sides")
    learner = Node(tmp_path)
    yield learner
    learner.kill()


def test_a_learner_of_somebody_else_that_goes_and_comes_back_gives_the_run_of_one_process(
    keys: Keys, whole: RunDirectory, node: Node, tmp_path: Path
):
    document = exact_job(**keys).model_dump(mode="json", exclude_defaults=True)
    table = {"cluster": {"launcher": "external"}, "learner": {"url": node.url}}
    job = at_the_task_app(JobConfig.model_validate({**document, **table}))
    run = create_run(job, tmp_path / "run")
    asyncio.run(run_job(job, run, node, resume=False))
    lines = "\n".join(node.lines)
    assert lines.count(f"waiting for the learner at {node.url}, at most 600 s: ConnectError") == 2
    assert "the run goes on from its newest checkpoint (1 of 3)" in lines
    assert "gateway_0: fixed policy 'near': its weights are as they were loaded" in lines
    assert_run_of_one_process(run, whole)
    states = [state for _, role, state in node.processes if role == "learner"]
    assert states == ["starting", "serving", "lost", "starting", "serving"]
