"""A learner that somebody else has started, and starts again: `[cluster] launcher = "external"`."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import ListReporter, at_the_task_app, free_port, rows_of, train_job
from tests.contract.test_cluster import MIXED, SHORT
from tests.contract.test_killed_and_resumed import FORKED, actions_of, advantages_of, exact_job, plan_of
from trainer_backend.job.schema import JobConfig
from trainer_backend.learner.calls import LEARNER_KEY
from trainer_backend.rundir.layout import create_run
from trainer_backend.start import run_job

KEY = "of-both-sides"


class Node:
    """Starts learners as a scheduler does, each with a closed standard input, in another folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self._folder / "node.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainer_backend.learner.process", "--port", str(self.port)],
                cwd=self._folder,
                env={**os.environ, LEARNER_KEY: KEY},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


@contextmanager
def node(folder: Path) -> Iterator[Node]:
    learner = Node(folder)
    try:
        yield learner
    finally:
        learner.kill()


class Restarting(ListReporter):
    """Starts the learner once the run says that it waits; kills it once, in the update of iteration 2."""

    def __init__(self, learner: Node) -> None:
        super().__init__()
        self._learner, self._kills = learner, 1

    def say(self, text: str) -> None:
        super().say(text)
        if text.startswith("waiting for the learner"):
            self._learner.start()

    def stage(self, name: str, done: int, total: int) -> None:
        if name == "update 2" and self._kills:
            self._kills = 0
            self._learner.kill()


def external(job: JobConfig, url: str, **keys: Any) -> JobConfig:
    document = {**job.model_dump(mode="json", exclude_defaults=True), "learner": {"url": url}}
    return JobConfig.model_validate({**document, "cluster": {"launcher": "external", **keys}})


def updates(rows: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if name.partition("/")[0] in ("loss", "optim")}
        for row in rows
    ]


@pytest.mark.timeout(480)  # four processes start, each with an import of torch
def test_a_learner_of_somebody_else_that_goes_and_comes_back_gives_the_run_of_one_process(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    near = {"name": "near", "model_path": str(trained[0].checkpoints / "iteration_2")}
    keys = SHORT | FORKED | MIXED | {"rollout_only": [near]}
    monkeypatch.setenv(LEARNER_KEY, KEY)
    whole, _, _ = train_job(exact_job(**keys), tmp_path / "whole")
    with node(tmp_path) as learner:
        reporter = Restarting(learner)
        job = at_the_task_app(external(exact_job(**keys), learner.url))
        run = create_run(job, tmp_path / "run")
        asyncio.run(run_job(job, run, reporter, resume=False))
    lines = "\n".join(reporter.lines)
    assert lines.count(f"waiting for the learner at {learner.url}, at most 600 s: ConnectError") == 2
    assert "the run goes on from its newest checkpoint (1 of 3)" in lines
    assert "gateway_0: fixed policy 'near': its weights are as they were loaded" in lines
    for number in (1, 2):
        assert plan_of(run, number) == plan_of(whole, number)
        assert actions_of(run, number) == actions_of(whole, number)
        assert advantages_of(run, number) == advantages_of(whole, number) != {}, "of continuations"
    ours, expected = (
        load_file(item.checkpoints / "iteration_2" / "model.safetensors") for item in (run, whole)
    )
    assert all(torch.equal(ours[key], expected[key]) for key in expected)
    rows = rows_of(run, "iteration")
    assert updates(rows) == updates(rows_of(whole, "iteration"))
    again = [0.0, rows[1]["rollout/finished"] + rows[1]["forks/rollouts"]]
    assert [row["recovery/rollouts_reused"] for row in rows] == again, "nothing is played twice"
    states = [state for _, role, state in reporter.processes if role == "learner"]
    assert states == ["starting", "serving", "lost", "starting", "serving"]
