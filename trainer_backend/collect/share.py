"""One task app's share of a collection: submit within a window, poll, plan again what broke."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

from shared_schemas.rollouts import Rollout, RolloutPage, RolloutRequest
from trainer_backend.collect.answers import CursorExpired
from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.plan import retried
from trainer_backend.errors import TaskAppError

_WAIT_S = 20.0
_PAUSE_S = 0.1
_MAX_ATTEMPTS = 2
# A stage may be larger than what a task app holds. See Share.collect for why that is safe.
_MOST_UNACKED = 256

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Collection:
    """What came of a plan.

    Attributes:
        rollouts: finished ones, sorted by group and sibling, so that arrival order never matters.
        failed: those that failed for good.
        failures: how often each failure code was met, retried ones included.
    """

    rollouts: tuple[Rollout, ...]
    failed: tuple[Rollout, ...] = ()
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def all(self) -> tuple[Rollout, ...]:
        """Finished ones, then failed ones: what is stored and acknowledged."""
        return (*self.rollouts, *self.failed)


class Tally:
    """What has ended so far, over all shares."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress = total, progress
        self._finished: list[Rollout] = []
        self._failed: list[Rollout] = []
        self._failures: Counter[str] = Counter()

    @property
    def ended(self) -> int:
        return len(self._finished) + len(self._failed)

    def finished(self, rollout: Rollout) -> None:
        self._finished.append(rollout)
        self._tell()

    def failed_once(self, rollout: Rollout) -> None:
        self._failures[rollout.failure.code if rollout.failure else rollout.status] += 1

    def failed_for_good(self, rollout: Rollout) -> None:
        self.failed_once(rollout)
        self._failed.append(rollout)
        self._tell()

    def collection(self) -> Collection:
        def place(rollout: Rollout) -> tuple[str, int, str]:
            return rollout.group_id, rollout.sibling, rollout.rollout_id

        return Collection(
            tuple(sorted(self._finished, key=place)), tuple(sorted(self._failed, key=place)), self._failures
        )

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self.ended, self._total)


class Share:
    """What one task app is asked for.

    Args:
        requests: all of one run.
        window: how many of them may be submitted and unfinished at a time.
        tally: is told what ended.
    """

    def __init__(
        self, client: TaskAppClient, requests: Sequence[RolloutRequest], *, window: int, tally: Tally
    ) -> None:
        self._client, self._window, self._tally = client, window, tally
        self._run_id = requests[0].run_id
        self._pending = deque(requests)
        self._waiting: dict[str, RolloutRequest] = {}
        self._unacked: list[str] = []

    async def collect(self) -> None:
        """Run the share to its end, the window full as long as anything is left to submit.

        The last results are acknowledged by the caller, when they are stored. Earlier ones are let go here,
        so that a task app never holds more than the window and _MOST_UNACKED. Nothing is lost by that: a
        trainer that died would ask under another run id (start.run_job), and never for these again.

        Raises:
            TaskAppError: the task app refuses, cannot be reached, or has lost the same rollouts twice.
        """
        cursor: str | None = None
        asked_again = False
        while self._pending or self._waiting:
            await self._submit_into_window()
            page = await self._polled(cursor)
            cursor = page.cursor if page else None
            if page and page.rollouts:
                asked_again = False
                await self._take(page)
            elif page is None or not page.unfinished:
                if asked_again:
                    raise TaskAppError(f"{self._client.url} has lost {len(self._waiting)} rollouts, twice")
                asked_again = True
                await self._client.submit(list(self._waiting.values()))
            else:
                # A task app that is stopping answers long polls at once.
                await asyncio.sleep(_PAUSE_S)

    async def abandon(self) -> None:
        """Cancel what is unfinished, let go of all results. Errors are passed over: one is under way."""
        ids = list(self._waiting)
        await asyncio.gather(*(_tolerantly(self._client.cancel(name)) for name in ids))
        await _tolerantly(self._client.ack(self._run_id, [*ids, *self._unacked]))

    async def _submit_into_window(self) -> None:
        free = self._window - len(self._waiting)
        batch = [self._pending.popleft() for _ in range(min(free, len(self._pending)))]
        if batch:
            # Noted first: a submission that is cut short may have been accepted.
            self._waiting |= {request.rollout_id: request for request in batch}
            await self._client.submit(batch)

    async def _polled(self, cursor: str | None) -> RolloutPage | None:
        """The next page, or None when the task app was started anew and has lost what it had accepted."""
        try:
            return await self._client.poll(self._run_id, cursor, wait_s=_WAIT_S)
        except CursorExpired:
            return None

    async def _take(self, page: RolloutPage) -> None:
        replaced = []
        for rollout in page.rollouts:
            request = self._waiting.pop(rollout.rollout_id, None)
            if request is None:
                continue  # delivered twice
            if rollout.status != "finished" and request.attempt + 1 < _MAX_ATTEMPTS:
                self._tally.failed_once(rollout)
                self._pending.appendleft(retried(request))
                replaced.append(rollout.rollout_id)
                continue
            self._unacked.append(rollout.rollout_id)
            if rollout.status == "finished":
                self._tally.finished(rollout)
            else:
                self._tally.failed_for_good(rollout)
        await self._client.ack(self._run_id, replaced)
        if len(self._unacked) > _MOST_UNACKED:
            await self._client.ack(self._run_id, self._unacked)
            self._unacked = []


async def _tolerantly(call: Coroutine[None, None, None]) -> None:
    try:
        await call
    except TaskAppError:
        return
