"""The interactions of a service: for the episode loop (`opened`), and as sessions that clients ask."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from task_app.errors import CapacityReached, InvalidRequest, UnknownName, boundary
from task_app.interactions.live import Calls, LiveInteraction, loop_in_thread
from task_app.plugins import InteractionEntry, PolicyContext
from task_app.protocols import BaseInteraction
from task_app.sessions.registry import SessionLock
from task_app.settings import Settings

# At the end of the service, for what is still open.
_CLOSE_S = 5.0


@runtime_checkable
class ConnectedInteraction(Protocol):
    """An interaction of ours that uses what the service has: its client session, its list of hosts."""

    def check(self, settings: Settings) -> None:
        """Whether it could be used here, when the service starts; raises TaskAppError."""

    def connect(self, context: PolicyContext) -> None:
        """Told before its first call."""


class Interactions:
    """The interactions of the operator's file, and the running ones.

    Args:
        entries: by name.
        settings: bounds.
        make_context: of the service, for an episode's id.
    """

    def __init__(
        self,
        entries: Mapping[str, InteractionEntry],
        settings: Settings,
        make_context: Callable[[str], PolicyContext],
    ) -> None:
        self._entries = entries
        self._settings = settings
        self._make_context = make_context
        self._open: set[LiveInteraction] = set()

    def __len__(self) -> int:
        """How many are not finalised yet."""
        return len(self._open)

    def named(self, name: str | None, *, where: str = "") -> InteractionEntry:
        """The entry that a request means.

        Raises:
            UnknownName, InvalidRequest: none; or no name is given, and there is not exactly one.
        """
        place = where + "name"
        if not self._entries:
            raise InvalidRequest(
                "this task app has no interactions",
                where=place,
                hint="the operator starts it with --interactions FILE",
            )
        if name is None and len(self._entries) == 1:
            return next(iter(self._entries.values()))
        if name is None:
            known = ", ".join(sorted(self._entries))
            raise InvalidRequest(
                f"no interaction is named, and there are {len(self._entries)}: {known}", where=place
            )
        if name not in self._entries:
            raise UnknownName("interaction", name, self._entries, where=place)
        return self._entries[name]

    @asynccontextmanager
    async def opened(
        self, name: str | None, kwargs: Mapping[str, Any], *, rollout_id: str, ground_truth: Any = None
    ) -> AsyncIterator[LiveInteraction]:
        """Start one, and finalise it on every way out.

        Args:
            name: of its entry; None where there is one alone.
            kwargs: of the data row.
            rollout_id: of the episode; its instance_id begins with it.
            ground_truth: of the request, where `kwargs` holds none.

        Raises:
            UnknownName, InvalidRequest: there is none such.
            CapacityReached: too many hang.
            InteractionFailed: it did not start.
        """
        live = self.live(name, kwargs, rollout_id=rollout_id, ground_truth=ground_truth)
        try:
            await live.start()
            yield live
        finally:
            await live.close()

    def live(
        self, name: str | None, kwargs: Mapping[str, Any], *, rollout_id: str, ground_truth: Any = None
    ) -> LiveInteraction:
        """One that is not started yet, for who cannot use `opened`; errors as there but for the last."""
        entry = self.named(name)
        self._refuse_when_many_hang()
        if ground_truth is not None:
            kwargs = {"ground_truth": ground_truth, **kwargs}
        context = self._make_context(rollout_id)
        # Another attempt at the same rollout is another episode.
        instance_id = f"{rollout_id}/{secrets.token_hex(8)}"
        calls = Calls(
            entry,
            instance_id,
            kwargs,
            connect=lambda made: _connect(made, context),
            at_most_bytes=self._settings.max_interaction_bytes,
        )
        with boundary(f"a thread for interaction {entry.name!r}"):  # out of threads, or of descriptors
            loop = (
                asyncio.get_running_loop()
                if entry.never_blocks
                else loop_in_thread(f"interaction {entry.name}")
            )
        live = LiveInteraction(
            entry.name, calls, loop, deadline_s=self._settings.interaction_deadline_s, on_end=self._ended
        )
        self._open.add(live)
        return live

    async def close(self) -> None:
        """Finalise open interactions, as far as a few moments allow."""
        ending = [live.begin_close() for live in self._open]
        if ending:
            await asyncio.wait(ending, timeout=_CLOSE_S)

    def _ended(self, live: LiveInteraction) -> None:
        if not live.hangs:
            self._open.discard(live)

    def _refuse_when_many_hang(self) -> None:
        hanging = sum(live.hangs for live in self._open)
        if hanging >= self._settings.max_plugin_threads:
            raise CapacityReached(
                f"{hanging} interactions hang in this task app; it starts no more of them",
                hint="its log names them; restart it",
            )


def _connect(interaction: BaseInteraction, context: PolicyContext) -> None:
    if isinstance(interaction, ConnectedInteraction):
        interaction.connect(context)


@dataclass(slots=True, eq=False)
class InteractionSession:
    """`turn` counts its answers. No journal holds it, since nobody can tell what a class keeps."""

    live: LiveInteraction
    turn: int = 0
    lock: SessionLock = field(default_factory=SessionLock)
