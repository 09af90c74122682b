"""Accepts rollouts, plays them with bounded concurrency, and returns their results to clients.

If a rollout fails, the failure is recorded as its result, and the runner continues.
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
    """Plays accepted rollouts in order, at most `settings.max_concurrent_rollouts` at once.

    `instance_id` identifies this process in every reply; a restarted process has a different one. `on_end` is
    called with the record of every rollout that ended.
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
        """Check the whole batch, then queue the new requests.

        If one request is faulty, the whole batch is refused. If a plug-in raises while a worker is built,
        only the rollout of that worker fails.
        """
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
        """Return a `RolloutPage` of results after the cursor as JSON; wait up to `wait_s` for one."""
        after = self.results.read_cursor(cursor)
        await self._wait_for_news(run_id, after, wait_s)
        run = self.runs.find(run_id)
        records = cut_page(
            self.results.since(run_id, after),
            at_most=self._settings.max_page_rollouts,
            at_most_bytes=self._settings.max_page_bytes,
        )
        # Join the results, which are JSON already; cursor and instance id need no escaping.
        cursor = self.results.cursor(records[-1].sequence if records else after)
        count, instance_id = run.unfinished if run else 0, self.results.instance_id
        tail = f'],"cursor":"{cursor}","unfinished":{count},"instance_id":"{instance_id}"}}'
        return b'{"rollouts":[' + b",".join(record.result_json for record in records) + tail.encode()

    def state(self, rollout_id: str) -> bytes:
        """Return a `Rollout` as JSON."""
        return self.results.state(self.results.get(rollout_id))

    async def cancel(self, rollout_id: str) -> bytes:
        """Cancel a rollout if it is running or queued; return its state afterwards as JSON."""
        record = self.results.get(rollout_id)
        await self._stop([record])
        return self.results.state(record)

    async def play(self, request: RolloutRequest, worker: Worker) -> None:
        """Queue one rollout with a worker that the caller built, and return when the rollout has ended.

        Until it ends, the rollout is listed and can be cancelled like any other; afterwards it is forgotten.
        If this coroutine is cancelled because the client disconnected, the rollout is cancelled.
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
        """Cancel a run's unfinished rollouts and refuse new ones; return the run and the number cancelled."""
        run = self.runs.abort(run_id)
        running = [self.results.get(rollout_id) for rollout_id in self._running]
        queue = [record for record, *_ in self._queue.values()]
        records = [record for record in (*running, *queue) if record.run_id == run_id]
        run.stopped += len(records)
        await self._stop(records)
        return run, len(records)

    def is_cut_short(self, run_id: str) -> bool:
        """Return whether the run's unfinished rollouts end because the service stops.

        The result is False for an aborted run, because its rollouts end by the abort.
        """
        return self._is_draining and self.runs.get(run_id).aborted_at is None

    def unfinished(self) -> dict[str, int]:
        return {"queued": len(self._queue), "running": len(self._running)}

    def expire(self) -> None:
        """Forget old results that were never acknowledged, and runs that ended long ago."""
        count = self.results.expire(before_s=time.monotonic() - self._settings.finished_expiry_s)
        if count:
            log.warning("results_expired", count=count)
        self.runs.expire()

    def begin_drain(self) -> None:
        """Start no more rollouts, and cancel the queued rollouts; running rollouts continue."""
        self._is_draining = True
        for record, *_ in self._queue.values():
            self._cancel_record(record, "the task app stopped before it started")
        self._queue.clear()

    async def wait_until_idle(self, within_s: float) -> int:
        """Wait at most `within_s` for the running rollouts; return how many ran when the wait began."""
        tasks = set(self._running.values())
        if tasks:
            await asyncio.wait(tasks, timeout=within_s)
        return len(tasks)

    async def drain(self) -> None:
        """Cancel all unfinished rollouts, and wait at most `settings.drain_s` until they have ended."""
        self.begin_drain()
        for task in self._running.values():
            task.cancel()
        await self.wait_until_idle(self._settings.drain_s)

    async def _wait_for_news(self, run_id: str, after: int, wait_s: float) -> None:
        """Wait up to `wait_s` until the run has a result after number `after`, or no unfinished rollout."""
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
        """Cancel the unfinished rollouts among `records`; wait up to `settings.drain_s` until they end."""
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
        """Return the worker of a request, or the error if a plug-in raised while the worker was built."""
        try:
            return self._assembly.worker(request, self._make_context(request), where=where)
        except CriticalError as error:
            return error

    def _add(self, request: RolloutRequest, fingerprint: Fingerprint) -> Record:
        self.runs.add_rollout(request.run_id)
        return self.results.add(request, fingerprint)

    def _enqueue(self, request: RolloutRequest, fingerprint: Fingerprint, worker: Worker) -> Record:
        record = self._add(request, fingerprint)
        # Copy the context of this request, because another task may start the rollout later, and the context
        # tells to which request the changes of the rollout's session belong.
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
        # The context may contain log ids of the HTTP request that queued this rollout.
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
        """Record the result of a rollout whose task returned, raised or was cancelled; start the next one."""
        del self._running[record.rollout_id]
        if not self._is_draining:
            self._start_next()
        if task.cancelled():
            self._cancel_record(record, "cancelled while it ran", decisions_done=worker.decisions_done)
        elif task.exception() is not None:
            # Record a result even after an error in this file, because the trainer waits for every rollout.
            failure = RolloutFailure(
                code="internal_error", detail="an error inside the task app; see its log"
            )
            self._file(record, "failed", self.results.json(record, "failed", failure=failure))
            # Log after the result is recorded, because writing to a closed stderr raises.
            ids = {"run_id": record.run_id, "rollout_id": record.rollout_id}
            log.error("rollout_broken", **ids, exc_info=task.exception())
        else:
            self._file(record, *task.result())

    def _file(self, record: Record, status: RolloutStatus, result_json: bytes) -> None:
        """Store the result of a rollout, count its end in the run, and notify those that wait for it."""
        self.results.end(record, status, result_json, now_s=time.monotonic())
        self.runs.end_rollout(record.run_id, status)
        self._on_end(record)
        if (end := self._waiters.get(record.rollout_id)) is not None and not end.done():
            end.set_result(None)

    def _cancel_record(self, record: Record, detail: str, *, decisions_done: int = 0) -> None:
        failure = RolloutFailure(code="cancelled", detail=detail, decisions_done=decisions_done)
        self._file(record, "cancelled", self.results.json(record, "cancelled", failure=failure))
