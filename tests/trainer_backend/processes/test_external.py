"""A learner at an address: what is awaited, who may have it, and what is refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from service_kit.keys import Keys
from service_kit.server import Listener, ServerThread
from tests.conftest import ListReporter, tiny_job
from trainer_backend import job_parts
from trainer_backend.errors import JobError, LearnerBusy, LearnerFailed, LearnerLost, TrainerError
from trainer_backend.learner.calls import LEARNER_KEY, About
from trainer_backend.learner.process import Calls, create_app
from trainer_backend.learner.ranks import ALONE
from trainer_backend.learner.relay import Relay
from trainer_backend.processes.launching import LEARNER, ExternalLauncher
from trainer_backend.processes.learner_process import LearnerProcess
from trainer_backend.rundir.layout import RunDirectory


class Machine:
    """A machine with a learner's process: which files it sees, and what it was asked."""

    def __init__(self) -> None:
        self.sees_disk, self.calls = True, list[str]()

    def do(self, name: str, *arguments: Any) -> Any:
        self.calls.append(name)
        if name == "sees":
            file, text = arguments
            return self.sees_disk and Path(file).read_text() == text
        return "" if name == "plan_memory" else None


class OfAnotherRelease(Calls):
    def about(self) -> About:
        return About(version="0.0.1")


@contextmanager
def learner(machine: Machine, kind: type[Calls] = Calls, *, port: int = 0) -> Iterator[str]:
    """A learner's process on the machine; its address."""
    app = create_app(kind(Relay(ALONE, machine.do)), Keys([SecretStr("key")], variable=LEARNER_KEY))
    with ServerThread(app, Listener("127.0.0.1", port)) as url:
        yield url


def orchestrator(url: str, folder: Path, run: str = "run", *, wait_s: float = 60.0) -> LearnerProcess:
    cluster = {"launcher": "external", "wait_s": wait_s}
    job = tiny_job(cluster=cluster, learner={"url": url})
    folder.mkdir(exist_ok=True)
    return job_parts.learner_process(
        job, RunDirectory(folder, run), ListReporter(), ExternalLauncher({LEARNER: url})
    )


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEARNER_KEY, "key")


async def refused(process: LearnerProcess, kind: type[TrainerError], words: str) -> None:
    with pytest.raises(kind, match=words):
        async with process:
            raise AssertionError


async def test_a_learner_that_could_not_serve_is_refused_before_anything_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    machine = Machine()
    with learner(machine, OfAnotherRelease) as url:
        words = rf"the learner at {url} is of turnwise 0\.0\.1, and this is .* Install the same release"
        await refused(orchestrator(url, tmp_path), JobError, words)
    with learner(machine) as url:
        machine.sees_disk = False
        words = rf"machine does not see the run's directory, {tmp_path}\. .* on a disk that all machines"
        await refused(orchestrator(url, tmp_path), JobError, words)
        assert machine.calls == ["open", "sees"]
        monkeypatch.setenv(LEARNER_KEY, "another")
        await refused(orchestrator(url, tmp_path), LearnerFailed, "another key was given")
        monkeypatch.delenv(LEARNER_KEY)
        await refused(
            orchestrator(url, tmp_path), JobError, "the environment has no key: set TURNWISE_LEARNER_"
        )
    words = rf"no learner was ready at {url} within 0\.1 s \(cluster\.wait_s\): ConnectError"
    monkeypatch.setenv(LEARNER_KEY, "key")
    await refused(orchestrator(url, tmp_path, wait_s=0.1), LearnerFailed, words)
    assert not list(tmp_path.iterdir()), "nothing stays in the run's directory"


async def test_a_learner_has_one_run_at_a_time_and_the_next_once_that_has_ended(tmp_path: Path):
    machine = Machine()
    with learner(machine) as url:
        async with orchestrator(url, tmp_path / "one", "one"):
            words = "this learner works for the run 'one'; two runs would update"
            await refused(orchestrator(url, tmp_path / "two", "two"), LearnerBusy, words)
            # A later start of the same run holds its lock: the one before is gone.
            async with orchestrator(url, tmp_path / "one", "one") as later:
                assert later.plan_memory(None, []) == ""
        async with orchestrator(url, tmp_path / "two", "two"):
            pass


async def test_a_learner_that_was_restarted_between_two_calls_is_lost_and_not_taken_for_the_old_one(
    tmp_path: Path,
):
    machine = Machine()
    with learner(machine) as url:
        process = orchestrator(url, tmp_path)
        await process.__aenter__()
    port = int(url.rpartition(":")[2])
    with pytest.raises(LearnerLost, match=r"has ended in the call 'plan_memory'$"):  # its log is elsewhere
        process.plan_memory(None, [])
    with learner(machine, port=port):
        with pytest.raises(
            LearnerLost, match="has been restarted, and has lost the state from before this call"
        ):
            process.plan_memory(None, [])
        await process.__aexit__(None, None, None)
