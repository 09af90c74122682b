"""Starts and finalises interactions, for episodes and for sessions over HTTP."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from task_app.errors import CapacityReached, InvalidRequest, UnknownName, boundary
from task_app.interactions.live import Calls, LiveInteraction, loop_in_thread
from task_app.plugins import InteractionEntry, PolicyContext
from task_app.sessions.registry import SessionLock
from task_app.settings import Settings

# Time limit for finalising open interactions when the service ends.
_CLOSE_S = 5.0


class Interactions:
    """Starts interactions by the names of their entries, and keeps track of those that run."""

    def __init__(
        self,
        entries: Mapping[str, InteractionEntry],
        settings: Settings,
        make_context: Callable[[str], PolicyContext],
    ) -> None:
        self._entries, self._settings, self._make_context = entries, settings, make_context
        self._open: set[LiveInteraction] = set()

    def __len__(self) -> int:
        """Return the number of interactions that are not finalised yet."""
        return len(self._open)

    def entry(self, name: str | None, *, where: str = "") -> InteractionEntry:
        """Return the entry with this name; None stands for the only entry.

        Raises:
            InvalidRequest: no entry has the name, or the name is None and there is not exactly one entry.
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
    async def open(
        self, name: str | None, kwargs: Mapping[str, Any], *, rollout_id: str, ground_truth: Any = None
    ) -> AsyncIterator[LiveInteraction]:
        """Start an interaction, and finalise it when the context ends.

        `kwargs` are the interaction_kwargs of the data row. If they contain no ground truth, the interaction
        gets the argument `ground_truth`. The interaction's instance_id begins with `rollout_id`.
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
        """Return an interaction that is not started yet, for callers that cannot use `open`.

        The caller must start and close it; the arguments are those of `open`.

        Raises:
            CapacityReached: too many interactions hang in this task app.
        """
        entry = self.entry(name)
        hung = sum(live.hangs for live in self._open)
        if hung >= self._settings.max_plugin_threads:
            raise CapacityReached(
                f"{hung} interactions hang in this task app; it starts no more of them",
                hint="its log names them; restart it",
            )
        if ground_truth is not None:
            kwargs = {"ground_truth": ground_truth, **kwargs}
        # A random suffix, because a second attempt at the same rollout is another episode.
        instance_id = f"{rollout_id}/{secrets.token_hex(8)}"
        context, at_most_bytes = self._make_context(rollout_id), self._settings.max_interaction_bytes
        calls = Calls(entry, instance_id, kwargs, context=context, at_most_bytes=at_most_bytes)
        loop = asyncio.get_running_loop()
        if not entry.never_blocks:
            with boundary(f"a thread for interaction {entry.name!r}"):  # no more threads or descriptors
                loop = loop_in_thread(f"interaction {entry.name}")
        deadline_s = self._settings.interaction_deadline_s

        def forget(live: LiveInteraction) -> None:
            if not live.hangs:
                self._open.discard(live)

        live = LiveInteraction(entry.name, calls, loop, deadline_s=deadline_s, on_end=forget)
        self._open.add(live)
        return live

    async def close(self) -> None:
        """Finalise all running interactions, but wait for them only a few seconds."""
        tasks = [live.begin_close() for live in self._open]
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_S)


@dataclass(slots=True, eq=False)
class InteractionSession:
    """An interaction that a client calls over HTTP.

    `turn` is the number of answers so far. The journal of sessions leaves out these sessions, because the
    state of an interaction object cannot be stored.
    """

    live: LiveInteraction
    turn: int = 0
    lock: SessionLock = field(default_factory=SessionLock)
