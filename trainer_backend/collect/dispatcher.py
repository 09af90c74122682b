"""Collects planned rollouts from one or several task apps until each has ended: a queue with retries.

Each task app takes one group after the other; once no group waits, it takes rollouts of another app's group.
A faster app has room again sooner, so it takes more. Several batches share the task apps: the batch of the
lowest rank (the earliest iteration) takes free places first.

A policy's own mistakes are training data. Only infrastructure fails a rollout: it is planned once more under
a new id with the same seeds; if it fails again, it is omitted and counted. A rollout lost with its task app
is requested again under the same id and seeds, from any app. Each rollout counts once, by its first result.
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

# Receives the number of ended rollouts, and the total.
Progress = Callable[[int, int], None]
# Receives each finished rollout, before its task app may forget it.
Keep = Callable[[Rollout], None]

_MAX_ATTEMPTS = 2
# After this many losses a rollout has failed, so that a rollout which crashes task apps cannot crash all.
_MAX_LOSSES = 3
# The most results that a task app holds, even in a large batch. Dispatcher._serve says why dropping more is
# safe.
_MOST_UNACKED = 256
_PAUSE_S = 0.1
# Time to cancel running rollouts when the last batch ends. A task app that does not answer drops them itself
# after its expiry time.
_LAST_WORD_S = 5.0


@dataclass(slots=True, eq=False)
class Entry:
    """An unfinished rollout. `app` plays it (None: it waits); `failed_at` is the app where it failed last."""

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
        """Whether no task app has had the rollout; a result is then of an earlier batch with equal ids."""
        return self.app is None and not self.turn


class Queue:
    """The waiting and ended rollouts of one batch. The queue of the lowest rank is served first."""

    def __init__(
        self, requests: Sequence[RolloutRequest], progress: Progress | None = None, keep: Keep | None = None
    ) -> None:
        self.rank, self.total = requests[0].iteration, len(requests)
        self._progress, self._keep = progress, keep
        # Set when every rollout has ended, or when the batch was withdrawn, perhaps with an `error`.
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
        # The rollouts of each app's current group that no app has yet.
        self._current: dict[TaskAppClient, deque[Entry]] = {}
        # Lost and failed rollouts by the app where they failed last; served before new ones, latest first.
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
        """Take the next rollout for an app; siblings stay together while other groups wait.

        An app that is `alone` (no other is open) also gets rollouts that failed at this app.
        """
        again = [part for place, part in self.again.items() if part and (alone or place is not app)]
        if again:
            return max(again, key=lambda part: next(reversed(part.values())).turn).popitem()[1]
        if not self._current[app] and self._groups:
            self._current[app] = self._groups.popleft()
        group = self._current[app] or max(self._current.values(), key=len)
        return group.popleft() if group else None

    def end(self, entry: Entry, app: TaskAppClient, rollout: Rollout) -> None:
        """Record the final end of a rollout at an app; errors of `keep` and `progress` are raised."""
        if rollout.status == "finished" and self._keep is not None:
            self._keep(rollout)
        if (played := rollout.trajectory) is not None:
            self.apps[app] += AppFigures(finished=1, decisions=len(played.steps), wall_s=played.wall_s)
        del self.unfinished[entry.rollout_id]
        self.ended.append(rollout)
        if self._progress is not None:
            self._progress(len(self.ended), self.total)

    def batch(self) -> Batch:
        """Return the results so far."""
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
        timeout_s: time limit of one batch; `collect` says when its time starts.
        max_running: the most unfinished rollouts at all task apps together; None: no limit.
    """

    def __init__(self, apps: TaskApps, *, timeout_s: float, max_running: int | None = None) -> None:
        if not apps.members:
            raise ValueError("a dispatcher needs at least one task app")
        self.task_apps, self._timeout_s, self._places = apps, timeout_s, max_running or math.inf
        # Queues with unfinished rollouts, in the order in which they are served.
        self.queues: list[Queue] = []
        self._run_id = ""  # of the current batches
        # Serves the task apps from the start of the first current batch to the end of the last.
        self._service: asyncio.Task[None] | None = None
        self._is_closing, self._has_withdrawn = False, False
        self._change, self._is_idle = asyncio.Event(), asyncio.Event()

    async def collect(
        self, requests: Sequence[RolloutRequest], progress: Progress | None = None, keep: Keep | None = None
    ) -> Batch:
        """Run all requests, which belong to one run, to their end.

        An error or a cancellation cancels the batch's running rollouts at the task apps; other batches
        continue unless the task apps caused the error. Earlier iterations are served first, and evaluations,
        whose iteration is 0, before all iterations. The time of a batch starts once no earlier iteration is
        being collected.

        Args:
            progress: receives the number of ended rollouts.
            keep: receives each finished rollout before a task app may forget it; its error ends the batch.
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
        """Tell the task apps to forget stored rollouts. Each app ignores unknown ids."""
        ids = [rollout.rollout_id for rollout in rollouts]
        if ids:
            await asyncio.gather(*(self._ack(app, run_id, ids) for app in self.task_apps.serving))

    async def abort(self, run_id: str) -> None:
        """End the rollouts that a killed process of the run left at the task apps.

        Errors are ignored: a rollout whose gateway is gone ends by itself later.
        """
        await _say_goodbye(app.abort(run_id) for app in self.task_apps.serving)

    # The queue: none of the functions before `_leave` awaits anything.

    def add(self, queue: Queue) -> None:
        """Begin to collect a batch, after batches of the same rank."""
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
            # New results get more weight than those of earlier batches.
            app.weight = (app.weight + 1) / 2
            queue.join(app)
        self.deal()

    def withdraw(self, queue: Queue, error: BaseException | None = None) -> None:
        """End a batch before its last rollout: cancel the rest and drop the results.

        Args:
            error: what the caller that waits for the batch gets as an exception.
        """
        if queue not in self.queues:
            return
        self._has_withdrawn = True
        for entry in queue.unfinished.values():
            if entry.app is not None:
                entry.app.stop(entry.rollout_id)
                entry.app = None
        for app in self.task_apps.members:
            # Also results of other batches, which are on disk by now (`_serve`).
            app.discard_results()
        queue.error = error
        self._remove(queue)
        self.deal()

    def deal(self) -> None:
        """Let task apps with room take rollouts, until no app can or all places are taken.

        The app with the fewest unfinished rollouts for its weight is next. An app without rollouts is always
        next: otherwise it could never show that it has become fast or works again.
        """
        free = self._places - sum(len(app.requests) for app in self.task_apps.members)
        while free > 0 and self._take_one():
            free -= 1

    def end(self, app: TaskAppClient, rollout: Rollout) -> None:
        """Record the end of a rollout, unless it has counted before, or failed while another app has it."""
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
        # While an idle app waits for work, slower ones overtake it, which says nothing about its speed.
        if entry.app is app and all(other.requests for other in self.task_apps.members if other.is_open):
            app.judge(finished=is_finished)
        self._take_back(entry, but_from=app)
        if not is_finished and self._retries(entry, app, rollout):
            app.discard.append(rollout.rollout_id)
        else:
            app.unacked.append(rollout.rollout_id)
            self._close(entry, app, rollout)

    def lose(self, app: TaskAppClient, rollout_ids: Iterable[str], *, why: str) -> None:
        """Put rollouts that a task app has lost back into their queues; `why` is the reason in records."""
        for rollout_id in reversed(list(rollout_ids)):
            entry = self._find(rollout_id)
            if entry is None or entry.app is not app:
                continue  # the loss of another rollout has ended its batch
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
        """Put all rollouts of a task app that stopped answering back into their queues."""
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
        """Return the app's unfinished rollout with a result's place in the plan (PLACE), if there is one."""
        place = rollout.model_dump(include={*PLACE})
        entries = (entry for queue in self.queues for entry in queue.unfinished.values())
        same = [
            one for one in entries if one.app is app and one.request.model_dump(include={*PLACE}) == place
        ]
        return same[0] if len(same) == 1 else None

    def _note_unknown(self, rollout: Rollout) -> None:
        """Count and report an invalid result of an unknown request, which `find_missing` finds later."""
        assert rollout.failure is not None, "read_page makes it a failure"
        if self.queues:
            self.queues[0].failures[rollout.failure.code] += 1
        self.task_apps.tell(f"{rollout.failure.detail}; no request can be found for this result")

    def _take_one(self) -> bool:
        """Let one task app take a rollout; return False if no app can."""
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
        """Take a rollout from its app. Unless that is `but_from`, also cancel the rollout there."""
        if entry.app is None:
            del entry.queue.again[entry.failed_at][entry.rollout_id]
        elif entry.app is but_from:
            but_from.take_back(entry.rollout_id)
        else:
            entry.app.stop(entry.rollout_id)
        entry.app = None

    def _retries(self, entry: Entry, app: TaskAppClient, rollout: Rollout) -> bool:
        """Count a failure; return whether the rollout is planned once more."""
        queue = entry.queue
        # A cancelled rollout means that its task app is stopping, which is no fault of the rollout.
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
        """End a rollout for good. An error of `keep` or `progress` ends its batch."""
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
        """Withdraw a batch if it is unfinished; end the service with the last batch."""
        if any(other is not queue for other in self.queues):
            self.withdraw(queue)
            self._set_clocks()
        elif self._service is not None:
            self._is_closing = True
            self._is_idle.set()
            await asyncio.shield(self._service)

    def _set_clocks(self) -> None:
        """Set deadlines for the batches of the lowest rank; batches that wait for them have no deadline."""
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
            # The app forgets results after its expiry time. During a batch, `_serve` finds out whether the
            # app is lost; otherwise the next batch tries the app again.
            if self._service is None:
                self.task_apps.lose(app, error)

    # The service: a loop for each task app.

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
                # Other apps drop unneeded rollouts themselves.
                apps = [app for app in self.task_apps.members if app.fault is None or self._has_withdrawn]
                await _say_goodbye(app.let_go() for app in apps)
            finally:
                self._service, self._run_id, self._is_closing = None, "", False

    async def _serve_all(self) -> None:
        """Serve the task apps until no caller waits for a batch, or no task app answers for too long."""
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
        """Raise TaskAppLost if no task app answers for too long."""
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
        """Serve one task app until cancelled, or until it is lost and its name leads elsewhere.

        The caller acknowledges the last results after storing them. Earlier results are acknowledged here, so
        that a task app holds at most its running rollouts and _MOST_UNACKED results. This is safe: finished
        rollouts are on disk already (`keep`), and a restarted trainer has another run id (start.run_job) and
        never requests them again.
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
        """Find out whether a task app whose page has no results still runs its accepted rollouts."""
        if page.unfinished:  # a task app that is stopping answers long polls at once
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
        """Wait until the app answers; return False if its name leads elsewhere, or to an app that we have.

        Its results count unless another app was faster; rollouts that others have now are cancelled here.
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
                raise TaskAppLost(str(error)) from error  # the app has just restarted: look again
            self._take(app, page)
        await app.let_go()


def _copy_place(request: RolloutRequest) -> dict[str, Any]:
    return request.model_dump(include={"rollout_id", *PLACE})


def _record_loss(request: RolloutRequest, instance_id: str, why: str) -> Rollout:
    """Return the record of a rollout that no task app could finish."""
    detail = f"{_MAX_LOSSES} times a task app was lost with it; the last one: {why}"
    return Rollout(
        **_copy_place(request),
        instance_id=instance_id,
        status="failed",
        failure=RolloutFailure(code=TaskAppLost.code, detail=detail),
    )


def _missing(queues: Sequence[Queue]) -> str:
    """Describe how many rollouts of these batches have not ended."""
    total, ended = sum(queue.total for queue in queues), sum(len(queue.ended) for queue in queues)
    return f"{total - ended} of {total} rollouts were not finished"


async def _say_goodbye(calls: Iterable[Coroutine[None, None, None]]) -> None:
    """Await calls to task apps for at most `_LAST_WORD_S`, and ignore their errors."""

    async def tolerantly(call: Coroutine[None, None, None]) -> None:
        try:
            await call
        except* TaskAppError:
            pass

    with suppress(TimeoutError):
        async with asyncio.timeout(_LAST_WORD_S):
            await asyncio.gather(*map(tolerantly, calls))
