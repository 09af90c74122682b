"""Lets task apps replay finished rollouts and take snapshots, from which other rollouts can continue."""

import asyncio
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

from shared_schemas.replay import MOST_SNAPSHOTS, ReplayRequest, ReplayTurn
from shared_schemas.rollouts import Rollout, Start
from trainer_backend.collect.apps import TaskApps
from trainer_backend.collect.plan import Planner
from trainer_backend.collect.wire import ReplayDeparts, TaskAppLost, pick_error
from trainer_backend.errors import TaskAppError

_ATTEMPTS = 2  # to replay an episode; at different task apps if there are several


class Wanted(NamedTuple):
    """A request for snapshots of a finished rollout after the decisions `turns`."""

    rollout: Rollout
    turns: Sequence[int]
    start: Start | None = None
    """The snapshot from which the rollout started; None: it started from the seed of its world."""


async def replay_all(
    apps: TaskApps, planner: Planner, wanted: Sequence[Wanted]
) -> list[dict[int, str] | None]:
    """Call `snapshots_at` for each item, with one running call per task app; return the results."""
    places = count()
    found: dict[int, dict[int, str] | None] = {}

    async def replay_next(lane: int) -> None:
        while (place := next(places)) < len(wanted):
            found[place] = await snapshots_at(apps, planner, *wanted[place], first_app=lane)

    try:
        async with asyncio.TaskGroup() as group:
            for lane in range(max(1, len(apps.serving))):
                group.create_task(replay_next(lane))
    except BaseExceptionGroup as errors:
        raise pick_error(errors) from errors
    return [found[place] for place in range(len(wanted))]


async def snapshots_at(
    apps: TaskApps,
    planner: Planner,
    rollout: Rollout,
    turns: Iterable[int],
    start: Start | None = None,
    *,
    first_app: int = 0,
) -> dict[int, str] | None:
    """Replay a finished rollout at a task app, and return its snapshots after `turns`, keyed by turn.

    Turn 0 is the start of the episode. Return None if no task app answered in two attempts.

    Args:
        start: see `Wanted`.
        first_app: the index of the task app that is tried first.

    Raises:
        TaskAppError: the replayed episode differs from the stored one.
    """
    episode = rollout.trajectory
    assert episode is not None, "it finished"
    env = planner.players.env(planner.source.of_group(rollout.group_id, episode.seed))
    found: dict[int, str] = {}
    places = sorted(set(turns))
    for first in range(0, len(places), MOST_SNAPSHOTS):
        some = tuple(places[first : first + MOST_SNAPSHOTS])
        record = ReplayRequest(
            env_name=env.env_name,
            config=env.config,
            seed=episode.seed,
            start=start,
            turns=tuple(map(ReplayTurn.of, episode.steps[: some[-1]])),
            snapshots=some,
        )
        snapshots = await _replayed(apps, record, rollout.rollout_id, first_app=first_app)
        if snapshots is None:
            return None
        found |= snapshots
    return found


async def _replayed(
    apps: TaskApps, record: ReplayRequest, rollout_id: str, *, first_app: int
) -> dict[int, str] | None:
    for attempt in range(_ATTEMPTS):
        if not (serving := apps.serving):
            return None
        client = serving[(first_app + attempt) % len(serving)]
        try:
            return await client.snapshots(record)
        except TaskAppLost:
            continue
        except ReplayDeparts as error:
            raise played_elsewhere(rollout_id, error.detail) from error
    return None


def played_elsewhere(rollout_id: str, told: str) -> TaskAppError:
    """Return an error which explains that the replay of a rollout differs from the stored episode.

    Args:
        told: the task app's description of the difference.
    """
    return TaskAppError(
        f"{told}: rollout {rollout_id!r} was played in another environment than the task app has, or in "
        "another version of it",
        hint="Start the task app of the version that the run was trained with.",
    )
