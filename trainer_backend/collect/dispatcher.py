"""Distributes planned rollouts to one or several task apps, collects the results, and retries failures.

A task app is given the rollouts of one group after the other. Once every group has been given to an app, an
app with room gets waiting rollouts from the group of another app. A faster app has room more often, so it
gets more rollouts. Several batches share the task apps: free slots go first to the batch of the lowest rank,
which is the earliest iteration.

Mistakes of the policy are training data and never fail a rollout; only infrastructure does. A failed rollout
is retried once, under a new id with the same seeds. If it fails again, it is left out of the batch and
counted. If a task app is lost, its unfinished rollouts are requested again from any app, under the same ids
and seeds. If a rollout has several results, only the first one counts.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from shared_schemas.rollouts import Rollout, RolloutFailure, RolloutPage, RolloutRequest
from trainer_backend.collect.apps import TaskApps
from trainer_backend.collect.arrival import PLACE, WRONG_ROLLOUT, checked
from trainer_backend.collect.batch import AppFigures, Batch, in_order
from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.plan import retried
from trainer_backend.collect.wire import CursorExpired, TaskAppLost, pick_error
from trainer_backend.errors import TaskAppError
from trainer_backend.garbage import while_a_batch_grows

# Called with the number of ended rollouts, and the number of all rollouts of the batch.
Progress = Callable[[int, int], None]
# Called with each finished rollout, before its task app may delete the result.
Keep = Callable[[Rollout], None]

_MAX_ATTEMPTS = 2
# A rollout fails once it was lost this many times. Otherwise a rollout that crashes task apps would crash all
# of them, one after the other.
_MAX_LOSSES = 3
# Beyond this number of unacknowledged results, a task app may delete them before the batch ends.
# `Dispatcher._serve` explains why that is safe.
_MOST_UNACKED = 256
_PAUSE_S = 0.1
# Time limit for cancelling running rollouts when the last batch ends. A task app that does not answer in time
# deletes the rollouts itself after its expiry time.
_LAST_WORD_S = 5.0


@dataclass(slots=True, eq=False)
class Entry:
    """An unfinished rollout of a queue.

    `app` is the task app that runs the rollout, or None while the rollout waits. `failed_at` is the app where
    the rollout failed last. `turn` is 0 until the rollout is put back into its queue. `turn` then numbers the
    rollouts of the queue in the order in which they were put back.
    """

    request: RolloutRequest
    queue: "Queue"
    app: TaskAppClient | None = None
    failed_at: TaskAppClient | None = None
    failures: int = 0
    losses: int = 0
    turn: int = 0

    @property
    def rollout_id(self) -> str:
        return self.request.rollout_id

    @property
    def is_new(self) -> bool:
        """Whether the rollout was never given to a task app.

        A result of a new rollout can only come from an earlier batch with the same ids.
        """
        return self.app is None and not self.turn


class Queue:
    """The unfinished and the ended rollouts of one batch. The queue of the lowest rank is served first."""

    def __init__(
        self, requests: Sequence[RolloutRequest], progress: Progress | None = None, keep: Keep | None = None
    ) -> None:
        self.rank, self.total = requests[0].iteration, len(requests)
        self._progress, self._keep = progress, keep
        # Set when every rollout has ended, or when the batch was withdrawn. `error` is the reason for
        # withdrawing, if there was one.
        self.done = asyncio.Event()
        self.error: BaseException | None = None
        self.clock: asyncio.Timeout | None = None
        self.ended: list[Rollout] = []
        self.failures: Counter[str] = Counter()
        self.apps: dict[TaskAppClient, AppFigures] = {}
        self.unfinished = {request.rollout_id: Entry(request, self) for request in requests}
        groups: dict[str, deque[Entry]] = {}
        for entry in self.unfinished.values():
            groups.setdefault(entry.request.group_id, deque()).append(entry)
        self._groups = deque(groups.values())
        # For each app, the rollouts of its current group that have not been given to an app yet.
        self._current: dict[TaskAppClient, deque[Entry]] = {}
        # Rollouts that were put back, by the app where they failed last (None: only lost). They are served
        # before new rollouts, the one that was put back last first.
        self.again: dict[TaskAppClient | None, dict[str, Entry]] = {}
        self._turns = 0

    @property
    def waits(self) -> bool:
        return bool(self._groups) or any(self._current.values()) or any(self.again.values())

    def join(self, app: TaskAppClient) -> None:
        self._current[app], self.apps[app] = deque(), AppFigures()

    def put_back(self, entry: Entry) -> None:
        self._turns += 1
        entry.turn = self._turns
        self.again.setdefault(entry.failed_at, {})[entry.rollout_id] = entry

    def next_for(self, app: TaskAppClient, *, alone: bool) -> Entry | None:
        """Remove and return the next waiting rollout for an app, or None if there is none for this app.

        Rollouts that were put back come first. Then the app gets the rest of its group, a group that no app
        has started, or rollouts from the group of another app, in this order. A rollout that failed at this
        app is returned only if `alone`, which means that no other app is available.
        """
        again = [part for place, part in self.again.items() if part and (alone or place is not app)]
        if again:
            return max(again, key=lambda part: next(reversed(part.values())).turn).popitem()[1]
        if not self._current[app] and self._groups:
            self._current[app] = self._groups.popleft()
        group = self._current[app] or max(self._current.values(), key=len)
        return group.popleft() if group else None

    def end(self, entry: Entry, app: TaskAppClient, rollout: Rollout) -> None:
        """Record that a rollout has ended and is not retried. Errors from `keep` and `progress` propagate."""
        if rollout.status == "finished" and self._keep is not None:
            self._keep(rollout)
        if (played := rollout.trajectory) is not None:
            self.apps[app] += AppFigures(finished=1, decisions=len(played.steps), wall_s=played.wall_s)
        del self.unfinished[entry.rollout_id]
        self.ended.append(rollout)
        if self._progress is not None:
            self._progress(len(self.ended), self.total)

    def batch(self) -> Batch:
        """Return the results that have arrived until now."""
        return Batch(
            in_order(item for item in self.ended if item.status == "finished"),
            in_order(item for item in self.ended if item.status != "finished"),
            self.failures,
            {app.label: replace(work, answers=app.fault is None) for app, work in self.apps.items()},
        )


class Dispatcher:
    """Distributes rollouts to task apps, in whole groups where possible.

    Several batches of one run may be collected at the same time, in one event loop.

    Args:
        timeout_s: time limit of one batch; `collect` describes when the time starts.
        max_running: maximum number of rollouts that run at all task apps together; None: no limit.
    """

    def __init__(self, apps: TaskApps, *, timeout_s: float, max_running: int | None = None) -> None:
        if not apps.members:
            raise ValueError("a dispatcher needs at least one task app")
        self.task_apps, self._timeout_s, self._places = apps, timeout_s, max_running or math.inf
        # Queues with unfinished rollouts, in the order in which they are served.
        self.queues: list[Queue] = []
        self._run_id = ""  # of the current batches
        # The background task that serves the task apps. It runs while at least one batch is being collected.
        self._service: asyncio.Task[None] | None = None
        self._is_closing, self._has_withdrawn = False, False
        self._change, self._is_idle = asyncio.Event(), asyncio.Event()

    async def collect(
        self, requests: Sequence[RolloutRequest], progress: Progress | None = None, keep: Keep | None = None
    ) -> Batch:
        """Request all rollouts of a batch, wait until each has ended, and return the results.

        All requests must belong to one run. An error or a cancellation cancels the batch's running rollouts
        at the task apps. Other batches continue, unless the error came from the task apps. Batches of earlier
        iterations are served first. An evaluation has iteration 0, so it is served before all iterations. The
        time limit of a batch starts once no earlier iteration is being collected.

        Args:
            progress: called with the number of ended rollouts and the total, whenever a rollout has ended.
            keep: called with each finished rollout, before the task app may delete it. If `keep` raises an
                error, the batch ends with this error.

        Raises:
            TaskAppError: the time limit was exceeded, or the task apps failed.
        """
        if not requests:
            return Batch()
        queue = Queue(requests, progress, keep)
        with while_a_batch_grows():
            while self._is_closing and self._service is not None:
                await asyncio.shield(self._service)
            self.add(queue)
            self._service = self._service or asyncio.create_task(self._run())
            try:
                async with asyncio.timeout(None) as queue.clock:
                    self._set_clocks()
                    await queue.done.wait()
            except TimeoutError as error:
                if queue.unfinished:  # otherwise the last rollout ended at the same moment
                    reason = (
                        f"{_missing([queue])} within {self._timeout_s:g} s (services.iteration_timeout_s)"
                    )
                    raise TaskAppError(reason) from error
            finally:
                await self._leave(queue)
        if queue.error is not None:
            raise queue.error
        return queue.batch()

    async def ack(self, run_id: str, rollouts: Sequence[Rollout]) -> None:
        """Tell all task apps to delete these rollouts, which are stored now. Each app ignores unknown ids."""
        ids = [rollout.rollout_id for rollout in rollouts]
        if ids:
            await asyncio.gather(*(self._ack(app, run_id, ids) for app in self.task_apps.serving))

    async def abort(self, run_id: str) -> None:
        """End the rollouts that a killed earlier process of the run left running at the task apps.

        Errors are ignored, because a rollout ends by itself once its gateway does not answer.
        """
        await _say_goodbye(app.abort(run_id) for app in self.task_apps.serving)

    # Functions on the queues. They contain no `await`, so each of them runs without interruption.

    def add(self, queue: Queue) -> None:
        """Start to collect a batch. Batches of the same rank that were added earlier are served first."""
        run_id = next(iter(queue.unfinished.values())).request.run_id
        if not self._run_id:
            self._run_id, self._has_withdrawn = run_id, False
            self._change, self._is_idle = asyncio.Event(), asyncio.Event()
            for app in self.task_apps.members:
                app.begin_run(run_id, self._change)
        if run_id != self._run_id:
            raise ValueError(f"run {run_id!r} must wait until run {self._run_id!r} is collected")
        for rollout_id in queue.unfinished:
            if self._find(rollout_id) is not None:
                raise ValueError(f"rollout {rollout_id!r} is being collected already")
        self.queues.append(queue)
        self.queues.sort(key=lambda queue: queue.rank)
        for app in self.task_apps.members:
            # Moves the weight towards 1, so that results of this batch count more than those of earlier
            # batches.
            app.weight = (app.weight + 1) / 2
            queue.join(app)
        self.deal()

    def withdraw(self, queue: Queue, error: BaseException | None = None) -> None:
        """End a batch early: cancel its running rollouts, and let the task apps delete its results.

        Args:
            error: the exception that the waiting call of `collect` raises.
        """
        if queue not in self.queues:
            return
        self._has_withdrawn = True
        for entry in queue.unfinished.values():
            if entry.app is not None:
                entry.app.stop(entry.rollout_id)
                entry.app = None
        for app in self.task_apps.members:
            # This also deletes results of other batches, which are on disk by now (`_serve`).
            app.discard_results()
        queue.error = error
        self._remove(queue)
        self.deal()

    def deal(self) -> None:
        """Give waiting rollouts to task apps, until no app has room or `max_running` is reached.

        Each rollout goes to the app with the lowest ratio of unfinished rollouts to `weight`. An app without
        rollouts has the ratio 0 at any weight, so a slow or failing app is tried again and can recover.
        """
        free = self._places - sum(len(app.requests) for app in self.task_apps.members)
        while free > 0 and self._take_one():
            free -= 1

    def end(self, app: TaskAppClient, rollout: Rollout) -> None:
        """Process one result from a task app.

        The result is ignored if its rollout has ended already. A failure is also ignored if this app no
        longer runs the rollout.
        """
        entry = self._find(rollout.rollout_id) if rollout.rollout_id else self._find_at_place(app, rollout)
        is_wrong = rollout.failure is not None and rollout.failure.code == WRONG_ROLLOUT
        if entry is None and is_wrong and rollout.rollout_id not in {*app.stale, *app.discard, *app.unacked}:
            self._note_unknown(rollout)
        if entry is None and not rollout.rollout_id:
            return
        app.stale.discard(rollout.rollout_id)
        if entry is not None and rollout.status == "finished":
            rollout = checked(entry.request, rollout)
        elif entry is not None and is_wrong:
            rollout = rollout.model_copy(update=_copy_place(entry.request))
        is_finished = rollout.status == "finished"
        if entry is None or entry.is_new or (entry.app is not app and not is_finished):
            app.discard.append(rollout.rollout_id)
            return
        # Apps are compared only while all of them have work: while a fast app is idle, slower apps finish
        # more.
        if entry.app is app and all(other.requests for other in self.task_apps.members if other.is_open):
            app.judge(finished=is_finished)
        self._take_back(entry, but_from=app)
        if not is_finished and self._retries(entry, app, rollout):
            app.discard.append(rollout.rollout_id)
        else:
            app.unacked.append(rollout.rollout_id)
            self._close(entry, app, rollout)

    def lose(self, app: TaskAppClient, rollout_ids: Iterable[str], *, why: str) -> None:
        """Put rollouts that a task app has lost back into their queues; fail them after _MAX_LOSSES losses.

        Args:
            why: the reason that the record of a failed rollout contains.
        """
        for rollout_id in reversed(list(rollout_ids)):
            entry = self._find(rollout_id)
            if entry is None or entry.app is not app:
                continue  # its batch was withdrawn when another rollout in this loop was closed
            entry.app = None
            if app.take_back(rollout_id):
                entry.losses += 1
                entry.queue.failures[TaskAppLost.code] += 1
                entry.queue.apps[app].losses += 1
            if entry.losses < _MAX_LOSSES:
                entry.queue.put_back(entry)
            else:
                self._close(entry, app, _record_loss(entry.request, app.instance_id, why))
        self.deal()

    def lose_all(self, app: TaskAppClient, *, why: str) -> None:
        """Call `lose` for all rollouts of a task app that stopped answering, and count an outage."""
        for queue in self.queues:
            queue.apps[app].outages += 1
        app.stale |= set(app.accepted)
        self.lose(app, list(app.requests), why=why)

    def _find(self, rollout_id: str) -> Entry | None:
        for queue in self.queues:
            if rollout_id in queue.unfinished:
                return queue.unfinished[rollout_id]
        return None

    def _find_at_place(self, app: TaskAppClient, rollout: Rollout) -> Entry | None:
        """Return the rollout to which a result without an id belongs, found by the fields of PLACE.

        Return None unless exactly one unfinished rollout of the app matches.
        """
        place = rollout.model_dump(include={*PLACE})
        entries = (entry for queue in self.queues for entry in queue.unfinished.values())
        same = [
            one for one in entries if one.app is app and one.request.model_dump(include={*PLACE}) == place
        ]
        return same[0] if len(same) == 1 else None

    def _note_unknown(self, rollout: Rollout) -> None:
        """Count and report an invalid result that cannot be matched to a request.

        Its rollout stays unfinished until `TaskAppClient.find_missing` reports it as lost.
        """
        assert rollout.failure is not None, "read_page makes it a failure"
        if self.queues:
            self.queues[0].failures[rollout.failure.code] += 1
        self.task_apps.tell(f"{rollout.failure.detail}; no request can be found for this result")

    def _take_one(self) -> bool:
        """Give one waiting rollout to a task app; return False if none waits or no app has room."""
        takers = sorted(
            (app for app in self.task_apps.members if app.has_room),
            key=lambda app: len(app.requests) / app.weight,
        )
        alone = sum(app.is_open for app in self.task_apps.members) == 1
        for queue in filter(lambda queue: queue.waits, self.queues):
            for app in takers:
                entry = queue.next_for(app, alone=alone)
                if entry is not None:
                    entry.app = app
                    app.take(entry.request)
                    return True
        return False

    def _take_back(self, entry: Entry, *, but_from: TaskAppClient) -> None:
        """Remove a rollout from the app that runs it, and cancel it there unless that app is `but_from`."""
        if entry.app is None:
            del entry.queue.again[entry.failed_at][entry.rollout_id]
        elif entry.app is but_from:
            but_from.take_back(entry.rollout_id)
        else:
            entry.app.stop(entry.rollout_id)
        entry.app = None

    def _retries(self, entry: Entry, app: TaskAppClient, rollout: Rollout) -> bool:
        """Count a failure. If attempts are left, queue a retry under a new id and return True."""
        queue = entry.queue
        # A task app cancels its rollouts when it stops, so this counts as a loss and not as a failure.
        if rollout.status == "cancelled":
            entry.losses += 1
        else:
            entry.failures += 1
            entry.failed_at = app
        queue.failures[rollout.failure.code if rollout.failure else rollout.status] += 1
        if entry.failures == _MAX_ATTEMPTS or entry.losses == _MAX_LOSSES:
            return False
        del queue.unfinished[entry.rollout_id]
        entry.request = retried(entry.request)
        queue.unfinished[entry.rollout_id] = entry
        queue.put_back(entry)
        return True

    def _close(self, entry: Entry, app: TaskAppClient, rollout: Rollout) -> None:
        """End a rollout without a retry. If `keep` or `progress` raises an error, withdraw the batch."""
        try:
            entry.queue.end(entry, app, rollout)
        except Exception as error:
            self.withdraw(entry.queue, error)
        else:
            if not entry.queue.unfinished:
                self._remove(entry.queue)

    def _remove(self, queue: Queue) -> None:
        self.queues.remove(queue)
        queue.done.set()

    async def _leave(self, queue: Queue) -> None:
        """Withdraw a batch if it is unfinished. If it was the last batch, stop serving the task apps."""
        if any(other is not queue for other in self.queues):
            self.withdraw(queue)
            self._set_clocks()
        elif self._service is not None:
            self._is_closing = True
            self._is_idle.set()
            await asyncio.shield(self._service)

    def _set_clocks(self) -> None:
        """Start the time limits of the batches of the lowest rank, and remove the deadlines of all others."""
        now = asyncio.get_running_loop().time()
        for queue in self.queues:
            is_first = queue.rank == self.queues[0].rank
            if queue.clock is None or queue.clock.expired():
                continue
            if is_first != (queue.clock.when() is not None):
                queue.clock.reschedule(now + self._timeout_s if is_first else None)

    async def _ack(self, app: TaskAppClient, run_id: str, ids: Sequence[str]) -> None:
        try:
            await app.ack(run_id, ids)
        except TaskAppLost as error:
            # The app deletes the results itself after its expiry time. While a batch is collected, `_serve`
            # notices a lost app. Otherwise the loss is recorded here, and the next batch tries the app again.
            if self._service is None:
                self.task_apps.lose(app, error)

    # The service: one loop per task app.

    async def _run(self) -> None:
        error = None
        try:
            await self._serve_all()
        except ExceptionGroup as errors:
            error = pick_error(errors)
        finally:
            self._is_closing = True
            for queue in [*self.queues]:
                self.withdraw(queue, error)
            try:
                # An app that does not answer is asked only after a batch was withdrawn; it deletes its
                # results itself.
                apps = [app for app in self.task_apps.members if app.fault is None or self._has_withdrawn]
                await _say_goodbye(app.let_go() for app in apps)
            finally:
                self._service, self._run_id, self._is_closing = None, "", False

    async def _serve_all(self) -> None:
        """Run one loop per task app until no batch is left, or until no app has answered for too long."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._serve(app)) for app in self.task_apps.members]

            def join(app: TaskAppClient) -> None:
                app.begin_run(self._run_id, self._change)
                for queue in self.queues:
                    queue.join(app)
                tasks.append(group.create_task(self._serve(app)))

            tasks.append(group.create_task(self.task_apps.refresh_names(join)))
            tasks.append(group.create_task(self._refuse_to_wait_for_ever()))
            await self._is_idle.wait()
            for task in tasks:
                task.cancel()

    async def _refuse_to_wait_for_ever(self) -> None:
        """Wait until no task app has answered for `lost_wait_s`, and then raise TaskAppLost."""
        apps = self.task_apps
        while True:
            self._change.clear()
            any_answers = any(app.answers for app in apps.members)
            try:
                async with asyncio.timeout(None if any_answers else apps.lost_wait_s):
                    await self._change.wait()
            except TimeoutError as error:
                raise TaskAppLost(
                    f"no task app answers, for {apps.lost_wait_s:g} s (services.task_app_wait_s): "
                    f"{apps.answers()}; {_missing(self.queues)}"
                ) from error

    async def _serve(self, app: TaskAppClient) -> None:
        """Exchange requests and results with one task app.

        Ends when the task is cancelled, or when the app is lost and DNS no longer returns its address. The
        caller of `collect` acknowledges the last results after it has stored them. Earlier results are
        acknowledged here, so that a task app stores only about _MOST_UNACKED results. This is safe, because
        `keep` has written the finished rollouts to disk. A restarted trainer never requests them again,
        because `start.run_job` gives it another run id.
        """
        while not (app.retired and app.fault):
            try:
                if app.fault is None:
                    async with asyncio.TaskGroup() as both:
                        both.create_task(app.keep_sending())
                        both.create_task(self._receive(app))
                elif not await self._is_back(app):
                    break
            except* TaskAppLost as errors:
                error = pick_error(errors)
                app.strikes = 0
                self.task_apps.lose(app, error, f"; {len(app.requests)} of its rollouts are for the others")
                self.lose_all(app, why=str(error))
                app.note_answer(answers=False)
        self.task_apps.drop(app)

    async def _receive(self, app: TaskAppClient) -> NoReturn:
        while True:
            try:
                page = await app.next_page()
            except CursorExpired as error:
                app.cursor = None
                self._lose_some(app, app.find_missing(), str(error))
                continue
            self._take(app, page)
            if restarted := app.find_restarted(page.instance_id):
                self._lose_some(app, restarted, f"{app.url} was restarted")
            elif page.rollouts:
                app.strikes = 0
            elif missing := app.find_missing():
                await self._look_for_losses(app, missing, page)

    def _take(self, app: TaskAppClient, page: RolloutPage) -> None:
        for rollout in page.rollouts:
            self.end(app, rollout)
        self.deal()
        if len(app.unacked) > _MOST_UNACKED:
            app.discard_results()

    async def _look_for_losses(self, app: TaskAppClient, missing: Sequence[str], page: RolloutPage) -> None:
        """Check whether a task app that returned a page without results still runs its rollouts.

        Raises:
            TaskAppLost: the app had lost rollouts in two successive checks.
        """
        if page.unfinished:  # pause, because a task app that is stopping answers long polls immediately
            await asyncio.sleep(_PAUSE_S)
            return
        app.strikes += 1
        message = f"{app.url} has lost {len(missing)} rollouts"
        if app.strikes > 1:
            raise TaskAppLost(f"{message}, twice")
        self._lose_some(app, missing, message)

    def _lose_some(self, app: TaskAppClient, names: Collection[str], why: str) -> None:
        if names:
            self.task_apps.tell(f"{why}; its {len(names)} unfinished rollouts are asked for again")
        self.lose(app, names, why=why)

    async def _is_back(self, app: TaskAppClient) -> bool:
        """Wait until a lost app answers, and make it available again.

        If the app was not restarted, its results are fetched first, and the rollouts that were given to
        other apps are cancelled at this app. Return False if DNS no longer returns its address, or if the
        address leads to a task app that another client serves already.
        """
        if not await app.look():
            return False
        others = {other.instance_id for other in self.task_apps.serving if other is not app}
        if app.instance_id and app.instance_id in others:
            self.task_apps.tell(f"{app.url} is a task app that has another address already")
            return False
        if app.is_same_process:
            await self._fetch_results(app)
        self.task_apps.tell(f"task app answers: {app.url}")
        app.fault = None
        self.deal()
        return True

    async def _fetch_results(self, app: TaskAppClient) -> None:
        page = None
        while page is None or page.rollouts:
            try:
                page = await app.poll_run(wait_s=0.0)
            except CursorExpired as error:
                raise TaskAppLost(str(error)) from error  # the app has restarted; wait for it again
            self._take(app, page)
        await app.let_go()


