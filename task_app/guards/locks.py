"""Who may use a session now: one request at a time, and none waits without end."""

import asyncio
from collections.abc import Callable

from task_app.errors import SessionBusy


class SessionLock(asyncio.Lock):
    """A lock that is waited for so long and no longer: what waits behind a hung step must be answered too.

    `on_release` is told whenever it is free again.
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
