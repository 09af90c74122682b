"""Who waits for something new of a job: pages that are open, until it is told here that there is."""

import asyncio
from collections import Counter


class News:
    """Of one event loop. Whoever waits says what he has seen, so nothing is missed between two waits."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self.closed = False

    def seen(self, job_id: str) -> int:
        """What there is by now; to be given to the next `wait`."""
        return self._counts[job_id]

    def tell(self, job_id: str) -> None:
        """There is something new of this job."""
        self._counts[job_id] += 1
        self._wake()

    def close(self) -> None:
        """The service ends: nobody waits any longer."""
        self.closed = True
        self._wake()

    async def wait(self, job_id: str, seen: int, *, at_most_s: float) -> bool:
        """Whether there was something newer than `seen` within that time."""
        try:
            async with asyncio.timeout(at_most_s):
                while self._counts[job_id] == seen and not self.closed:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return self._counts[job_id] != seen

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
