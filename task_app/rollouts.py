"""Rollouts as a service: accept, run with bounded concurrency, poll, acknowledge, cancel.

One misbehaving rollout ends as a recorded failure of its own; the runner goes on.
"""

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import structlog

from shared_schemas.rollouts import (
    RolloutAck,
    RolloutAcked,
    RolloutBatch,
    RolloutFailure,
    RolloutRequest,
    RolloutsAccepted,
    RolloutStatus,
)
from shared_schemas.trajectory import Trajectory
from task_app.assembly import build_worker
from task_app.episode import RLRolloutWorker
from task_app.errors import (
    CapacityReached,
    Conflict,
    EpisodeFailed,
    InvalidRequest,
    ShuttingDown,
    TaskAppError,
    boundary,
    encodable,
)
from task_app.plugins import PlugBoards, PolicyContext
from task_app.results import Record, Results, page_json, page_of, rollout_json
from task_app.settings import Settings

log = structlog.get_logger("task_app")

MakeContext = Callable[[RolloutRequest], PolicyContext]


class RolloutRunner:
    """Runs at most `settings.max_concurrent_rollouts` at once, in order of acceptance.

    Args:
        settings: bounds.
        boards: what requests may name.
        make_context: what a policy of a request gets beside its config.
        instance_id: names this process in every answer; a restart has another.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        settings: Settings,
        boards: PlugBoards,
        make_context: MakeContext,
        *,
        instance_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._boards = boards
        self._make_context = make_context
        self._clock = clock
        self.results = Results(instance_id)
        self._queue: OrderedDict[str, tuple[Record, RLRolloutWorker]] = OrderedDict()
        self._running: dict[str, asyncio.Task[tuple[RolloutStatus, bytes]]] = {}
        self._draining = False

    def accept(self, batch: RolloutBatch) -> RolloutsAccepted:
        """Queue what is new; all of the batch is checked before any of it is queued.

        Raises:
            InvalidRequest, UnknownName, HostNotAllowed: a request cannot run; `where` is its body path.
            Conflict: an id is taken by another body.
            CapacityReached, ShuttingDown: later, perhaps.
        """
        if self._draining:
            raise ShuttingDown("this task app is stopping and takes no more rollouts")
        if len(batch.rollouts) > self._settings.max_rollouts_per_request:
            raise InvalidRequest(
                f"{len(batch.rollouts)} rollouts in one request; "
                f"at most {self._settings.max_rollouts_per_request}",
                where="rollouts",
            )
        new, known = self._sort(batch)
        if new:
            self._check_room(len(new))
        workers = [
            build_worker(request, self._boards, self._make_context(request), where=f"rollouts.{index}.")
            for index, request, _ in new
        ]
        for (_, request, digest), worker in zip(new, workers, strict=True):
            self._queue[request.rollout_id] = (self.results.add(request, digest), worker)
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
        run = self.results.run(run_id)
        records = page_of(
            run.since(after) if run else (),
            at_most=self._settings.max_page_rollouts,
            at_most_bytes=self._settings.max_page_bytes,
        )
        return page_json(
            records,
            cursor=self.results.cursor(records[-1].sequence if records else after),
            unfinished=run.unfinished if run else 0,
            instance_id=self.results.instance_id,
        )

    def ack(self, ack: RolloutAck) -> RolloutAcked:
        """Forget stored rollouts; ids that are unknown, unfinished or of another run are named and kept."""
        acked, unknown = [], []
        for rollout_id in dict.fromkeys(ack.rollout_ids):
            record = self.results.find(rollout_id)
            if record is not None and record.has_ended and record.run_id == ack.run_id:
                self.results.forget(record)
                acked.append(rollout_id)
            else:
                unknown.append(rollout_id)
        return RolloutAcked(acked=tuple(acked), unknown=tuple(unknown))

    def state(self, rollout_id: str) -> bytes:
        """A `Rollout` as JSON."""
        record = self.results.get(rollout_id)
        return record.ended_json or rollout_json(record, self.results.instance_id, record.status)

    async def cancel(self, rollout_id: str) -> bytes:
        """End a rollout that has not ended; one that has stays as it is. The state afterwards, as JSON."""
        record = self.results.get(rollout_id)
        task = self._running.get(rollout_id)
        if task is not None:
            task.cancel()
            await asyncio.wait({task}, timeout=self._settings.drain_s)
        elif not record.has_ended:
            del self._queue[rollout_id]
            self._end_cancelled(record, "cancelled before it started")
        return record.ended_json or rollout_json(record, self.results.instance_id, record.status)

    def expire(self) -> None:
        """Forget results that nobody fetched for long."""
        forgotten = self.results.expire(before_s=self._clock() - self._settings.finished_expiry_s)
        if forgotten:
            log.warning("results_expired", count=forgotten)

    def begin_drain(self) -> None:
        """Take no more rollouts, and let every long poll answer now."""
        self._draining = True
        for run in self.results.runs():
            run.wake()

    async def drain(self) -> None:
        """Cancel what has not ended and wait for it, within `settings.drain_s`."""
        self.begin_drain()
        for record, _ in self._queue.values():
            self._end_cancelled(record, "the task app stopped before it started")
        self._queue.clear()
        tasks = set(self._running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self._settings.drain_s)

    async def _wait_for_news(self, run_id: str, after: int, wait_s: float) -> None:
        """Until something ended since `after`, nothing is left to wait for, or the time is over."""
        try:
            async with asyncio.timeout(wait_s):
                while (run := self.results.run(run_id)) and not any(run.since(after)):
                    if not run.unfinished or self._draining:
                        return
                    await run.changed.wait()
        except TimeoutError:
            return

    def _check_room(self, new: int) -> None:
        settings, hint = self._settings, "acknowledge finished rollouts (POST /rollouts/ack) or delete some"
        free = settings.max_rollouts_held - len(self.results)
        if new > free:
            raise CapacityReached(f"{new} new rollouts, but only {max(0, free)} more can be held", hint=hint)
        if self.results.held_bytes >= settings.max_held_bytes:
            raise CapacityReached(
                f"{self.results.held_bytes} bytes of results are held, of {settings.max_held_bytes}",
                hint=hint,
            )

    def _sort(self, batch: RolloutBatch) -> tuple[list[tuple[int, RolloutRequest, bytes]], list[str]]:
        """New requests with their place in the batch, and the ids of those seen before."""
        new: dict[str, tuple[int, RolloutRequest, bytes]] = {}
        known: list[str] = []
        for index, request in enumerate(batch.rollouts):
            digest, rollout_id = _digest(request), request.rollout_id
            record = self.results.find(rollout_id)
            earlier = record.digest if record else new[rollout_id][2] if rollout_id in new else None
            if earlier is None:
                new[rollout_id] = (index, request, digest)
            elif earlier == digest:
                known.append(rollout_id)
            else:
                raise Conflict(
                    f"rollout {rollout_id!r} was accepted with another body",
                    where=f"rollouts.{index}.rollout_id",
                    hint="a new rollout needs a new id",
                )
        return list(new.values()), known

    def _start_queued(self) -> None:
        while self._queue and len(self._running) < self._settings.max_concurrent_rollouts:
            _, (record, worker) = self._queue.popitem(last=False)
            record.status = "running"
            task = asyncio.get_running_loop().create_task(self._run(record, worker))
            self._running[record.rollout_id] = task
            task.add_done_callback(partial(self._ended, record, worker))

    async def _run(self, record: Record, worker: RLRolloutWorker) -> tuple[RolloutStatus, bytes]:
        try:
            with boundary(f"rollout {record.rollout_id}"):
                await worker.run_episode()
                return "finished", self._finished(record, worker.trajectory())
        except TaskAppError as exc:
            return "failed", self._failed(record, exc)

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
            self._end_broken(record, task.exception())
        else:
            status, body = task.result()
            self.results.end(record, status, body, now_s=self._clock())

    def _finished(self, record: Record, trajectory: Trajectory) -> bytes:
        log.info(
            "rollout_finished",
            run=record.run_id,
            rollout=record.rollout_id,
            stop_reason=trajectory.stop_reason.value,
            decisions=len(trajectory.steps),
            outcome=trajectory.outcome_reward,
        )
        return rollout_json(record, self.results.instance_id, "finished", trajectory=trajectory)

    def _failed(self, record: Record, exc: TaskAppError) -> bytes:
        done = exc.decisions_done if isinstance(exc, EpisodeFailed) else 0
        log.warning(
            "rollout_failed",
            run=record.run_id, rollout=record.rollout_id, code=exc.code, detail=exc.detail, decisions=done,
        )  # fmt: skip
        failure = RolloutFailure(code=exc.code, detail=encodable(exc.detail), decisions_done=done)
        return rollout_json(record, self.results.instance_id, "failed", failure=failure)

    def _end_broken(self, record: Record, exc: BaseException | None) -> None:
        failure = RolloutFailure(code="internal_error", detail="an error inside the task app; see its log")
        body = rollout_json(record, self.results.instance_id, "failed", failure=failure)
        self.results.end(record, "failed", body, now_s=self._clock())
        # Last: a log that cannot be written (stderr is closed) is such a fault too.
        log.error("rollout_broken", run=record.run_id, rollout=record.rollout_id, exc_info=exc)

    def _end_cancelled(self, record: Record, detail: str, *, decisions_done: int = 0) -> None:
        failure = RolloutFailure(code="cancelled", detail=detail, decisions_done=decisions_done)
        body = rollout_json(record, self.results.instance_id, "cancelled", failure=failure)
        self.results.end(record, "cancelled", body, now_s=self._clock())


def _digest(request: RolloutRequest) -> bytes:
    """Of the whole request but the key, which pydantic masks: a retry may carry a fresh one."""
    # Not model_dump_json: a config may hold half a character, which its plug-in is yet to refuse.
    text = json.dumps(request.model_dump(mode="json"))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
