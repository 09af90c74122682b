"""Rollouts as a service: accept, run with bounded concurrency, poll, acknowledge, cancel.

One misbehaving rollout ends as a recorded failure of its own; the runner goes on.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextvars import Context, copy_context
from functools import partial

import structlog

from shared_schemas.rollouts import RolloutBatch, RolloutRequest, RolloutsAccepted, RolloutStatus
from task_app.episode.worker import RLRolloutWorker
from task_app.errors import InvalidRequest, ShuttingDown, TaskAppError, boundary
from task_app.interactions.service import Interactions
from task_app.plugins import PlugBoards, PolicyContext
from task_app.reward_functions.pool import RewardFunctions
from task_app.rollouts.assembly import Assembly
from task_app.rollouts.results import (
    Fingerprint,
    Record,
    Results,
    broken,
    cancelled,
    failed,
    fingerprint_of,
    finished,
    new_and_known,
    page_json,
    page_of,
    rollout_json,
)
from task_app.rollouts.runs import RunLife, Runs
from task_app.settings import Settings
from task_app.snapshots.starts import Worlds

log = structlog.get_logger("task_app")

MakeContext = Callable[[RolloutRequest], PolicyContext]


class RolloutRunner:
    """Runs at most `settings.max_concurrent_rollouts` at once, in order of acceptance.

    Args:
        settings: bounds.
        boards: what requests may name.
        make_context: what a policy of a request gets beside its config.
        interactions: who may answer in its conversations.
        instance_id: names this process in every answer; a restart has another.
        clock: seconds that only grow.
        on_end: told of every rollout that ended.
    """

    def __init__(
        self,
        settings: Settings,
        boards: PlugBoards,
        make_context: MakeContext,
        interactions: Interactions,
        *,
        instance_id: str,
        clock: Callable[[], float] = time.monotonic,
        on_end: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self._settings = settings
        self._make_context = make_context
        self._clock = clock
        self._on_end = on_end
        self.results = Results(instance_id)
        self.worlds = Worlds()
        self._assembly = Assembly(boards, self.worlds, interactions)
        self.runs = Runs(at_most=settings.max_rollouts_held, idle_s=settings.finished_expiry_s, clock=clock)
        self._played: dict[str, asyncio.Future[None]] = {}
        self._queue: OrderedDict[str, tuple[Record, RLRolloutWorker, Context]] = OrderedDict()
        self._running: dict[str, asyncio.Task[tuple[RolloutStatus, bytes]]] = {}
        self.rewards = RewardFunctions(boards, settings)
        self._draining = False

    def accept(self, batch: RolloutBatch) -> RolloutsAccepted:
        """Queue the new requests of a batch; the whole batch is checked first."""
        self._check_open()
        if len(batch.rollouts) > self._settings.max_rollouts_per_request:
            raise InvalidRequest(
                f"{len(batch.rollouts)} rollouts in one request; "
                f"at most {self._settings.max_rollouts_per_request}",
                where="rollouts",
            )
        new, known = new_and_known(batch, self.results.find)
        for index, request, _ in new:
            self.runs.check_not_aborted(request.run_id, where=f"rollouts.{index}.run_id")
        if new:
            self.results.check_room(len(new), self._settings)
        workers = [
            self._assembly.worker(request, self._make_context(request), where=f"rollouts.{index}.")
            for index, request, _ in new
        ]
        for (_, request, fingerprint), worker in zip(new, workers, strict=True):
            self._enqueue(request, fingerprint, worker)
        self._start_queued()
        return RolloutsAccepted(
            accepted=tuple(request.rollout_id for _, request, _ in new),
            known=tuple(known),
            instance_id=self.results.instance_id,
        )

    async def poll(self, run_id: str, cursor: str | None, wait_s: float) -> bytes:
        """A `RolloutPage` as JSON: what ended since the cursor, waiting for the first of it."""
        after = self.results.sequence_of(cursor)
        await self._wait_for_news(run_id, after, wait_s)
        run = self.runs.find(run_id)
        records = page_of(
            self.results.since(run_id, after),
            at_most=self._settings.max_page_rollouts,
            at_most_bytes=self._settings.max_page_bytes,
        )
        return page_json(
            records,
            cursor=self.results.cursor(records[-1].sequence if records else after),
            unfinished=run.unfinished if run else 0,
            instance_id=self.results.instance_id,
        )

    def state(self, rollout_id: str) -> bytes:
        """A `Rollout` as JSON."""
        record = self.results.get(rollout_id)
        return record.ended_json or rollout_json(record, self.results.instance_id, record.status)

    async def cancel(self, rollout_id: str) -> bytes:
        """End a rollout that has not ended; one that has stays as it is. The state afterwards, as JSON."""
        record = self.results.get(rollout_id)
        await self._stop([record])
        return record.ended_json or rollout_json(record, self.results.instance_id, record.status)

    async def play(self, request: RolloutRequest, worker: RLRolloutWorker) -> None:
        """Run one rollout in its turn, with a worker that the caller built and reads; return when it ended.

        It is listed and cancelled like every other while it lives, and forgotten when it has ended. A call
        that is itself cancelled (its client is gone) cancels the rollout.
        """
        self._check_open()
        self.runs.check_not_aborted(request.run_id, where="run_id")
        self.results.check_room(1, self._settings)
        record = self._enqueue(request, fingerprint_of(request), worker)
        played = self._played[record.rollout_id] = asyncio.get_running_loop().create_future()
        self._start_queued()
        try:
            await played
        finally:
            del self._played[record.rollout_id]
            await self._stop([record])
            if record.has_ended:
                self.results.forget(record)

    async def abort(self, run_id: str) -> tuple[RunLife, int]:
        """End what the run has unfinished, and start nothing more of it; how many ended by this."""
        run = self.runs.abort(run_id)
        running = [self.results.get(rollout_id) for rollout_id in self._running]
        queued = [record for record, *_ in self._queue.values()]
        stopped = [record for record in (*running, *queued) if record.run_id == run_id]
        run.stopped += len(stopped)
        await self._stop(stopped)
        return run, len(stopped)

    def is_cut_short(self, run_id: str) -> bool:
        """Whether what ends unfinished of the run does so because the service stops, and by no abort."""
        return self._draining and self.runs.get(run_id).aborted_at is None

    def unfinished(self) -> dict[str, int]:
        return {"queued": len(self._queue), "running": len(self._running)}

    def expire(self) -> None:
        """Forget results that nobody fetched for long."""
        forgotten = self.results.expire(before_s=self._clock() - self._settings.finished_expiry_s)
        if forgotten:
            log.warning("results_expired", count=forgotten)
        self.runs.expire()

    def begin_drain(self) -> None:
        """Take no more rollouts and start none; those that run go on."""
        self._draining = True
        for record, *_ in self._queue.values():
            self._end_cancelled(record, "the task app stopped before it started")
        self._queue.clear()

    async def settled(self, within_s: float) -> int:
        """Wait until nothing runs, or the time is over; how many ran."""
        running = set(self._running.values())
        if running:
            await asyncio.wait(running, timeout=within_s)
        return len(running)

    async def drain(self) -> None:
        """Cancel what has not ended and wait for it, within `settings.drain_s`."""
        self.begin_drain()
        for task in self._running.values():
            task.cancel()
        await self.settled(self._settings.drain_s)

    async def _wait_for_news(self, run_id: str, after: int, wait_s: float) -> None:
        """Until something ended since `after`, nothing is left to wait for, or the time is over."""
        try:
            async with asyncio.timeout(wait_s):
                while not any(self.results.since(run_id, after)):
                    run = self.runs.find(run_id)
                    if run is None or not run.unfinished:
                        return
                    await run.changed.wait()
        except TimeoutError:
            return

    async def _stop(self, records: Iterable[Record]) -> None:
        """End these, as far as they have not; those that run get `settings.drain_s` for it."""
        tasks = set()
        for record in records:
            task = self._running.get(record.rollout_id)
            if task is not None:
                task.cancel()
                tasks.add(task)
            elif not record.has_ended:
                del self._queue[record.rollout_id]
                self._end_cancelled(record, "cancelled before it started")
        if tasks:
            await asyncio.wait(tasks, timeout=self._settings.drain_s)

    def _check_open(self) -> None:
        if self._draining:
            raise ShuttingDown("this task app is stopping and takes no more rollouts")

    def _enqueue(self, request: RolloutRequest, fingerprint: Fingerprint, worker: RLRolloutWorker) -> Record:
        record = self.results.add(request, fingerprint)
        self.runs.started(request.run_id)
        # The context too: what it does to sessions is due to its own request, whoever makes room for it.
        self._queue[request.rollout_id] = (record, worker, copy_context())
        return record

    def _start_queued(self) -> None:
        while self._queue and len(self._running) < self._settings.max_concurrent_rollouts:
            _, (record, worker, context) = self._queue.popitem(last=False)
            record.status = "running"
            task = asyncio.get_running_loop().create_task(self._run(record, worker), context=context)
            self._running[record.rollout_id] = task
            task.add_done_callback(partial(self._ended, record, worker))

    async def _run(self, record: Record, worker: RLRolloutWorker) -> tuple[RolloutStatus, bytes]:
        # Not the ids of whichever request, or rollout before it, happened to start this task.
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(run_id=record.run_id, rollout_id=record.rollout_id)
        try:
            with boundary(f"rollout {record.rollout_id}"):
                _, messages, ground_truth = await worker.run_episode()
                trajectory, judge = worker.trajectory(), record.reward_function
                if judge is not None:
                    trajectory = await self.rewards.judged(
                        judge, trajectory, messages, ground_truth, rollout_id=record.rollout_id
                    )
                told = finished(record, trajectory, self.results.instance_id)
                return "finished", told
        except TaskAppError as exc:
            return "failed", failed(record, exc, self.results.instance_id)

    def _ended(
        self, record: Record, worker: RLRolloutWorker, task: asyncio.Task[tuple[RolloutStatus, bytes]]
    ) -> None:
        """Called once for every started rollout, however it ended; gives its place to the next."""
        del self._running[record.rollout_id]
        if not self._draining:
            self._start_queued()
        if task.cancelled():
            self._end_cancelled(record, "cancelled while it ran", decisions_done=worker.decisions_done)
        elif task.exception() is not None:
            # Even a fault of this file must end the rollout: the trainer waits for every one that it sent.
            self._file(record, "failed", broken(record, self.results.instance_id))
            # Last: a log that cannot be written (stderr is closed) is such a fault too.
            log.error(
                "rollout_broken",
                run_id=record.run_id,
                rollout_id=record.rollout_id,
                exc_info=task.exception(),
            )
        else:
            self._file(record, *task.result())

    def _file(self, record: Record, status: RolloutStatus, ended_json: bytes) -> None:
        """The one place where a rollout ends."""
        self.results.end(record, status, ended_json, now_s=self._clock())
        self.runs.ended(record.run_id, status)
        self._on_end(record)
        if (played := self._played.get(record.rollout_id)) is not None and not played.done():
            played.set_result(None)

    def _end_cancelled(self, record: Record, detail: str, *, decisions_done: int = 0) -> None:
        told = cancelled(record, detail, self.results.instance_id, decisions_done=decisions_done)
        self._file(record, "cancelled", told)
