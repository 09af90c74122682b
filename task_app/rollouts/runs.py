"""What the service remembers of runs (the rollouts of one run_id): their state, and the aborted. No I/O.

A run is known from its first rollout, or from an abort that came before it. An aborted run stays aborted:
what is unfinished ends, and nothing starts under its id until it is forgotten, `idle_s` after its last event.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from shared_schemas.rollouts import RolloutStatus
from task_app.errors import Conflict, UnknownId

RunState = Literal["running", "completed", "failed", "aborted"]


class RunAborted(Conflict):
    code = "run_aborted"


@dataclass(slots=True)
class RunLife:
    """One run: `unfinished` are queued or running, `ended` counts the others, an abort ended `stopped`.

    `changed` is set, and replaced, whenever one ends: waiters never poll.
    """

    started_at: datetime | None = None
    last_end_at: datetime | None = None
    aborted_at: datetime | None = None
    unfinished: int = 0
    stopped: int = 0
    ended: Counter[RolloutStatus] = field(default_factory=Counter)
    touched_s: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def status(self) -> RunState:
        """`aborted` only if the abort prevented something: a run that was complete stays so."""
        if self.unfinished:
            return "running"
        if self.aborted_at is not None and (self.started_at is None or self.stopped):
            return "aborted"
        return "completed" if self.ended["finished"] or not self.ended["failed"] else "failed"

    def to_json(self) -> dict[str, Any]:
        """`started_at`, `finished_at`, `aborted_at` are UTC, null where it has not happened."""
        finished_at = None if self.unfinished else self.last_end_at
        times = {"started_at": self.started_at, "finished_at": finished_at, "aborted_at": self.aborted_at}
        counts = {status: self.ended[status] for status in ("finished", "failed", "cancelled")}
        return {
            "status": self.status,
            **{name: at.isoformat() if at else None for name, at in times.items()},
            "rollouts": {"unfinished": self.unfinished, **counts},
        }


class Runs:
    """All runs of this instance, by id.

    Args:
        at_most: runs remembered; beyond it the one that was untouched for longest, and is not running, goes.
        idle_s: an ended run is forgotten after this long.
        clock: seconds that only grow.
        now: the time of day, for people; nothing depends on it.
    """

    def __init__(
        self,
        *,
        at_most: int,
        idle_s: float,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._at_most = at_most
        self._idle_s = idle_s
        self._clock = clock
        self._now = now
        self._runs: dict[str, RunLife] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def get(self, run_id: str) -> RunLife:
        run = self._runs.get(run_id)
        if run is None:
            raise UnknownId(
                "run", run_id, where="run_id", hint="nothing was started or aborted under it, or long ago"
            )
        return run

    def find(self, run_id: str) -> RunLife | None:
        return self._runs.get(run_id)

    def check_not_aborted(self, run_id: str, *, where: str) -> None:
        """Raises RunAborted when nothing may start under this id."""
        run = self._runs.get(run_id)
        if run is not None and run.aborted_at is not None:
            raise RunAborted(
                f"run {run_id!r} was aborted; nothing starts under it any more",
                where=where,
                hint="a new run needs a new run_id",
            )

    def started(self, run_id: str) -> None:
        """A rollout of the run was accepted."""
        run = self._touch(run_id)
        run.started_at = run.started_at or self._now()
        run.unfinished += 1

    def ended(self, run_id: str, status: RolloutStatus) -> None:
        """Note how a rollout of the run ended, and wake the callers that wait for it."""
        run = self._touch(run_id)
        run.unfinished -= 1
        run.ended[status] += 1
        run.last_end_at = self._now()
        run.changed.set()
        run.changed = asyncio.Event()

    def abort(self, run_id: str) -> RunLife:
        """Mark the run, also one that is not known yet; marking it again changes nothing."""
        run = self._touch(run_id)
        run.aborted_at = run.aborted_at or self._now()
        return run

    def expire(self) -> int:
        """Forget what ended long ago; how many."""
        before_s = self._clock() - self._idle_s
        old = [name for name, run in self._runs.items() if not run.unfinished and run.touched_s < before_s]
        for name in old:
            del self._runs[name]
        return len(old)

    def _touch(self, run_id: str) -> RunLife:
        """The run, made when it is new; the last in order of use."""
        run = self._runs.pop(run_id, None) or RunLife()
        run.touched_s = self._clock()
        if len(self._runs) >= self._at_most:
            idle = next((name for name, other in self._runs.items() if not other.unfinished), None)
            if idle is not None:
                del self._runs[idle]
        self._runs[run_id] = run
        return run
