"""The supervisor starts, watches and restarts the processes of jobs, up to the allowed number at a time.

It works in rounds. Each round compares the jobs' rows in the store with the running processes, and acts on
the differences. Thus the order of events does not matter. If a round is interrupted, the next round completes
its work, even after a restart of the service.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import structlog
from prometheus_client import Counter

from trainer_backend.errors import TrainerError
from trainer_backend.jobs.data_dir import DataDir
from trainer_backend.jobs.processes import (
    Command,
    JobProcess,
    job_command,
    last_words,
    record_death,
    start_process,
    without_secrets,
)
from trainer_backend.jobs.settings import SupervisorSettings
from trainer_backend.jobs.slots import Line, Slot
from trainer_backend.jobs.states import Ending, Outcome, decide_outcome, without_process
from trainer_backend.jobs.watcher import News, Watcher
from trainer_backend.rundir.lock import holder, refuse_if_locked
from trainer_backend.rundir.state import DONE, FAILED, REFUSED, is_final
from trainer_backend.store import jobs
from trainer_backend.store.database import Store, StoreUnavailable, UnknownJob
from trainer_backend.store.jobs import Changes
from trainer_backend.store.rows import ACTIVE, Job, JobState

log = structlog.get_logger("trainer")

# Seconds for a killed process to exit. A process that hangs on a disk does not exit.
_EXIT_S = 10.0
_MOST_ACTIVE = 1000


class Supervisor:
    """Runs jobs in one event loop: start `run` as a task, and call `close` at the end.

    Calls to the store have a deadline. A call that raised StoreUnavailable may still change the store later.
    """

    def __init__(
        self,
        store: Store,
        data: DataDir,
        news: News,
        watcher: Watcher,
        settings: SupervisorSettings,
        *,
        command: Command = job_command,
    ) -> None:
        self._store, self._data, self._news, self._watcher = store, data, news, watcher
        self._settings, self._command = settings, command
        self._line = Line("supervisor", store.shown, settings.store_s)
        self._last_syncs = Line("last-sync", store.shown, settings.store_s)
        self._wake = asyncio.Event()
        self._waiting: set[asyncio.Task[None]] = set()
        self._closing = False
        self._grace_s = settings.stop_grace_s
        self._between_rounds = asyncio.Lock()
        self.slots: dict[str, Slot] = {}
        counter = partial(Counter, registry=watcher.registry)
        self._starts = counter("turnwise_trainer_job_starts", "Processes of jobs that were started.")
        self._restarts = counter("turnwise_trainer_job_restarts", "Crashed jobs that were started again.")
        self._kills = counter(
            "turnwise_trainer_job_kills", "Processes that were killed because they did not stop in time."
        )
        self._faults = counter("turnwise_trainer_job_faults", "Times that a job met an error of the service.")
        self._store_failures = counter(
            "turnwise_trainer_store_failures", "Rounds that the store did not answer."
        )

    @property
    def threads(self) -> tuple[ThreadPoolExecutor, ...]:
        """The threads that must end before the store is closed."""
        return self._line.thread, self._last_syncs.thread

    def wake(self) -> None:
        """Begin the next round now, because a job was changed."""
        self._wake.set()

    async def run(self) -> None:
        """Run rounds until `close`. If the database does not answer, rounds fail, but jobs continue."""
        while not self._closing:
            self._wake.clear()
            try:
                async with self._between_rounds:
                    await self._round()
            except StoreUnavailable as error:
                self._store_failures.inc()
                self._watcher.note_store(error)
            except Exception:
                log.exception("round_failed")  # the supervisor must not end
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.round_s):
                    await self._wake.wait()

    async def close(self) -> None:
        """Stop all processes gracefully. The next service continues the jobs that have not finished."""
        self._closing = True
        self.wake()
        self._stop_all()  # first: a stuck store must not shorten the processes' grace time
        async with self._between_rounds:  # waits for a round that may be starting a process
            self._stop_all()
            ends = [asyncio.ensure_future(process.ended()) for process in self._processes()]
            if ends:
                await asyncio.wait(ends, timeout=self._settings.stop_grace_s + _EXIT_S)
            try:
                await self._settle_all()
            except StoreUnavailable as error:
                self._watcher.note_store(error)

    def end_at_once(self) -> None:
        """Kill every process, even one that is saving. `close` then has no process to wait for."""
        self._closing, self._grace_s = True, 0.0
        for process in self._processes():
            process.signal(signal.SIGKILL)

    def _processes(self) -> list[JobProcess]:
        return [slot.process for slot in self.slots.values() if slot.process is not None]

    def _stop_all(self) -> None:
        for process in self._processes():
            process.stop(self._grace_s)

    async def _round(self) -> None:
        await self._settle_all()
        for row in await self._jobs_in("pausing", "cancelling"):
            await self._boundary(row.id, self._stop_process(row))
        for row in await self._jobs_in("running"):
            await self._boundary(row.id, self._ensure_process(row))
        while len(self.slots) < self._settings.max_jobs and not self._closing:
            job = await self._line.ask(jobs.claim, self._store, self._data.home)
            if job is None:
                break
            self._news.tell(job.id)
            await self._boundary(job.id, self._start(job, Slot(is_counted=True)))

    async def _settle_all(self) -> None:
        for job_id, slot in list(self.slots.items()):
            if slot.process is not None and slot.process.exit_code is not None:
                await self._boundary(job_id, self._settle(job_id, slot, slot.process))

    async def _boundary(self, job_id: str, work: Coroutine[None, None, None]) -> None:
        """Run `work` for one job. Log an unforeseen error in it, and let the other jobs continue."""
        try:
            await work
        except StoreUnavailable:
            raise
        except UnknownJob:  # the job was deleted; the end of its process frees the slot
            slot = self.slots.get(job_id)
            if slot is not None and slot.process is not None and slot.lives:
                slot.process.stop(self._grace_s)
            else:
                self.slots.pop(job_id, None)
        except Exception as error:
            log.exception("job_fault", job=job_id)
            self._faults.inc()
            slot = self.slots.get(job_id)
            if slot is None or not slot.lives:
                detail = f"{type(error).__name__} in the service; its log has more (job_fault)"
                try:
                    await self._fail(job_id, "crashed", detail)
                except StoreUnavailable:
                    raise
                except Exception:
                    log.exception("job_fault", job=job_id)

    async def _stop_process(self, row: Job) -> None:
        slot = self.slots.get(row.id)
        if slot is None or slot.process is None:  # it crashed, or the service was killed
            self.slots.pop(row.id, None)
            now = self._store.clock()
            await self._change(row.id, lambda job: without_process(job, now))
        else:
            slot.process.stop(self._grace_s)

    async def _ensure_process(self, row: Job) -> None:
        slot = self.slots.get(row.id)
        if self._closing:
            return
        if slot is not None and (slot.process is not None or self._now() < slot.not_before_s):
            return
        if slot is not None or len(self.slots) < self._settings.max_jobs:
            await self._start(row, slot or Slot())
        else:  # the limit is lower than before the restart of the service
            await self._change(row.id, lambda job: {"state": "queued"} if job.state == "running" else None)

    async def _start(self, row: Job, slot: Slot) -> None:
        self.slots[row.id] = slot
        try:
            run = await self._line.ask(self._data.prepare_run, row)
            trainer = await self._line.ask(holder, run.path)
            if trainer is not None:
                slot.lock_deadline_s = slot.lock_deadline_s or self._now() + self._settings.lock_wait_s
                if self._now() < slot.lock_deadline_s:
                    detail = f"{run.path} is being trained by {trainer}; waiting for it to end"
                    waiting: Changes = {"code": "waiting", "detail": detail}
                    await self._change(row.id, lambda job: None if job.detail == detail else waiting)
                    return
            await self._line.ask(refuse_if_locked, run.path)
            environment = await self._line.ask(without_secrets, row.config)
            slot.process = await start_process(run.path, environment, command=self._command)
        except StoreUnavailable:
            raise
        except (TrainerError, OSError) as error:
            await self._record_start_failure(row.id, slot, error)
            return
        self._starts.inc()
        log.info("job_started", job=row.id, name=row.name, pid=slot.process.pid, run=str(run.path))
        self._watch_end(slot.process)
        changes: Changes = {"run_id": run.run_id, "code": None, "detail": None}
        if not slot.is_counted:
            changes["attempt"] = row.attempt + 1
        slot.is_counted, slot.lock_deadline_s, slot.ending = False, None, None
        await self._change(row.id, lambda job: changes)

    async def _record_start_failure(self, job_id: str, slot: Slot, error: TrainerError | OSError) -> None:
        """Fail a job that could not be started. If the error may be temporary, count a crash instead."""
        code = error.code if isinstance(error, TrainerError) else "not_started"
        log.warning("job_not_started", job=job_id, code=code, detail=str(error))
        if isinstance(error, TrainerError) and is_final(error):
            await self._fail(job_id, code, str(error))
        else:
            slot.ending = None  # the previous process's ending is stored already
            await self._write_down(job_id, slot, slot.record_end(Ending(FAILED, error=str(error), code=code)))

    def _watch_end(self, process: JobProcess) -> None:
        async def wait() -> None:
            await process.ended()
            self._kills.inc(process.stopping is not None and await process.stopping)
            self._wake.set()

        task = asyncio.ensure_future(wait())
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _settle(self, job_id: str, slot: Slot, process: JobProcess) -> None:
        """Store the outcome of a job whose process ended."""
        await process.ended()
        row = await self._line.ask(jobs.get, self._store, job_id)
        ending = slot.record_end(await self._line.ask(last_words, row, process))
        # Done before the outcome is stored: a client that sees the end must find all results and the reason.
        if not self._closing:
            await self._line.ask(record_death, row, ending)
        try:
            await self._last_syncs.ask(self._watcher.sync, row)
        except StoreUnavailable as error:  # the sync of a large run may take longer; the watcher completes it
            log.warning("sync_late", job=job_id, detail=str(error))
        outcome = await self._write_down(job_id, slot, ending)
        log.info(
            "job_ended", job=job_id, exit_code=ending.exit_code, state=outcome.state, detail=outcome.detail
        )

    async def _write_down(self, job_id: str, slot: Slot, ending: Ending) -> Job:
        """Store how a process ended, and return the job. Free the slot, or keep it for a restart."""
        outcome, is_closing = Outcome({}), self._closing

        def decide(job: Job) -> Changes | None:
            nonlocal outcome
            if job.state not in ACTIVE:  # an earlier call that missed its deadline has stored it
                return None
            # The next service continues this job, even if its process was killed because it saved too slowly.
            if is_closing and job.wanted == "run" and ending.exit_code not in (DONE, REFUSED):
                return None
            settings, now = self._settings, self._store.clock()
            outcome = decide_outcome(
                job, ending, restarts=settings.restarts, first_wait_s=settings.first_wait_s, now=now
            )
            return outcome.changes

        row = await self._change(job_id, decide)
        if outcome.restart_in_s is None:
            self.slots.pop(job_id)
        else:
            self._restarts.inc()
            slot.process, slot.ending = None, None
            slot.not_before_s = self._now() + outcome.restart_in_s
        return row

    async def _fail(self, job_id: str, code: str, detail: str) -> None:
        ended = self._store.clock()
        failed: Changes = {"state": "failed", "ended": ended, "code": code, "detail": detail}
        await self._change(job_id, lambda job: failed)
        self.slots.pop(job_id, None)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _jobs_in(self, *states: JobState) -> tuple[Job, ...]:
        """Return this service's jobs in these states, oldest first."""
        page = await self._line.ask(
            jobs.find, self._store, states=states, home=self._data.home, origin="api", limit=_MOST_ACTIVE
        )
        return page.items[::-1]

    async def _change(self, job_id: str, decide: Callable[[Job], Changes | None]) -> Job:
        row = await self._line.ask(jobs.change, self._store, job_id, decide)
        self._news.tell(job_id)
        return row
