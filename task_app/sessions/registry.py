"""Stores sessions of one kind by id: at most a given number, and none that was idle for too long."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, Protocol, TypeVar

import structlog

from task_app.errors import CapacityReached, SessionBusy, ShuttingDown, UnknownId


class SessionLock(asyncio.Lock):
    """A lock for which `async with` waits at most `at_most_s` seconds, and then raises SessionBusy.

    Without the limit, requests that wait for a hung step would never be answered. `on_release` is called
    whenever the lock is released.
    """

    at_most_s = 30.0
    on_release: Callable[[], None] | None = None

    def release(self) -> None:
        super().release()
        if self.on_release is not None:
            self.on_release()

    async def __aenter__(self) -> None:
        if not self.locked():
            await self.acquire()
            return
        try:
            async with asyncio.timeout(self.at_most_s):
                await self.acquire()
        except TimeoutError as exc:
            raise SessionBusy(
                f"an earlier request has held this session for {self.at_most_s:g} s; this one did nothing",
                hint="terminate the session if it hangs",
            ) from exc


class Session(Protocol):
    """A session with a lock. A request holds the lock while it uses the session."""

    lock: SessionLock


S = TypeVar("S", bound=Session)


class Sessions(Generic[S]):
    """The live sessions of one kind, by id.

    Args:
        kind: The kind's name; ids begin with it, and errors mention it.
        capacity: Largest number of sessions.
        idle_s: `expire` removes sessions that were not used for this many seconds.
        on_add: Called with every new or restored session.
        end_path: Path of the route that ends a session; by default /{kind}/terminate.
        on_new: Called with the id and the session, before a new session is added.
        on_remove: Called with the id and the session, after a session was removed.
    """

    def __init__(
        self,
        kind: str,
        *,
        capacity: int,
        idle_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_add: Callable[[S], None] = lambda session: None,
        end_path: str | None = None,
        on_new: Callable[[str, S], None] = lambda session_id, session: None,
        on_remove: Callable[[str, S], object] = lambda session_id, session: None,
    ) -> None:
        self._kind, self._capacity, self._idle_s, self._clock = kind, capacity, idle_s, clock
        self._on_add, self._on_new, self._on_remove = on_add, on_new, on_remove
        self._end_path = end_path or f"/{kind}/terminate"
        self.draining = False
        self._sessions: dict[str, S] = {}
        self._used_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[S]:
        return iter(list(self._sessions.values()))

    def check_capacity(self, new: int = 1) -> None:
        """Check that `new` more sessions can be added.

        Raises:
            CapacityReached: there would be more than `capacity` sessions.
            ShuttingDown: the task app is stopping.
        """
        if self.draining:
            raise ShuttingDown("this task app is stopping and takes no more sessions")
        if len(self._sessions) + new > self._capacity:
            raise CapacityReached(
                f"{self._capacity} {self._kind} sessions are the most that this task app holds; "
                f"{len(self._sessions)} are open, and {new} more do not fit",
                hint=f"POST {self._end_path} those that are not needed",
            )

    def add(self, session: S) -> str:
        self.check_capacity()
        session_id = f"{self._kind}_{secrets.token_hex(8)}"
        self._on_new(session_id, session)
        self.adopt(session_id, session)
        self._bind_log(session_id)
        return session_id

    def adopt(self, session_id: str, session: S) -> None:
        """Add a session under an id that it already has, such as a restored one."""
        self._sessions[session_id] = session
        self._used_s[session_id] = self._clock()
        session.lock.on_release = partial(self._touch, session_id)
        self._on_add(session)

    def get(self, session_id: str, *, where: str) -> S:
        """Return the session, and count this as use. Raises UnknownId if there is no such session."""
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownId(self._kind, session_id, where=where, hint="terminated, or idle for too long?")
        self._touch(session_id)
        self._bind_log(session_id)
        return session

    def _touch(self, session_id: str) -> None:
        if session_id in self._used_s:
            self._used_s[session_id] = self._clock()

    def _bind_log(self, session_id: str) -> None:
        """Add the session's id to all further log lines of the current request."""
        structlog.contextvars.bind_contextvars(**{f"{self._kind}_id": session_id})

    def find(self, session_id: str) -> S | None:
        """Return the session, or None if there is none. This does not count as use."""
        return self._sessions.get(session_id)

    def remove(self, session_id: str, *, where: str) -> S:
        """Remove the session and return it. Raises UnknownId if there is none."""
        self.get(session_id, where=where)
        return self._forget(session_id)

    def _forget(self, session_id: str) -> S:
        session = self._sessions.pop(session_id)
        del self._used_s[session_id]
        self._on_remove(session_id, session)
        return session

    def expire(self) -> dict[str, S]:
        """Remove the sessions that were idle for too long, and return them. A locked session is not idle."""
        before_s = self._clock() - self._idle_s
        old = [session_id for session_id, used_s in self._used_s.items() if used_s < before_s]
        idle = [session_id for session_id in old if not self._sessions[session_id].lock.locked()]
        return {session_id: self._forget(session_id) for session_id in idle}
