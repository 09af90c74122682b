"""Sessions of one kind behind ids: bounded in number, forgotten when idle."""

import asyncio
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

import structlog

from task_app.errors import CapacityReached, SessionBusy, ShuttingDown, UnknownId

# Who may use a session now: one request at a time, and none waits without end.


class SessionLock(asyncio.Lock):
    """A lock with a bounded wait, so that requests behind a hung step get an answer too.

    `on_release` is called whenever the lock is free again.
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
    """Held while it is used; a rollout holds one for as long as it plays."""

    lock: SessionLock


S = TypeVar("S", bound=Session)


class Sessions(Generic[S]):
    """Sessions of one kind, by id.

    Args:
        kind: names them in ids and errors.
        capacity: most at once.
        idle_s: forgotten after this long without a request.
        clock: seconds that only grow.
        on_add: told of every session from now on.
        ended_by: path of the route that ends one; /{kind}/terminate when absent.
        opened, closed: called with every new session before anybody learns its id, and every forgotten one.
    """

    def __init__(
        self,
        kind: str,
        *,
        capacity: int,
        idle_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_add: Callable[[S], None] = lambda session: None,
        ended_by: str | None = None,
        opened: Callable[[str, S], None] = lambda session_id, session: None,
        closed: Callable[[str, S], None] = lambda session_id, session: None,
    ) -> None:
        self._kind = kind
        self._capacity = capacity
        self._idle_s = idle_s
        self._clock = clock
        self._on_add = on_add
        self._ended_by = ended_by or f"/{kind}/terminate"
        self._opened = opened
        self._closed = closed
        self.draining = False
        self._sessions: dict[str, S] = {}
        self._used_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def check_capacity(self, new: int = 1) -> None:
        """Raises CapacityReached when `new` more sessions do not fit, ShuttingDown when none is taken."""
        if self.draining:
            raise ShuttingDown("this task app is stopping and takes no more sessions")
        if len(self._sessions) + new > self._capacity:
            raise CapacityReached(
                f"{self._capacity} {self._kind} sessions are the most that this task app holds; "
                f"{len(self._sessions)} are open, and {new} more do not fit",
                hint=f"POST {self._ended_by} those that are not needed",
            )

    def add(self, session: S) -> str:
        """Keep the session; its new id."""
        self.check_capacity()
        session_id = f"{self._kind}_{secrets.token_hex(8)}"
        self._opened(session_id, session)
        self.adopt(session_id, session)
        self._log_with(session_id)
        return session_id

    def adopt(self, session_id: str, session: S) -> None:
        """Keep a session that has its id already, as if it were used now."""
        self._sessions[session_id] = session
        self._used_s[session_id] = self._clock()
        session.lock.on_release = partial(self._touch, session_id)
        self._on_add(session)

    def get(self, session_id: str, *, where: str) -> S:
        """The session, which counts as used now."""
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownId(self._kind, session_id, where=where, hint="terminated, or idle for too long?")
        self._touch(session_id)
        self._log_with(session_id)
        return session

    def _touch(self, session_id: str) -> None:
        if session_id in self._used_s:
            self._used_s[session_id] = self._clock()

    def _log_with(self, session_id: str) -> None:
        """What this request logs from now on names the session."""
        structlog.contextvars.bind_contextvars(**{f"{self._kind}_id": session_id})

    def find(self, session_id: str) -> S | None:
        """The session if it is there; looking is no use of it."""
        return self._sessions.get(session_id)

    def remove(self, session_id: str, *, where: str) -> S:
        """Forget the session; raises UnknownId."""
        self.get(session_id, where=where)
        return self._forget(session_id)

    def _forget(self, session_id: str) -> S:
        session = self._sessions.pop(session_id)
        del self._used_s[session_id]
        self._closed(session_id, session)
        return session

    def expire(self) -> dict[str, S]:
        """Forget sessions that were idle for too long and return them; a locked session is in use."""
        before_s = self._clock() - self._idle_s
        old = [session_id for session_id, used_s in self._used_s.items() if used_s < before_s]
        idle = [session_id for session_id in old if not self._sessions[session_id].lock.locked()]
        return {session_id: self._forget(session_id) for session_id in idle}
