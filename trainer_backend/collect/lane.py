"""One task app in one collection: send what it is given, poll, hand on what ended; lost, look for it."""

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import NoReturn

from shared_schemas.rollouts import RolloutPage
from trainer_backend.collect.apps import TaskApps
from trainer_backend.collect.wire import CursorExpired, TaskAppLost
from trainer_backend.collect.work import Desk, Work
from trainer_backend.errors import TaskAppError

_WAIT_S = 20.0
_PAUSE_S = 0.1
# Between two looks at a task app that is lost.
_FIRST_LOOK_S, _MOST_LOOK_S = 0.25, 5.0
# A stage may be larger than what a task app holds. See Lane.run for why that is safe.
_MOST_UNACKED = 256


class Lane:
    """
    Args:
        desk: of this task app.
        changed: is set whenever it begins or ceases to answer.
    """

    def __init__(self, apps: TaskApps, desk: Desk, work: Work, changed: asyncio.Event) -> None:
        self.desk, self.answers = desk, desk.app.lost is None
        self._apps, self._work, self._changed = apps, work, changed
        self._app, self._client = desk.app, desk.app.client
        self._cursor: str | None = None
        self._instance = ""
        self._look_s = 0.0
        self._strikes = 0
        self._sent = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled, or until the app is lost and its name leads elsewhere.

        The last results are acknowledged by the collector's caller, when they are stored. Earlier ones are
        let go here, so that a task app never holds more than it runs and _MOST_UNACKED. Nothing is lost by
        that: what has finished was kept before (`Collector.collect`), and a trainer that died would ask
        under another run id (start.run_job), and never for these again.
        """
        while not (self._app.retired and self._app.lost):
            try:
                if self._app.lost is None:
                    await self._serve()
                elif not await self._is_back():
                    break
            except* TaskAppLost as errors:
                self._lose(first_of(errors))
        self._apps.forget(self._app)

    async def tidy(self) -> None:
        """After the last rollout has ended: stop and let go of what nobody wants from this app any more."""
        if self._app.lost is None:
            names = [*self.desk.unwanted, *self.desk.settled]
            await asyncio.gather(*(tolerantly(self._client.cancel(name)) for name in self.desk.unwanted))
            await tolerantly(self._client.ack(self._work.run_id, names))

    async def abandon(self) -> None:
        """Cancel unfinished rollouts and drop all results. Errors are ignored: another is being raised."""
        ids = [*self.desk.asked, *self.desk.unwanted]
        await asyncio.gather(*(tolerantly(self._client.cancel(name)) for name in ids))
        done = [*ids, *self.desk.settled, *self.desk.unacked]
        await tolerantly(self._client.ack(self._work.run_id, done))

    async def _serve(self) -> NoReturn:
        async with asyncio.TaskGroup() as both:
            both.create_task(self._sending())
            both.create_task(self._receiving())
        raise AssertionError("neither of the two ever returns")

    async def _sending(self) -> None:
        desk = self.desk
        while True:
            desk.wake.clear()
            await self._drop_unwanted()
            batch, desk.unsent = desk.unsent, []
            if batch:
                # Noted first: a submission that is cut short may have been accepted.
                desk.asked |= dict.fromkeys((planned.rollout_id for planned in batch), "")
                self._instance = await self._client.submit([planned.request for planned in batch])
                self._answered()
                for planned in batch:
                    if planned.rollout_id in desk.asked:
                        desk.asked[planned.rollout_id] = self._instance
                self._sent.set()
            await desk.wake.wait()

    async def _receiving(self) -> None:
        desk = self.desk
        while True:
            # First all that it should have, or it would stand idle; while a poll waits, more may be sent.
            while desk.unsent or not desk.asked or "" in desk.asked.values():
                self._sent.clear()
                await self._sent.wait()
            asked = dict(desk.asked)
            try:
                page = await self._client.poll(self._work.run_id, self._cursor, wait_s=_WAIT_S)
            except CursorExpired as error:
                self._cursor = None
                self._lose_some(self._still_missing(asked), str(error))
                continue
            self._answered()
            await self._take(page)
            await self._look_for_losses(page, asked)

    async def _take(self, page: RolloutPage) -> None:
        self._cursor = page.cursor
        for rollout in page.rollouts:
            self._work.end(self.desk, rollout)
        self._work.deal()
        done, self.desk.settled = self.desk.settled, []
        if len(self.desk.unacked) > _MOST_UNACKED:
            done, self.desk.unacked = done + self.desk.unacked, []
        await self._ack(done)

    async def _look_for_losses(self, page: RolloutPage, asked: Mapping[str, str]) -> None:
        """Find rollouts that the task app accepted before this page and no longer has."""
        missing = self._still_missing(asked)
        restarted = [name for name in missing if asked[name] != page.instance_id]
        if restarted:
            self._lose_some(restarted, f"{self._client.url} was started anew")
        elif page.rollouts:
            self._strikes = 0
        elif missing and not page.unfinished:
            told = f"{self._client.url} has lost {len(missing)} rollouts"
            self._strikes += 1
            if self._strikes > 1:
                raise TaskAppLost(f"{told}, twice")
            self._lose_some(missing, told)
        elif missing:
            # A task app that is stopping answers long polls at once.
            await asyncio.sleep(_PAUSE_S)

    def _still_missing(self, asked: Mapping[str, str]) -> list[str]:
        """Return the requests that the task app has not answered and that were not sent again since."""
        return [name for name, instance in asked.items() if self.desk.asked.get(name) == instance]

    def _lose_some(self, names: Collection[str], why: str) -> None:
        if names:
            self._apps.tell(f"{why}; its {len(names)} unfinished rollouts are asked for again")
        self._work.lose(self.desk, names, why=why)

    def _lose(self, error: BaseException) -> None:
        """The app does not answer: whatever it has goes to the others, or waits."""
        self._app.lost = str(error)
        self._strikes = 0
        self.desk.outages += 1
        self.desk.unwanted |= set(self.desk.asked)
        self._apps.tell(f"task app lost: {error}; {len(self.desk.given)} of its rollouts are for the others")
        self._work.lose(self.desk, list(self.desk.given), why=str(error))
        if self.answers:
            self.answers = False
            self._changed.set()

    async def _is_back(self) -> bool:
        """Look until it is there; False: it will not be, or is one that is asked under another address.

        Results that it kept count, where no other app was faster; what others have by now is stopped here.
        """
        while True:
            await asyncio.sleep(self._look_s)
            self._look_s = min(max(2 * self._look_s, _FIRST_LOOK_S), _MOST_LOOK_S)
            if self._app.retired:
                return False
            try:
                await self._app.look()
                break
            except TaskAppError as error:  # also one that refuses: another service may have its address now
                self._app.lost = str(error)
        if self._apps.is_twin(self._app):
            self._apps.tell(f"{self._client.url} is a task app that has another address already")
            return False
        if self._app.instance_id == self._instance:
            await self._fetch_kept()
        else:
            self._cursor = None
            self.desk.unwanted.clear()
        self._apps.tell(f"task app answers: {self._client.url}")
        self._app.lost = None
        self._work.deal()
        return True

    async def _fetch_kept(self) -> None:
        page = None
        while page is None or page.rollouts:
            try:
                page = await self._client.poll(self._work.run_id, self._cursor, wait_s=0.0)
            except CursorExpired as error:
                raise TaskAppLost(str(error)) from error  # started anew just now: look again
            await self._take(page)
        await self._drop_unwanted()

    async def _drop_unwanted(self) -> None:
        names = sorted(self.desk.unwanted)
        for name in names:
            try:
                await self._client.cancel(name)
            except TaskAppLost:
                raise
            except TaskAppError:
                pass  # it does not know it: so much the better
        await self._client.ack(self._work.run_id, names)
        self.desk.unwanted.difference_update(names)

    async def _ack(self, names: Sequence[str]) -> None:
        try:
            await self._client.ack(self._work.run_id, names)
        except BaseException:
            self.desk.settled += names  # it may still hold them
            raise

    def _answered(self) -> None:
        self._look_s = 0.0
        if not self.answers:
            self.answers = True
            self._changed.set()


def first_of(error: BaseException) -> BaseException:
    """The first leaf of a group of errors: one is enough for the user."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def tolerantly(call: Coroutine[None, None, None]) -> None:
    """Make a call to a task app whose error changes nothing."""
    try:
        await call
    except TaskAppError:
        return
