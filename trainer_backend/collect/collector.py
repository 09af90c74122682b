"""Collects planned rollouts from one or several task apps until each has ended.

A policy's own mistakes are training data. Only infrastructure fails a rollout: it is planned once more with
the same seeds, then omitted and counted. A task app that stops answering counts as infrastructure too: the
others take its rollouts (work.py), and once it is back it takes work again (lane.py).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from shared_schemas.rollouts import Rollout, RolloutRequest
from trainer_backend.collect.apps import App, TaskApps
from trainer_backend.collect.lane import Lane, first_of, tolerantly
from trainer_backend.collect.wire import TaskAppLost
from trainer_backend.collect.work import Collection, Desk, Keep, Progress, Tally, Work, join_rounds
from trainer_backend.errors import TaskAppError

__all__ = ["Collection", "Collector", "Progress", "join_rounds"]

# Time to cancel running rollouts when a collection ends. A task app that does not answer drops them itself
# after
# its expiry time.
_LAST_WORD_S = 5.0


class Collector:
    """Lets the task apps in `apps` take rollouts from one queue, in whole groups where possible.

    Args:
        timeout_s: deadline of one collection.
        max_running: limit of unfinished rollouts at all task apps together; None: no limit.
    """

    def __init__(self, apps: TaskApps, *, timeout_s: float, max_running: int | None = None) -> None:
        if not apps.members:
            raise ValueError("a collector needs at least one task app")
        self._apps, self._timeout_s, self._max_running = apps, timeout_s, max_running

    async def collect(
        self,
        requests: Sequence[RolloutRequest],
        progress: Progress | None = None,
        keep: Keep | None = None,
    ) -> Collection:
        """Run all requests, which belong to one run, to their end.

        If an error or a cancellation ends it early, running rollouts are cancelled at the task apps.

        Args:
            progress: receives the number of ended rollouts.
            keep: receives each finished rollout before a task app may forget it; its error ends the
                collection.
        """
        if not requests:
            return Collection(())
        tally = Tally(len(requests), progress, keep)
        work = Work(requests, places=self._max_running or len(requests), tally=tally)
        crew = _Crew(self._apps, work)
        try:
            async with asyncio.timeout(self._timeout_s):
                await crew.work_off()
            await crew.each(Lane.tidy)
        except BaseException as error:
            await crew.each(Lane.abandon)
            if isinstance(error, TimeoutError):
                raise TaskAppError(
                    f"{tally.missing} within {self._timeout_s:g} s (services.iteration_timeout_s)"
                ) from error
            raise
        return tally.collection({desk.app.label: desk.figures() for desk in work.desks})

    async def ack(self, run_id: str, rollouts: Sequence[Rollout]) -> None:
        """Tell the task apps to forget stored rollouts. Each app ignores unknown ids."""
        ids = [rollout.rollout_id for rollout in rollouts]
        if ids:
            await asyncio.gather(*(self._ack(app, run_id, ids) for app in self._apps.members))

    async def abort(self, run_id: str) -> None:
        """End rollouts of a killed start of the run at the task apps; nobody waits for them.

        Errors are ignored: a rollout whose gateway is gone ends by itself, only later.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD_S):
                clients = [app.client for app in self._apps.members if app.fault is None]
                await asyncio.gather(*(tolerantly(client.abort(run_id)) for client in clients))

    async def _ack(self, app: App, run_id: str, ids: Sequence[str]) -> None:
        if app.fault is not None:
            return
        try:
            await app.client.ack(run_id, ids)
        except TaskAppLost as error:
            # It forgets its results itself, after its expiry time. The next collection tries it again.
            app.fault = str(error)
            self._apps.tell(f"task app lost: {error}")


class _Crew:
    """A lane for each task app, in one collection."""

    def __init__(self, apps: TaskApps, work: Work) -> None:
        self._apps, self._work = apps, work
        self._change = asyncio.Event()
        self._lanes: list[Lane] = []

    async def work_off(self) -> None:
        """Work until every rollout has ended, or no task app answers for too long."""
        try:
            async with asyncio.TaskGroup() as group:

                def take_on(app: App) -> asyncio.Task[None]:
                    app.judge_anew()
                    desk = Desk(app)
                    self._work.desks.append(desk)
                    self._lanes.append(Lane(self._apps, desk, self._work, self._change))
                    return group.create_task(self._lanes[-1].run())

                tasks = [take_on(app) for app in self._apps.members]
                refresh = self._apps.refresh_names(lambda app: tasks.append(take_on(app)))
                tasks += [group.create_task(refresh), group.create_task(self._refuse_to_wait_for_ever())]
                self._work.deal()
                await self._work.done.wait()
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as errors:
            first = first_of(errors)
            raise first from first.__cause__  # the group must not replace the cause

    async def each(self, last: Callable[[Lane], Awaitable[None]]) -> None:
        """Send each task app a last message, within a time limit; without it the app finds out by itself."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD_S):
                await asyncio.gather(*(last(lane) for lane in self._lanes))

    async def _refuse_to_wait_for_ever(self) -> None:
        """Raise TaskAppLost if no task app answers for too long."""
        while True:
            self._change.clear()
            try:
                async with asyncio.timeout(None if self._any_answers else self._apps.lost_wait_s):
                    await self._change.wait()
            except TimeoutError as error:
                raise TaskAppLost(
                    f"no task app answers, for {self._apps.lost_wait_s:g} s (services.task_app_wait_s): "
                    f"{self._apps.answers()}; {self._work.tally.missing}"
                ) from error

    @property
    def _any_answers(self) -> bool:
        return any(lane.answers for lane in self._lanes)
