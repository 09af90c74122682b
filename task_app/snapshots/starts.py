"""Starts episodes from a seed or a snapshot. Episodes with the same environment and seed share one reset."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from shared_schemas.rollouts import EnvSpec
from task_app.environment_calls import reset_environment
from task_app.errors import NotReseedable, NotRestorable, SnapshotRefused, boundary
from task_app.protocols import (
    Environment,
    Observation,
    PastDecision,
    ReseedableEnvironment,
    RestorableEnvironment,
    steps_quickly,
)
from task_app.snapshots.envelope import ByteCache
from task_app.threads import Threads, in_thread

# The siblings of a group start directly after one another, so few start states are needed at once.
MAX_WORLDS = 256
MAX_WORLDS_BYTES = 32 << 20

# The observation at an episode's start, and the earlier decisions that the first prompt may show.
StartView = tuple[Observation, Sequence[PastDecision]]


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """The start of an episode; `begin` brings a new environment to the start.

    If the start is a snapshot of another rollout, `parent_rollout_id` is the id of that rollout, and
    `parent_turn` is the number of decisions that the rollout had made before the snapshot.
    """

    begin: Callable[[Environment], Awaitable[StartView]]
    parent_rollout_id: str | None = None
    parent_turn: int | None = None
    is_snapshot: bool = False


def start_at_seed(seed: int, threads: Threads | None = None) -> EpisodeStart:
    """Return a start that resets the environment with `seed`, in a thread because this takes milliseconds."""

    async def begin(environment: Environment) -> StartView:
        return await in_thread(threads, "environment.reset", reset_environment, environment, seed), ()

    return EpisodeStart(begin)


def restore(environment: Environment, state: bytes) -> Observation:
    """Bring a new environment to the state of a snapshot, and return the observation of that moment.

    Raises:
        NotRestorable: the environment has no snapshots.
        SnapshotRefused: the environment cannot continue from this state.
    """
    restorable = require_restorable(environment, where="snapshot")
    with boundary("environment.restore"):
        try:
            return restorable.restore(state)
        except ValueError as exc:
            raise wrap_refusal(environment.name, exc) from exc


def require_restorable(environment: Environment, *, where: str) -> RestorableEnvironment:
    """Return the environment if it can be stored in and restored from snapshots; else raise NotRestorable."""
    if not isinstance(environment, RestorableEnvironment):
        raise NotRestorable("environment", environment.name, where=where)
    return environment


def require_reseedable(environment: Environment, *, where: str) -> None:
    """Raise NotReseedable if the environment's random generator cannot be given another seed."""
    if not isinstance(environment, ReseedableEnvironment):
        raise NotReseedable(
            f"environment {environment.name!r} cannot be given other draws: it has no reseed()",
            where=where,
            hint="leave draws_seed out: its draws then are those of the snapshot's generator, if any",
        )


def reseed(environment: Environment, seed: int) -> None:
    """Give the environment's random generator another seed, which determines all later draws."""
    assert isinstance(environment, ReseedableEnvironment), "checked when the request was accepted"
    with boundary("environment.reseed"):  # without a thread, because this takes microseconds
        environment.reseed(seed)


async def restore_in_thread(environment: Environment, state: bytes, threads: Threads | None) -> Observation:
    """Call `restore` in a thread, or directly if the environment promises quick steps."""
    if steps_quickly(environment):
        return restore(environment, state)
    return await in_thread(threads, "environment.restore", restore, environment, state)


def wrap_refusal(name: str, exc: ValueError) -> SnapshotRefused:
    """Return the SnapshotRefused for a state that the plug-in `name` refused with `exc`."""
    first_line = (str(exc).splitlines() or [""])[0][:300]
    return SnapshotRefused(f"{name!r} cannot continue from this snapshot: {first_line}")


class Worlds:
    """Caches a snapshot of an environment after its reset, by the environment's spec and the seed.

    Later episodes with the same spec and seed restore the snapshot, which takes a tenth of the time.
    """

    def __init__(self) -> None:
        self._cache = ByteCache(at_most=MAX_WORLDS, at_most_bytes=MAX_WORLDS_BYTES)
        self._events: dict[str, asyncio.Event] = {}

    def start(self, env: EnvSpec, seed: int, threads: Threads | None = None) -> EpisodeStart:
        """Return a start with `seed`, for environments that were built from the spec `env`."""
        name = json.dumps([env.env_name, env.config, seed], sort_keys=True)

        async def begin(environment: Environment) -> StartView:
            if not isinstance(environment, RestorableEnvironment):
                return await start_at_seed(seed, threads).begin(environment)
            while (event := self._events.get(name)) is not None:
                await event.wait()
            state = self._cache.get(name)
            if state is not None:
                return await restore_in_thread(environment, state, threads), ()
            return await self._make_world(name, seed, environment, threads)

        return EpisodeStart(begin)

    async def _make_world(
        self, name: str, seed: int, environment: RestorableEnvironment, threads: Threads | None
    ) -> StartView:
        """Reset the environment and cache its snapshot; if this fails, a waiting episode tries the same."""
        event = self._events[name] = asyncio.Event()
        try:
            observation = await in_thread(threads, "environment.reset", reset_environment, environment, seed)
            with boundary("environment.snapshot"):
                self._cache.put(name, environment.snapshot())
            return observation, ()
        finally:
            del self._events[name]
            event.set()
