"""Accepts rollouts, plays them with bounded concurrency, and serves their results.

A rollout that fails is recorded as a failure; the runner continues.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextvars import Context, copy_context
from functools import partial

import structlog

from shared_schemas.rollouts import (
    RolloutBatch,
    RolloutFailure,
    RolloutRequest,
    RolloutsAccepted,
    RolloutStatus,
)
from task_app.captures.door import Captures
from task_app.errors import CriticalError, InvalidRequest, ShuttingDown, TaskAppError, boundary
from task_app.interactions.service import Interactions
from task_app.observing.spans import Spans
from task_app.plugins import PlugBoards, PolicyContext
from task_app.reward_functions.pool import RewardFunctions
from task_app.rollouts.assembly import Assembly, Worker
from task_app.rollouts.results import Fingerprint, Record, Results, cut_page, split_batch, take_fingerprint
from task_app.rollouts.runs import RunLife, Runs
from task_app.settings import Settings
from task_app.snapshots.starts import Worlds

log = structlog.get_logger("task_app")

MakeContext = Callable[[RolloutRequest], PolicyContext]


class RolloutRunner:
    """Plays at most `settings.max_concurrent_rollouts` at once, in order of acceptance.

    `instance_id` identifies this process in every reply; a restart has another one. `on_end` is called with
    every rollout that ended.
    """

    def __init__(
        self,
        settings: Settings,
        boards: PlugBoards,
        make_context: MakeContext,
        interactions: Interactions,
        captures: Captures,
        *,
        instance_id: str,
        spans: Spans,
        on_end: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self._settings, self._make_context, self._spans = settings, make_context, spans
        self._on_end = on_end
        self.results = Results(instance_id, captures.held)
        self.worlds = Worlds()
        self._assembly = Assembly(boards, self.worlds, interactions, captures, spans)
        self.runs = Runs(at_most=settings.max_rollouts_held, idle_s=settings.finished_expiry_s)
        self._waiters: dict[str, asyncio.Future[None]] = {}
        self._queue: OrderedDict[str, tuple[Record, Worker, Context]] = OrderedDict()
        self._running: dict[str, asyncio.Task[tuple[RolloutStatus, bytes]]] = {}
        self.rewards = RewardFunctions(boards, settings)
        self._is_draining = False

    def accept(self, batch: RolloutBatch) -> RolloutsAccepted:
        """Check the whole batch, then queue new requests; if a plug-in raises, its request fails alone."""
        self._check_open()
        count, most = len(batch.rollouts), self._settings.max_rollouts_per_request
        if count > most:
            raise InvalidRequest(f"{count} rollouts in one request; at most {most}", where="rollouts")
        new, known = split_batch(batch, self.results.find)
        for index, request, _ in new:
            self.runs.check_not_aborted(request.run_id, where=f"rollouts.{index}.run_id")
        if new:
            self.results.check_room(len(new), self._settings)
        workers = [self._build_worker(request, where=f"rollouts.{index}.") for index, request, _ in new]
        for (_, request, fingerprint), worker in zip(new, workers, strict=True):
            if isinstance(worker, CriticalError):
                record = self._add(request, fingerprint)
                self._file(record, "failed", self.results.failure_json(record, worker))
            else:
                self._enqueue(request, fingerprint, worker)
        self._start_next()
        return RolloutsAccepted(
            accepted=tuple(request.rollout_id for _, request, _ in new),
            known=tuple(known),
            instance_id=self.results.instance_id,
        )

    async def poll(self, run_id: str, cursor: str | None, wait_s: float) -> bytes:
        """Wait for a result after the cursor; return the first results after it, a `RolloutPage` as JSON."""
        after = self.results.read_cursor(cursor)
        await self._wait_for_news(run_id, after, wait_s)
        run = self.runs.find(run_id)
        records = cut_page(
            self.results.since(run_id, after),
            at_most=self._settings.max_page_rollouts,
            at_most_bytes=self._settings.max_page_bytes,
        )
        # The results are JSON already; cursor and instance id need no escaping.
        cursor = self.results.cursor(records[-1].sequence if records else after)
        count, instance_id = run.unfinished if run else 0, self.results.instance_id
        tail = f'],"cursor":"{cursor}","unfinished":{count},"instance_id":"{instance_id}"}}'
        return b'{"rollouts":[' + b",".join(record.result_json for record in records) + tail.encode()

    def state(self, rollout_id: str) -> bytes:
        """Return a `Rollout` as JSON."""
        return self.results.state(self.results.get(rollout_id))

    async def cancel(self, rollout_id: str) -> bytes:
        """End a rollout that still runs or waits; return its state afterwards as JSON."""
        record = self.results.get(rollout_id)
        await self._stop([record])
        return self.results.state(record)

    async def play(self, request: RolloutRequest, worker: Worker) -> None:
        """Play one rollout in its turn with a worker that the caller built, and return when it has ended.

        Until then it is listed and can be cancelled like any other; afterwards it is forgotten. Cancelling
        this call, because its client is gone, cancels the rollout.
        """
        self._check_open()
        self.runs.check_not_aborted(request.run_id, where="run_id")
        self.results.check_room(1, self._settings)
        record = self._enqueue(request, take_fingerprint(request), worker)
        end = self._waiters[record.rollout_id] = asyncio.get_running_loop().create_future()
        self._start_next()
        try:
            await end
        finally:
            del self._waiters[record.rollout_id]
            await self._stop([record])
            if record.has_ended:
                self.results.forget(record)

    async def abort(self, run_id: str) -> tuple[RunLife, int]:
        """End a run's unfinished rollouts and accept no more; return the run and how many were ended."""
        run = self.runs.abort(run_id)
        running = [self.results.get(rollout_id) for rollout_id in self._running]
        queue = [record for record, *_ in self._queue.values()]
        records = [record for record in (*running, *queue) if record.run_id == run_id]
        run.stopped += len(records)
        await self._stop(records)
        return run, len(records)

    def is_cut_short(self, run_id: str) -> bool:
        """Return whether unfinished rollouts of the run end because the service stops, not by an abort."""
        return self._is_draining and self.runs.get(run_id).aborted_at is None

    def unfinished(self) -> dict[str, int]:
        return {"queued": len(self._queue), "running": len(self._running)}

    def expire(self) -> None:
        """Forget old results that were never fetched."""
        count = self.results.expire(before_s=time.monotonic() - self._settings.finished_expiry_s)
        if count:
            log.warning("results_expired", count=count)
        self.runs.expire()

    def begin_drain(self) -> None:
        """Start no more rollouts, and cancel those that wait; running rollouts continue."""
        self._is_draining = True
        for record, *_ in self._queue.values():
            self._cancel_record(record, "the task app stopped before it started")
        self._queue.clear()

    async def wait_until_idle(self, within_s: float) -> int:
        """Wait until nothing runs or the time is over; return how many rollouts ran at the start."""
        tasks = set(self._running.values())
        if tasks:
            await asyncio.wait(tasks, timeout=within_s)
        return len(tasks)

    async def drain(self) -> None:
        """Cancel all unfinished rollouts and wait for their end, within `settings.drain_s`."""
        self.begin_drain()
        for task in self._running.values():
            task.cancel()
        await self.wait_until_idle(self._settings.drain_s)

    async def _wait_for_news(self, run_id: str, after: int, wait_s: float) -> None:
        """Wait until the run has a result after `after`, has nothing unfinished, or the time is over."""
        try:
            async with asyncio.timeout(wait_s):
                while not any(self.results.since(run_id, after)):
                    run = self.runs.find(run_id)
                    if run is None or not run.unfinished:
                        return
                    await run.change.wait()
        except TimeoutError:
            return

    async def _stop(self, records: Iterable[Record]) -> None:
        """Cancel the unfinished rollouts among `records`; wait up to `settings.drain_s` for running ones."""
        tasks = set()
        for record in records:
            task = self._running.get(record.rollout_id)
            if task is not None:
                task.cancel()
                tasks.add(task)
            elif not record.has_ended:
                del self._queue[record.rollout_id]
                self._cancel_record(record, "cancelled before it started")
        if tasks:
            await asyncio.wait(tasks, timeout=self._settings.drain_s)

    def _check_open(self) -> None:
        if self._is_draining:
            raise ShuttingDown("this task app is stopping and takes no more rollouts")

    def _build_worker(self, request: RolloutRequest, *, where: str) -> Worker | CriticalError:
        """Return the worker of a request, or the error of a plug-in that raised while it was built."""
        try:
            return self._assembly.worker(request, self._make_context(request), where=where)
        except CriticalError as error:
            return error

    def _add(self, request: RolloutRequest, fingerprint: Fingerprint) -> Record:
        self.runs.add_rollout(request.run_id)
        return self.results.add(request, fingerprint)

    def _enqueue(self, request: RolloutRequest, fingerprint: Fingerprint, worker: Worker) -> Record:
        record = self._add(request, fingerprint)
        # The rollout later runs in the context of its own request, not of the task that starts it: the
        # context says to which request its session's changes belong.
        self._queue[request.rollout_id] = (record, worker, copy_context())
        return record

    def _start_next(self) -> None:
        while self._queue and len(self._running) < self._settings.max_concurrent_rollouts:
            _, (record, worker, context) = self._queue.popitem(last=False)
            record.status = "running"
            task = asyncio.get_running_loop().create_task(self._run(record, worker), context=context)
            self._running[record.rollout_id] = task
            task.add_done_callback(partial(self._finish_task, record, worker))

    async def _run(self, record: Record, worker: Worker) -> tuple[RolloutStatus, bytes]:
        # The context may hold the log ids of the request or rollout that started this task.
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(run_id=record.run_id, rollout_id=record.rollout_id)
        try:
            with self._spans.episode(record) as notes, boundary(f"rollout {record.rollout_id}"):
                _, messages, ground_truth = await worker.run_episode()
                trajectory, judge = worker.trajectory(), record.reward_function
                if judge is not None:
                    trajectory = await self.rewards.judge(
                        judge, trajectory, messages, ground_truth, rollout_id=record.rollout_id
                    )
                notes.end(trajectory)
                return "finished", self.results.finished_json(record, trajectory)
        except TaskAppError as exc:
            exc.release_frames()
            return "failed", self.results.failure_json(record, exc)

    def _finish_task(
        self, record: Record, worker: Worker, task: asyncio.Task[tuple[RolloutStatus, bytes]]
    ) -> None:
        """File a rollout whose task has ended, in whatever way, and start the next one."""
        del self._running[record.rollout_id]
        if not self._is_draining:
            self._start_next()
        if task.cancelled():
            self._cancel_record(record, "cancelled while it ran", decisions_done=worker.decisions_done)
        elif task.exception() is not None:
            # Even an error of this file ends the rollout, because the trainer waits until every rollout ends.
            failure = RolloutFailure(
                code="internal_error", detail="an error inside the task app; see its log"
            )
            self._file(record, "failed", self.results.json(record, "failed", failure=failure))
            # Logged last, because writing to a closed stderr raises too.
            ids = {"run_id": record.run_id, "rollout_id": record.rollout_id}
            log.error("rollout_broken", **ids, exc_info=task.exception())
        else:
            self._file(record, *task.result())

    def _file(self, record: Record, status: RolloutStatus, result_json: bytes) -> None:
        """End a rollout; every rollout ends here."""
        self.results.end(record, status, result_json, now_s=time.monotonic())
        self.runs.end_rollout(record.run_id, status)
        self._on_end(record)
        if (end := self._waiters.get(record.rollout_id)) is not None and not end.done():
            end.set_result(None)

    def _cancel_record(self, record: Record, detail: str, *, decisions_done: int = 0) -> None:
        failure = RolloutFailure(code="cancelled", detail=detail, decisions_done=decisions_done)
        self._file(record, "cancelled", self.results.json(record, "cancelled", failure=failure))
