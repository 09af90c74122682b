"""The supervisor where something fails it: a store that hangs, a machine that refuses, a poisoned job."""

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from tests.conftest import tiny_job
from tests.trainer_backend.jobs.served import LONG_S, acted
from trainer_backend.errors import RunNotWritten
from trainer_backend.job.load import dump_job
from trainer_backend.jobs.data_dir import DataDir, open_data_dir
from trainer_backend.jobs.processes import Command
from trainer_backend.jobs.settings import SupervisorSettings
from trainer_backend.jobs.slots import wait_for_threads
from trainer_backend.jobs.supervisor import Supervisor
from trainer_backend.jobs.watcher import News, Watcher
from trainer_backend.rundir.state import read_state
from trainer_backend.store import jobs
from trainer_backend.store.database import Store, open_store, utc_now
from trainer_backend.store.rows import Job

CONFIG = dump_job(tiny_job())


@dataclass
class Clock:
    """What every change of a job asks for; where it hangs, so does the store."""

    goes: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.goes.set()

    def __call__(self) -> datetime:
        self.goes.wait()
        return utc_now()


@dataclass
class House:
    """A supervisor and what it works with."""

    store: Store
    data: DataDir
    clock: Clock
    supervisor: Supervisor
    watcher: Watcher

    def counted(self, name: str) -> float | None:
        return self.watcher.registry.get_sample_value(f"turnwise_trainer_{name}_total")

    def job(self, plays: str, *, config: str = CONFIG) -> str:
        new = Job(name=plays, config=config, home=self.data.home, run_dir=str(self.data.new_run_dir(plays)))
        return jobs.create(self.store, new)[0].id

    def row(self, job_id: str) -> Job:
        return jobs.get(self.store, job_id)

    def folder(self, job_id: str) -> Path:
        return Path(str(self.row(job_id).run_dir))

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(LONG_S):
            while not holds():
                await asyncio.sleep(0.01)

    def trains(self, job_id: str) -> bool:
        """Its process says so, and the supervisor has heard that it started: the process may be first."""
        slot, state = self.supervisor.slots.get(job_id), read_state(self.folder(job_id))
        is_started = slot is not None and slot.process is not None
        return is_started and state is not None and state.state == "training"


@asynccontextmanager
async def house(
    tmp_path: Path, settings: SupervisorSettings, command: Command = acted
) -> AsyncIterator[House]:
    clock, news = Clock(), News()
    store = open_store(f"sqlite:///{tmp_path}/store.db", clock=clock)
    with open_data_dir(tmp_path / "runs", runs_jobs=True) as data:
        watcher = Watcher(store, data, news)
        supervisor = Supervisor(store, data, news, watcher, settings, command=command)
        running = asyncio.ensure_future(supervisor.run())
        try:
            yield House(store, data, clock, supervisor, watcher)
        finally:
            clock.goes.set()
            await supervisor.close()
            await running
            await wait_for_threads([*supervisor.threads, *watcher.threads], at_most_s=LONG_S)
            store.close()


def settings(**changed: float) -> SupervisorSettings:
    given = {"max_jobs": 3, "round_s": 0.02, "first_wait_s": 0.01, "store_s": 0.5, **changed}
    return SupervisorSettings.model_validate(given)


async def test_a_process_that_is_late_is_killed_while_a_round_hangs_and_all_is_written_down_once(tmp_path):
    async with house(tmp_path, settings(stop_grace_s=1.0)) as there:
        ending, stubborn = there.job("waiting"), there.job("stubborn")
        await there.until(lambda: there.trains(ending) and there.trains(stubborn))
        process = there.supervisor.slots[stubborn].process
        assert process is not None
        jobs.change(there.store, stubborn, lambda job: {"state": "cancelling", "wanted": "cancel"})
        await there.until(lambda: process.stopping)
        # A round hangs in it: it has to write down that this job has ended.
        there.clock.goes.clear()
        (there.folder(ending) / "go").touch()
        await there.until(lambda: there.counted("store_failures"))
        async with asyncio.timeout(LONG_S):
            assert await process.ended() == -9
        there.clock.goes.set()
        await there.until(lambda: there.row(stubborn).state == "cancelled")
        assert (there.row(ending).state, there.row(ending).attempt) == ("succeeded", 1)
        await there.until(lambda: there.counted("job_kills") == 1)
        await there.until(lambda: there.supervisor.slots == {})  # after the row is written


async def test_a_job_with_an_unforeseen_error_holds_up_no_other(tmp_path: Path):
    async with house(tmp_path, settings()) as there:
        poisoned = there.job("quick", config="[broken")
        sound = there.job("quick")
        await there.until(lambda: there.row(sound).state == "succeeded")
        await there.until(lambda: there.row(poisoned).state == "failed")
        row = there.row(poisoned)
        assert (row.code, row.detail) == (
            "crashed",
            "TOMLDecodeError in the service; its log has more (job_fault)",
        )
        assert there.counted("job_faults") == 1
        await there.until(lambda: there.supervisor.slots == {})


async def test_a_run_that_cannot_be_synced_is_settled_all_the_same(tmp_path: Path):
    async with house(tmp_path, settings(max_jobs=1)) as there:
        poisoned = there.job("waiting")
        await there.until(lambda: there.trains(poisoned))
        folder = there.folder(poisoned)
        (folder / "job.toml").write_bytes(b"\xff")
        (folder / "go").touch()
        await there.until(lambda: there.row(poisoned).state == "succeeded")
        after = there.job("quick")
        await there.until(lambda: there.row(after).state == "succeeded")


TOO_MANY = OSError(errno.EMFILE, "no more of them")


def refusing(*errors: Exception) -> Command:
    """A machine that starts no process before it has met these."""
    left = list(errors)

    def command(run_dir: Path) -> Sequence[str]:
        if left:
            raise left.pop()
        return acted(run_dir)

    return command


async def test_what_the_machine_refuses_for_a_moment_costs_restarts_and_no_job(tmp_path: Path):
    for_a_moment = refusing(TOO_MANY, RunNotWritten("the disk is full"), TOO_MANY)
    async with house(tmp_path, settings(restarts=3), for_a_moment) as there:
        job_id = there.job("quick")
        await there.until(lambda: there.row(job_id).state == "succeeded")
        row = there.row(job_id)
        assert (row.attempt, row.code, there.counted("job_restarts")) == (1, None, 3)


async def test_and_what_it_refuses_for_ever_is_told(tmp_path: Path):
    async with house(tmp_path, settings(restarts=2), refusing(*[TOO_MANY] * 9)) as there:
        job_id = there.job("quick")
        await there.until(lambda: there.row(job_id).state == "failed")
        row = there.row(job_id)
        assert (row.code, "no more of them" in str(row.detail)) == ("not_started", True)
        await there.until(lambda: there.supervisor.slots == {})  # the row is written first


async def test_a_stop_of_the_service_fails_no_job(tmp_path: Path):
    async with house(tmp_path, settings(stop_grace_s=0.1, restarts=0)) as there:
        ids = [there.job(plays) for plays in ("stubborn", "waiting")]
        await there.until(lambda: all(map(there.trains, ids)))
        await there.supervisor.close()
        assert [(there.row(one).state, there.row(one).code) for one in ids] == [("running", None)] * 2
        assert there.supervisor.slots == {}
