"""One task app of a run: send requests, poll for results, and look for the app if it is lost."""

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import NoReturn

from shared_schemas.rollouts import RolloutPage
from trainer_backend.collect.apps import TaskApps
from trainer_backend.collect.wire import CursorExpired, TaskAppLost
from trainer_backend.collect.work import Desk, QueueEntry, Work
from trainer_backend.errors import TaskAppError

_WAIT_S = 20.0
_PAUSE_S = 0.1
# Interval of attempts to reach a lost task app.
_FIRST_LOOK_S, _MOST_LOOK_S = 0.25, 5.0
# The most results that a task app holds, even in a large stage. Lane.run says why dropping more is safe.
_MOST_UNACKED = 256
# Fewer than the connections of a client, so that requests and polls find one.
_CANCELS_AT_ONCE = 8


class Lane:
    """Serves one task app while anything of a run is collected.

    Args:
        desk: the app's part of the work.
        change: set whenever the app starts or stops answering.
    """

    def __init__(self, apps: TaskApps, desk: Desk, work: Work, change: asyncio.Event) -> None:
        self.desk, self.answers = desk, desk.app.fault is None
        self._apps, self._work, self._change = apps, work, change
        self._app, self._client = desk.app, desk.app.client
        self._cursor: str | None = None
        self._instance = ""
        self._look_s = 0.0
        self._strikes = 0
        self._is_sending = False
        self._send_done = asyncio.Event()
        # Rollouts requested since the last poll began, and the instances that accepted the others.
        self._fresh: set[str] = set()
        self._instances: set[str] = set()

    async def run(self) -> None:
        """Serve until cancelled, or until the app is lost and its name leads elsewhere.

        The caller acknowledges the last results after storing them. Earlier ones are acknowledged here, so
        that a task app holds at most its running rollouts and _MOST_UNACKED results. That is safe: finished
        rollouts are on disk already (`Collector.collect`), and a restarted trainer uses another run id
        (start.run_job) and never asks for these again.
        """
        while not (self._app.retired and self._app.fault):
            try:
                if self._app.fault is None:
                    await self._serve()
                elif not await self._is_back():
                    break
            except* TaskAppLost as errors:
                self._lose(first_of(errors))
        self._apps.forget(self._app)
        self._work.desks.remove(self.desk)

    async def tidy(self, *, lost_too: bool) -> None:
        """Let the app forget what no plan needs, after the last collection. Errors are ignored."""
        if self._app.fault is None or lost_too:
            await tolerantly(self._let_go())

    async def _serve(self) -> NoReturn:
        async with asyncio.TaskGroup() as both:
            both.create_task(self._send())
            both.create_task(self._receive())
        raise AssertionError("neither of the two ever returns")

    async def _send(self) -> None:
        desk = self.desk
        while True:
            desk.wake.clear()
            await self._let_go()
            batch, desk.unsent = desk.unsent, {}
            if batch:
                await self._submit(batch)
            self._send_done.set()  # without a batch too: what was to be sent may have been withdrawn
            await desk.wake.wait()

    async def _submit(self, batch: Mapping[str, QueueEntry]) -> None:
        # Recorded first: a submission that is cut short may have been accepted.
        self.desk.requests |= dict.fromkeys(batch, "")
        self._fresh |= batch.keys()
        self._is_sending = True
        try:
            self._instance = await self._client.submit([entry.request for entry in batch.values()])
        finally:
            self._is_sending = False
        self._note_answer()
        self._instances.add(self._instance)
        for name in batch.keys() & self.desk.requests.keys():
            self.desk.requests[name] = self._instance

    async def _receive(self) -> None:
        desk = self.desk
        while True:
            # Send everything first, so that the app is not idle; during a poll more may be sent.
            while desk.unsent or not desk.requests or self._is_sending:
                self._send_done.clear()
                await self._send_done.wait()
            self._fresh.clear()
            try:
                page = await self._client.poll(self._work.run_id, self._cursor, wait_s=_WAIT_S)
            except CursorExpired as error:
                self._cursor = None
                self._lose_some(self._missing(), str(error))
                continue
            self._note_answer()
            await self._take(page)
            await self._look_for_losses(page)

    async def _take(self, page: RolloutPage) -> None:
        self._cursor = page.cursor
        for rollout in page.rollouts:
            self._work.end(self.desk, rollout)
        self._work.deal()
        results, self.desk.discard = self.desk.discard, []
        if len(self.desk.unacked) > _MOST_UNACKED:
            results, self.desk.unacked = results + self.desk.unacked, []
        await self._ack(results)

    async def _look_for_losses(self, page: RolloutPage) -> None:
        """Find rollouts that the task app accepted before this page and no longer has."""
        if page.rollouts and self._instances <= {page.instance_id}:
            self._strikes = 0
            return  # the usual page, which must not cost more where more is unfinished
        missing = self._missing()
        restarted = [name for name in missing if self.desk.requests[name] != page.instance_id]
        self._instances = set(self.desk.requests.values())
        if restarted:
            self._lose_some(restarted, f"{self._client.url} was started anew")
        elif page.rollouts:
            self._strikes = 0
        elif missing and not page.unfinished:
            message = f"{self._client.url} has lost {len(missing)} rollouts"
            self._strikes += 1
            if self._strikes > 1:
                raise TaskAppLost(f"{message}, twice")
            self._lose_some(missing, message)
        elif missing:
            # A task app that is stopping answers long polls at once.
            await asyncio.sleep(_PAUSE_S)

    def _missing(self) -> list[str]:
        """Return the requests from before the poll that the task app has not answered."""
        return [name for name in self.desk.requests if name not in self._fresh]

    def _lose_some(self, names: Collection[str], why: str) -> None:
        if names:
            self._apps.tell(f"{why}; its {len(names)} unfinished rollouts are asked for again")
        self._work.lose(self.desk, names, why=why)

    def _lose(self, error: BaseException) -> None:
        """Give the rollouts of an app that does not answer to the others, or back to the queue."""
        self._app.fault = str(error)
        self._strikes = 0
        self._apps.tell(
            f"task app lost: {error}; {len(self.desk.entries)} of its rollouts are for the others"
        )
        self._work.lose_all(self.desk, why=str(error))
        if self.answers:
            self.answers = False
            self._change.set()

    async def _is_back(self) -> bool:
        """Try the app until it answers; return False if it never will, or is known under another address.

        Its results count unless another app was faster; rollouts that others have now are cancelled here.
        """
        while True:
            await asyncio.sleep(self._look_s)
            self._look_s = min(max(2 * self._look_s, _FIRST_LOOK_S), _MOST_LOOK_S)
            if self._app.retired:
                return False
            try:
                await self._app.look()
                break
            except TaskAppError as error:  # also a refusal: another service may have its address now
                self._app.fault = str(error)
        if self._apps.is_twin(self._app):
            self._apps.tell(f"{self._client.url} is a task app that has another address already")
            return False
        if self._app.instance_id == self._instance:
            await self._fetch_results()
        else:
            self._cursor = None
            self.desk.stale.clear()
        self._apps.tell(f"task app answers: {self._client.url}")
        self._app.fault = None
        self._work.deal()
        return True

    async def _fetch_results(self) -> None:
        page = None
        while page is None or page.rollouts:
            try:
                page = await self._client.poll(self._work.run_id, self._cursor, wait_s=0.0)
            except CursorExpired as error:
                raise TaskAppLost(str(error)) from error  # it has just restarted: look again
            await self._take(page)
        await self._let_go()

    async def _let_go(self) -> None:
        """Cancel the rollouts that this app may run for no plan, and let it forget results."""
        names = sorted(self.desk.stale)
        for first in range(0, len(names), _CANCELS_AT_ONCE):
            async with asyncio.TaskGroup() as group:
                for name in names[first : first + _CANCELS_AT_ONCE]:
                    group.create_task(self._cancel(name))
        results, self.desk.discard = self.desk.discard, []
        await self._ack([*names, *results])
        self.desk.stale.difference_update(names)

    async def _cancel(self, name: str) -> None:
        try:
            await self._client.cancel(name)
        except TaskAppError as error:  # otherwise it does not know the rollout, which is fine
            if isinstance(error, TaskAppLost):
                raise

    async def _ack(self, names: Sequence[str]) -> None:
        try:
            await self._client.ack(self._work.run_id, names)
        except BaseException:
            self.desk.discard += names  # it may still hold them
            raise

    def _note_answer(self) -> None:
        self._look_s = 0.0
        if not self.answers:
            self.answers = True
            self._change.set()


def first_of(error: BaseException) -> BaseException:
    """Return the first leaf of a group of errors; one is enough for the user."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def tolerantly(call: Coroutine[None, None, None]) -> None:
    """Make a call to a task app and ignore its error."""
    try:
        await call
    except* TaskAppError:
        pass
