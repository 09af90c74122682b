"""The supervisor: as many jobs at a time as were allowed, each in its process, until it has ended.

It goes in rounds: what the store says of the jobs, and what is true of their processes, are compared and
brought together. So it does not matter in which order things happen, what a round did not finish is done by
the next, and after a restart of the service the first round finds everything as a later one would.
"""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import structlog
import tomli

from trainer_backend.errors import TrainerError
from trainer_backend.job import parse_job
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.lock import holder, refuse_taken
from trainer_backend.store import jobs
from trainer_backend.store.database import Store
from trainer_backend.store.errors import StoreUnavailable, UnknownJob
from trainer_backend.store.jobs import Changes
from trainer_backend.store.rows import JobRow, JobState
from trainer_backend.supervising.data_dir import DataDir
from trainer_backend.supervising.news import News
from trainer_backend.supervising.outcomes import is_stop, outcome_of, without_process
from trainer_backend.supervising.processes import (
    Command,
    JobProcess,
    job_command,
    last_state,
    last_words,
    start_process,
)
from trainer_backend.supervising.slots import Figures, Rules, Slot
from trainer_backend.supervising.watcher import Watcher

log = structlog.get_logger("trainer")

_MOST_ACTIVE = 1000


class Supervisor:
    """Of one event loop: `run` it as a task, `close` it at the end."""

    def __init__(
        self,
        store: Store,
        data: DataDir,
        news: News,
        watcher: Watcher,
        rules: Rules,
        *,
        command: Command = job_command,
    ) -> None:
        self._store, self._data, self._news, self._rules = store, data, news, rules
        self._watcher, self._command = watcher, command
        self._wake = asyncio.Event()
        self._waiting: set[asyncio.Task[None]] = set()
        self._closing = False
        self._between_rounds = asyncio.Lock()
        self.slots: dict[str, Slot] = {}
        self.figures = Figures()

    def wake(self) -> None:
        """Something was asked for: look now."""
        self._wake.set()

    async def run(self) -> None:
        """Go round until it is closed. A database that is away costs rounds, and no job."""
        while not self._closing:
            self._wake.clear()
            try:
                async with self._between_rounds:
                    await self._round()
            except StoreUnavailable as error:
                self.figures.store_failures += 1
                log.warning("store_away", detail=str(error))
            except Exception:
                log.exception("round_failed")  # a supervisor that ended would leave its jobs alone
            try:
                async with asyncio.timeout(self._rules.round_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def close(self) -> None:
        """Stop every process in order; the jobs stay as they are: the next service goes on with them."""
        self._closing = True
        self.wake()
        async with self._between_rounds:  # cut short, a round could leave a process that nobody knows of
            await self._stop_all()

    async def _stop_all(self) -> None:
        running = [slot.process for slot in self.slots.values() if slot.process is not None]
        for process in running:
            process.stop()
        ends = [asyncio.ensure_future(process.ended()) for process in running]
        if ends:
            await asyncio.wait(ends, timeout=self._rules.grace_s)
        for process in running:
            process.kill()
        await asyncio.gather(*ends)
        for job_id, slot in list(self.slots.items()):
            if slot.process is not None:
                try:
                    await self._settle(job_id, slot, slot.process)
                except StoreUnavailable as error:
                    log.warning("store_away", detail=str(error))

    async def _round(self) -> None:
        self._kill_the_late()
        for job_id, slot in list(self.slots.items()):
            if slot.process is not None and slot.process.exit_code is not None:
                await self._settle(job_id, slot, slot.process)
        for row in await self._rows("pausing", "cancelling"):
            await self._bring_to_its_end(row)
        for row in await self._rows("running"):
            await self._keep_running(row)
        while len(self.slots) < self._rules.max_jobs and not self._closing:
            claimed = await asyncio.to_thread(jobs.claim, self._store, self._data.home)
            if claimed is None:
                break
            self._news.tell(claimed.id)
            await self._start(claimed, Slot(counted=True))

    def _kill_the_late(self) -> None:
        """Without a question to the store, which may be away."""
        for slot in self.slots.values():
            if slot.process is not None and slot.process.exit_code is None and self._now() > slot.kill_at_s:
                slot.kill_at_s = math.inf
                self.figures.killed += 1
                slot.process.kill()

    async def _rows(self, *states: JobState) -> tuple[JobRow, ...]:
        """Of this service's own jobs, oldest first."""
        page = await asyncio.to_thread(
            jobs.find, self._store, states=states, home=self._data.home, origin="api", limit=_MOST_ACTIVE
        )
        return page.items[::-1]

    async def _bring_to_its_end(self, row: JobRow) -> None:
        slot = self.slots.get(row.id)
        if slot is None or slot.process is None:  # it crashed, or the service was killed, before it had ended
            self.slots.pop(row.id, None)
            now = self._store.clock()
            await self._change(row.id, lambda job: without_process(job, now))
        elif not slot.process.told:
            slot.process.stop()
            slot.kill_at_s = self._now() + self._rules.grace_s

    async def _keep_running(self, row: JobRow) -> None:
        slot = self.slots.get(row.id)
        if slot is not None and (slot.process is not None or self._now() < slot.not_before_s):
            return
        if slot is not None or len(self.slots) < self._rules.max_jobs:
            await self._start(row, slot or Slot())
        else:  # fewer may run at a time than before the restart of the service
            await self._change(row.id, lambda job: {"state": "queued"} if job.state == "running" else None)

    async def _start(self, row: JobRow, slot: Slot) -> None:
        """Start the process of a running job; a job that cannot be started has failed."""
        self.slots[row.id] = slot
        try:
            run = await asyncio.to_thread(self._run_directory, row)
            found = await asyncio.to_thread(holder, run.path)
            if found is not None and self._may_wait(slot):
                told = f"{run.path} is being trained by {found}; waiting for it to end"
                await self._change(row.id, lambda job: None if job.detail == told else _waiting(told))
                return
            await asyncio.to_thread(refuse_taken, run.path)
            slot.process = await start_process(run.path, command=self._command)
        except StoreUnavailable:
            raise
        except (TrainerError, OSError) as error:
            await self._fail(row.id, error)
            return
        self.figures.started += 1
        log.info("job_started", job=row.id, name=row.name, pid=slot.process.pid, run=str(run.path))
        self._watch_end(slot.process)
        changes: Changes = {"run_id": run.run_id, "code": None, "detail": None}
        if not slot.counted:
            changes["attempt"] = row.attempt + 1
        slot.counted, slot.held_until_s = False, math.inf
        await self._change(row.id, lambda job: changes)

    def _run_directory(self, row: JobRow) -> RunDirectory:
        config = parse_job(tomli.loads(row.config), where=f"job {row.id}").config
        assert row.run_dir is not None, "a posted job is created with its run directory"
        return self._data.run_for(Path(row.run_dir), config)

    def _may_wait(self, slot: Slot) -> bool:
        """Whether to wait, still, for who holds the run directory."""
        if math.isinf(slot.held_until_s):
            slot.held_until_s = self._now() + self._rules.held_s
        return self._now() < slot.held_until_s

    def _watch_end(self, process: JobProcess) -> None:
        async def wait() -> None:
            await process.ended()
            self._wake.set()

        task = asyncio.ensure_future(wait())
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _settle(self, job_id: str, slot: Slot, process: JobProcess) -> None:
        """Write down what became of a job whose process has ended; its slot is free then, or waits."""
        exit_code = await process.ended()
        try:
            row = await asyncio.to_thread(jobs.get, self._store, job_id)
            state = await asyncio.to_thread(last_state, row, process)
            said = await asyncio.to_thread(last_words, row)
            ending = slot.ended(exit_code, state, said)
            # First: whoever sees that it has ended then finds all that it did.
            await asyncio.to_thread(self._watcher.sync, row)
            restart_in_s: float | None = None

            def decide(job: JobRow) -> Changes | None:
                nonlocal restart_in_s
                if self._closing and job.wanted == "run" and is_stop(exit_code):
                    return None
                now = self._store.clock()
                rules = self._rules
                outcome = outcome_of(
                    job, ending, restarts=rules.restarts, first_wait_s=rules.first_wait_s, now=now
                )
                restart_in_s = outcome.restart_in_s
                return outcome.changes

            settled = await self._change(job_id, decide)
        except UnknownJob:  # deleted from the store by somebody else
            self.slots.pop(job_id)
            return
        log.info("job_ended", job=job_id, exit_code=exit_code, state=settled.state, detail=settled.detail)
        if restart_in_s is None:
            self.slots.pop(job_id)
        else:
            self.figures.restarts += 1
            slot.wait_for_restart(self._now() + restart_in_s)

    async def _fail(self, job_id: str, error: TrainerError | OSError) -> None:
        code = error.code if isinstance(error, TrainerError) else "not_started"
        log.warning("job_not_started", job=job_id, code=code, detail=str(error))
        changes: Changes = {
            "state": "failed",
            "ended": self._store.clock(),
            "code": code,
            "detail": str(error),
        }
        await self._change(job_id, lambda job: changes)
        self.slots.pop(job_id)

    async def _change(self, job_id: str, decide: Callable[[JobRow], Changes | None]) -> JobRow:
        row = await asyncio.to_thread(jobs.change, self._store, job_id, decide)
        self._news.tell(job_id)
        return row

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _waiting(told: str) -> Changes:
    return {"code": "waiting", "detail": told}
