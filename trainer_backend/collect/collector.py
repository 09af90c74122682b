"""Collects planned rollouts from one or several task apps until each has ended.

A policy's own mistakes are training data. Only infrastructure fails a rollout: it is planned once more with
the same seeds, then omitted and counted. A task app that stops answering counts as infrastructure too: the
others take its rollouts (work.py), and once it is back it takes work again (lane.py).
"""

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress

from shared_schemas.rollouts import Rollout, RolloutRequest
from trainer_backend.collect.apps import App, TaskApps
from trainer_backend.collect.lane import Lane, first_of, tolerantly
from trainer_backend.collect.wire import TaskAppLost
from trainer_backend.collect.work import (
    Collection,
    Desk,
    Keep,
    Plan,
    Progress,
    Tally,
    Work,
    join_rounds,
    missing,
)
from trainer_backend.errors import TaskAppError
from trainer_backend.garbage import while_a_batch_grows

__all__ = ["Collection", "Collector", "Progress", "join_rounds"]

# Time to cancel running rollouts when the last collection ends. A task app that does not answer drops them
# itself after its expiry time.
_LAST_WORD_S = 5.0


class Collector:
    """Lets the task apps in `apps` take rollouts from one queue, in whole groups where possible.

    Collections of one run may be under way at the same time, in one event loop.

    Args:
        timeout_s: deadline of one collection; `collect` says when its clock runs.
        max_running: limit of unfinished rollouts at all task apps together; None: no limit.
    """

    def __init__(self, apps: TaskApps, *, timeout_s: float, max_running: int | None = None) -> None:
        if not apps.members:
            raise ValueError("a collector needs at least one task app")
        self._apps, self._timeout_s, self._max_running = apps, timeout_s, max_running
        self._crew: _Crew | None = None

    async def collect(
        self,
        requests: Sequence[RolloutRequest],
        progress: Progress | None = None,
        keep: Keep | None = None,
    ) -> Collection:
        """Run all requests, which belong to one run, to their end.

        If an error or a cancellation ends it early, its running rollouts are cancelled at the task apps.
        Other collections go on, but for an error of the task apps, which ends all that are under way.
        Earlier iterations are served first, and evaluations, whose iteration is 0, before all. The clock of
        the deadline runs from the moment when no earlier iteration is under way.

        Args:
            progress: receives the number of ended rollouts.
            keep: receives each finished rollout before a task app may forget it; its error ends the
                collection.
        """
        if not requests:
            return Collection(())
        plan = Plan(requests, Tally(len(requests), progress, keep), rank=requests[0].iteration)
        if self._crew is None or self._crew.over:
            work = Work(plan.run_id, places=self._max_running or math.inf)
            self._crew = _Crew(self._apps, work, timeout_s=self._timeout_s)
        crew = self._crew
        with while_a_batch_grows():
            crew.begin(plan)
            try:
                await plan.done.wait()
            finally:
                await crew.leave(plan)
        if plan.error is not None:
            raise plan.error
        return plan.tally.collection()

    async def ack(self, run_id: str, rollouts: Sequence[Rollout]) -> None:
        """Tell the task apps to forget stored rollouts. Each app ignores unknown ids."""
        ids = [rollout.rollout_id for rollout in rollouts]
        if ids:
            await asyncio.gather(*(self._ack(app, run_id, ids) for app in self._apps.members))

    async def abort(self, run_id: str) -> None:
        """End rollouts of a killed start of the run at the task apps; no caller waits for them.

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
            # It forgets its results itself, after its expiry time. During a collection its lane finds out
            # whether it is lost; else the next collection tries it again.
            if self._crew is None or self._crew.over:
                app.fault = str(error)
                self._apps.tell(f"task app lost: {error}")


class _Crew:
    """A lane for each task app, from the first of the collections under way to the end of the last."""

    def __init__(self, apps: TaskApps, work: Work, *, timeout_s: float) -> None:
        self._apps, self._work, self._timeout_s = apps, work, timeout_s
        self.over = False  # whether it has ended, or is about to: the next collection needs another
        self._change, self._is_idle = asyncio.Event(), asyncio.Event()
        self._clocks: dict[Plan, asyncio.TimerHandle] = {}
        self._lanes = [self._lane(app) for app in apps.members]
        self._task = asyncio.create_task(self._run())

    def begin(self, plan: Plan) -> None:
        self._work.add(plan)
        self._set_clocks()

    async def leave(self, plan: Plan) -> None:
        """Withdraw a plan if it is unfinished; if it is the last one, end the crew."""
        if any(other is not plan for other in self._work.plans):
            self._work.withdraw(plan)
            self._set_clocks()
        else:
            self.over = True
            self._is_idle.set()
            await asyncio.shield(self._task)

    def _lane(self, app: App) -> Lane:
        desk = Desk(app)
        self._work.join(desk)
        return Lane(self._apps, desk, self._work, self._change)

    async def _run(self) -> None:
        error = None
        try:
            await self._serve()
        except ExceptionGroup as errors:
            error = first_of(errors)
        finally:
            self.over = True
            for plan in [*self._work.plans]:
                self._work.withdraw(plan, error)
            self._set_clocks()
            # A last message to each task app; without it the app finds out by itself.
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORD_S):
                    await asyncio.gather(
                        *(lane.tidy(lost_too=self._work.any_withdrawn) for lane in self._lanes)
                    )

    async def _serve(self) -> None:
        """Work until no caller waits for a plan, or no task app answers for too long."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._run_lane(lane)) for lane in self._lanes]

            def take_on(app: App) -> None:
                self._lanes.append(self._lane(app))
                tasks.append(group.create_task(self._run_lane(self._lanes[-1])))

            tasks.append(group.create_task(self._apps.refresh_names(take_on)))
            tasks.append(group.create_task(self._refuse_to_wait_for_ever()))
            await self._is_idle.wait()
            for task in tasks:
                task.cancel()

    async def _run_lane(self, lane: Lane) -> None:
        await lane.run()
        self._lanes.remove(lane)

    def _set_clocks(self) -> None:
        """Let the clock of each plan run that is first in line. One that waits for another has no clock."""
        first = [plan for plan in self._work.plans if plan.rank == self._work.plans[0].rank]
        for plan in [plan for plan in self._clocks if plan not in first]:
            self._clocks.pop(plan).cancel()
        loop = asyncio.get_running_loop()
        for plan in [plan for plan in first if plan not in self._clocks]:
            self._clocks[plan] = loop.call_later(self._timeout_s, self._end_in_time, plan)

    def _end_in_time(self, plan: Plan) -> None:
        reason = f"{missing([plan])} within {self._timeout_s:g} s (services.iteration_timeout_s)"
        self._work.withdraw(plan, TaskAppError(reason))

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
                    f"{self._apps.answers()}; {missing(self._work.plans)}"
                ) from error

    @property
    def _any_answers(self) -> bool:
        return any(lane.answers for lane in self._lanes)
