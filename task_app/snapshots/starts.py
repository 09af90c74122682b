"""How an episode begins: in the world of a seed, made once for all siblings, or at a snapshot."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shared_schemas.rollouts import EnvSpec
from task_app.errors import NotRestorable, SnapshotRefused, boundary
from task_app.protocols import Environment, Observation, PastDecision, RestorableEnvironment
from task_app.snapshots.envelope import Held
from task_app.threads import Threads, in_thread

# Siblings are started one after the other, so few worlds are wanted at once.
WORLDS_HELD = 256
WORLDS_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Begun:
    """The known facts at an episode's start; `past` is history that its first prompt shows."""

    observation: Observation
    past: tuple[PastDecision, ...] = ()


Begin = Callable[[Environment], Awaitable[Begun]]


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """`begin` brings a fresh environment to the start; the parent is told by whoever took the snapshot."""

    begin: Begin
    parent_rollout_id: str | None = None
    parent_turn: int | None = None


def world_of(seed: int, threads: Threads | None = None) -> EpisodeStart:
    """The world of a seed, made in a thread: it takes milliseconds, and other episodes go on meanwhile."""

    async def begin(environment: Environment) -> Begun:
        with boundary("environment.reset"):
            return Begun(await in_thread(threads, "environment.reset", environment.reset, seed))

    return EpisodeStart(begin)


def restored(environment: Environment, state: bytes) -> Observation:
    """Bring a fresh environment to this state; the observation that was shown there.

    Raises:
        NotRestorable, SnapshotRefused: the environment cannot be restored, or not from this.
    """
    if not isinstance(environment, RestorableEnvironment):
        raise NotRestorable("environment", environment.name, where="snapshot")
    with boundary("environment.restore"):
        try:
            return environment.restore(state)
        except ValueError as exc:
            raise impossible(environment.name, exc) from exc


async def resumed(environment: Environment, state: bytes, threads: Threads | None) -> Observation:
    """`restored` where a step would run too: at once where that is quick, else in a thread."""
    if getattr(environment, "quick_step", False):
        return restored(environment, state)
    return await in_thread(threads, "environment.restore", restored, environment, state)


def impossible(name: str, exc: ValueError) -> SnapshotRefused:
    """Make our error from a plug-in's refusal of a state."""
    first_line = (str(exc).splitlines() or [""])[0][:300]
    return SnapshotRefused(f"{name!r} cannot go on from this snapshot: {first_line}")


class Worlds:
    """Generates the world of a seed once for its siblings, who restore it at a tenth of the price."""

    def __init__(self) -> None:
        self._held = Held(at_most=WORLDS_HELD, at_most_bytes=WORLDS_BYTES)
        self._making: dict[str, asyncio.Event] = {}

    def start(self, env: EnvSpec, seed: int, threads: Threads | None = None) -> EpisodeStart:
        """The start in the world of `seed`, for environments that were built from `env`."""
        name = json.dumps([env.env_name, env.config, seed], sort_keys=True)

        async def begin(environment: Environment) -> Begun:
            if not isinstance(environment, RestorableEnvironment):
                return await world_of(seed, threads).begin(environment)
            while (making := self._making.get(name)) is not None:
                await making.wait()
            state = self._held.get(name)
            if state is not None:
                return Begun(await resumed(environment, state, threads))
            return await self._make(name, seed, environment, threads)

        return EpisodeStart(begin)

    async def _make(
        self, name: str, seed: int, environment: RestorableEnvironment, threads: Threads | None
    ) -> Begun:
        """The first sibling makes the world; should it fail, the next one tries."""
        made = self._making[name] = asyncio.Event()
        try:
            with boundary("environment.reset"):
                observation = await in_thread(threads, "environment.reset", environment.reset, seed)
            with boundary("environment.snapshot"):
                self._held.put(name, environment.snapshot())
            return Begun(observation)
        finally:
            del self._making[name]
            made.set()
