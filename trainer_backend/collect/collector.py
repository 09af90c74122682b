"""Collects planned rollouts from one or several task apps until each has ended.

An episode that ended for a reason of the policy's is data. Only infrastructure fails a rollout; such a one
is planned once more with the same seeds, then left out and counted.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence

from shared_schemas.rollouts import Rollout, RolloutRequest
from trainer_backend.collect.client import TaskAppClient
from trainer_backend.collect.plan import shared_out
from trainer_backend.collect.share import Collection, Progress, Share, Tally
from trainer_backend.errors import TaskAppError

__all__ = ["Collection", "Collector", "Progress", "joined"]

# For cancelling what runs at the task apps, when a collection ends early.
_ABANDON_S = 5.0


class Collector:
    """Asks the task apps in `clients`; each gets its share of every group.

    Args:
        timeout_s: deadline of one collection.
        max_running: rollouts that may be submitted and unfinished at a time, over all task apps; None is all.
    """

    def __init__(
        self, clients: Sequence[TaskAppClient], *, timeout_s: float, max_running: int | None = None
    ) -> None:
        if not clients:
            raise ValueError("a collector needs at least one task app")
        # With fewer places than task apps, some are not asked.
        self._clients = tuple(clients)[:max_running]
        self._timeout_s, self._max_running = timeout_s, max_running

    async def collect(
        self, requests: Sequence[RolloutRequest], progress: Progress | None = None
    ) -> Collection:
        """Run all requests, which are of one run, to their end.

        Whatever ends it early, a cancellation too: what still runs at the task apps is cancelled there.

        Raises:
            TaskAppError: a task app is gone or refuses, or `timeout_s` has passed.
        """
        if not requests:
            return Collection(())
        tally = Tally(len(requests), progress)
        shares = self._shares(requests, tally)
        try:
            await self._all(shares)
        except BaseException as error:
            await _abandon(shares)
            if isinstance(error, TimeoutError):
                raise TaskAppError(
                    f"{len(requests) - tally.ended} of {len(requests)} rollouts were not finished within "
                    f"{self._timeout_s:g} s (services.iteration_timeout_s)"
                ) from error
            raise
        return tally.collection()

    async def ack(self, run_id: str, rollouts: Sequence[Rollout]) -> None:
        """Let the task apps forget what is stored. Each app ignores ids that it does not know."""
        ids = [rollout.rollout_id for rollout in rollouts]
        if ids:
            await asyncio.gather(*(client.ack(run_id, ids) for client in self._clients))

    def _shares(self, requests: Sequence[RolloutRequest], tally: Tally) -> list[Share]:
        apps = len(self._clients)
        places = self._max_running or len(requests)
        return [
            Share(client, part, window=places // apps + (number < places % apps), tally=tally)
            for number, (client, part) in enumerate(
                zip(self._clients, shared_out(requests, apps), strict=True)
            )
            if part
        ]

    async def _all(self, shares: Sequence[Share]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s), asyncio.TaskGroup() as group:
                for share in shares:
                    group.create_task(share.collect())
        except BaseExceptionGroup as errors:
            # One is enough for the user; its own cause must not be replaced by the group.
            first = errors.exceptions[0]
            raise first from first.__cause__


def joined(rounds: Sequence[Collection]) -> Collection:
    """The collections of one iteration as one, in the order of its rounds."""
    return Collection(
        tuple(rollout for part in rounds for rollout in part.rollouts),
        tuple(rollout for part in rounds for rollout in part.failed),
        sum((part.failures for part in rounds), Counter()),
    )


async def _abandon(shares: Sequence[Share]) -> None:
    try:
        async with asyncio.timeout(_ABANDON_S):
            await asyncio.gather(*(share.abandon() for share in shares))
    except TimeoutError:
        return  # the task app does not answer; it forgets by itself, after its expiry time
