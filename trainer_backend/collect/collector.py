"""Collects planned rollouts from one or several task apps until each has ended.

An episode that ended for a reason of the policy's is data. Only infrastructure fails a rollout; such a one
is planned once more with the same seeds, then left out and counted.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared_schemas.rollouts import Rollout, RolloutRequest
from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.plan import retried, shared_out
from trainer_backend.errors import TaskAppError

_WAIT_S = 20.0
_MAX_ATTEMPTS = 2

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Collection:
    """What came of a plan.

    Attributes:
        rollouts: finished ones, sorted by rollout id, so that arrival order never matters.
        failed: those that failed for good.
        failures: how often each failure code was met, retried ones included.
    """

    rollouts: tuple[Rollout, ...]
    failed: tuple[Rollout, ...] = ()
    failures: Counter[str] = field(default_factory=Counter)


class Collector:
    """Asks the task apps in `clients`; each gets its share of every group."""

    def __init__(self, clients: Sequence[TaskAppClient], *, timeout_s: float) -> None:
        if not clients:
            raise ValueError("a collector needs at least one task app")
        self._clients = tuple(clients)
        self._timeout_s = timeout_s

    async def collect(
        self, requests: Sequence[RolloutRequest], progress: Progress | None = None
    ) -> Collection:
        """Run all requests to their end.

        Raises:
            TaskAppError: a task app is gone or refuses, or `timeout_s` has passed.
        """
        if not requests:
            return Collection(())
        tally = _Tally(len(requests), progress)
        shares = shared_out(requests, len(self._clients))
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.gather(
                    *(
                        self._collect_from(client, share, tally)
                        for client, share in zip(self._clients, shares, strict=True)
                        if share
                    )
                )
        except TimeoutError as error:
            raise TaskAppError(
                f"{len(requests) - tally.ended} of {len(requests)} rollouts were not finished within "
                f"{self._timeout_s:g} s (services.iteration_timeout_s)"
            ) from error
        return tally.collection()

    async def ack(self, run_id: str, rollouts: Sequence[Rollout]) -> None:
        """Let the task apps forget what is stored. Each app ignores ids that it does not know."""
        ids = [rollout.rollout_id for rollout in rollouts]
        if ids:
            await asyncio.gather(*(client.ack(run_id, ids) for client in self._clients))

    async def _collect_from(
        self, client: TaskAppClient, share: Sequence[RolloutRequest], tally: "_Tally"
    ) -> None:
        waiting = {request.rollout_id: request for request in share}
        await client.submit(share)
        cursor: str | None = None
        while waiting:
            page = await client.poll(share[0].run_id, cursor, wait_s=_WAIT_S)
            cursor = page.cursor
            again = []
            for rollout in page.rollouts:
                request = waiting.pop(rollout.rollout_id, None)
                if request is None:
                    continue  # of an earlier plan, or delivered twice
                if rollout.status == "finished":
                    tally.finished(rollout)
                elif request.attempt + 1 < _MAX_ATTEMPTS:
                    tally.failed_once(rollout)
                    again.append(retried(request))
                else:
                    tally.failed_for_good(rollout)
            if again:
                waiting |= {request.rollout_id: request for request in again}
                await client.submit(again)


class _Tally:
    """What has ended so far."""

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
        def by_id(rollout: Rollout) -> tuple[str, int, str]:
            return rollout.group_id, rollout.sibling, rollout.rollout_id

        return Collection(
            tuple(sorted(self._finished, key=by_id)), tuple(sorted(self._failed, key=by_id)), self._failures
        )

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self.ended, self._total)
