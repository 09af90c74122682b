"""Collecting the rollouts of a stage so that a kill loses none that has finished."""

import asyncio
from collections.abc import Sequence

from shared_schemas.rollouts import RolloutRequest
from trainer_backend.collect.collection import with_reused
from trainer_backend.collect.collector import Collection, Collector, Progress
from trainer_backend.rundir.spool import Spool
from trainer_backend.running.stopping import until


async def collected(
    requests: Sequence[RolloutRequest],
    collector: Collector,
    spool: Spool | None,
    tell: Progress,
    stop: asyncio.Event,
) -> Collection | None:
    """All of a plan: what an earlier start has left of it, and the rest from the task apps.

    Args:
        spool: of the stage; None: what is collected would be of no use to a later start.
        tell: how many rollouts have ended, and of how many.

    Returns:
        None when `stop` came first.
    """
    left = {} if spool is None else spool.standing_for(requests)
    rest = [request for request in requests if request.rollout_id not in left]

    def told(done: int, total: int) -> None:
        tell(done + len(left), total + len(left))

    keep = None if spool is None else spool.keep
    found = await until(stop, collector.collect(rest, told, keep))
    return None if found is None else with_reused(found, list(left.values()))