def _copy_place(request: RolloutRequest) -> dict[str, Any]:
    return request.model_dump(include={"rollout_id", *PLACE})


def _record_loss(request: RolloutRequest, instance_id: str, why: str) -> Rollout:
    """Return a failed rollout for a request that task apps have lost _MAX_LOSSES times."""
    detail = f"{_MAX_LOSSES} times a task app was lost with it; the last one: {why}"
    return Rollout(
        **_copy_place(request),
        instance_id=instance_id,
        status="failed",
        failure=RolloutFailure(code=TaskAppLost.code, detail=detail),
    )


def _missing(queues: Sequence[Queue]) -> str:
    """Return a sentence with the number of rollouts of these batches that have not ended."""
    total, ended = sum(queue.total for queue in queues), sum(len(queue.ended) for queue in queues)
    return f"{total - ended} of {total} rollouts were not finished"


async def _say_goodbye(calls: Iterable[Coroutine[None, None, None]]) -> None:
    """Await all calls to task apps for at most _LAST_WORD_S seconds, and ignore their errors."""

    async def tolerantly(call: Coroutine[None, None, None]) -> None:
        try:
            await call
        except* TaskAppError:
            pass

    with suppress(TimeoutError):
        async with asyncio.timeout(_LAST_WORD_S):
            await asyncio.gather(*map(tolerantly, calls))
