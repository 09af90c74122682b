"""Stores the state of runs, including which were aborted; a run is all rollouts of one run_id. No I/O.

A run begins with its first accepted rollout, or with an earlier abort. An abort ends the run's unfinished
rollouts. No rollout starts under the run's id until the run is forgotten, `idle_s` after its last event.
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
    """The state of one run.

    `ended_counts` contains the number of ended rollouts by status; `stopped` is the number of rollouts that
    an abort ended. When a rollout ends, `change` is set to wake waiting requests, and then replaced.
    """

    started_at: datetime | None = None
    last_end_at: datetime | None = None
    aborted_at: datetime | None = None
    unfinished: int = 0
    stopped: int = 0
    ended_counts: Counter[RolloutStatus] = field(default_factory=Counter)
    last_use_s: float = 0.0
    change: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def status(self) -> RunState:
        """Return the state; `aborted` only if an abort ended a rollout or came before the first rollout."""
        if self.unfinished:
            return "running"
        if self.aborted_at is not None and (self.started_at is None or self.stopped):
            return "aborted"
        return "completed" if self.ended_counts["finished"] or not self.ended_counts["failed"] else "failed"

    def to_json(self) -> dict[str, Any]:
        """Return the run as JSON; times are UTC, or null for an event that has not happened."""
        finished_at = None if self.unfinished else self.last_end_at
        times = {"started_at": self.started_at, "finished_at": finished_at, "aborted_at": self.aborted_at}
        counts = {status: self.ended_counts[status] for status in ("finished", "failed", "cancelled")}
        return {
            "status": self.status,
            **{name: at.isoformat() if at else None for name, at in times.items()},
            "rollouts": {"unfinished": self.unfinished, **counts},
        }


class Runs:
    """Stores all runs of this instance, by id.

    If a new run would exceed `at_most`, the least recently used run without unfinished rollouts is dropped. A
    run without unfinished rollouts is also dropped after `idle_s`.
    """

    def __init__(self, *, at_most: int, idle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._at_most, self._idle_s, self._clock = at_most, idle_s, clock
        self._runs: dict[str, RunLife] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def get(self, run_id: str) -> RunLife:
        run = self._runs.get(run_id)
        if run is None:
            hint = "no rollout of it was started, or it was long ago"
            raise UnknownId("run", run_id, where="run_id", hint=hint)
        return run

    def find(self, run_id: str) -> RunLife | None:
        return self._runs.get(run_id)

    def check_not_aborted(self, run_id: str, *, where: str) -> None:
        """Raise RunAborted if the run was aborted, because no rollout may then start under its id."""
        run = self._runs.get(run_id)
        if run is not None and run.aborted_at is not None:
            raise RunAborted(
                f"run {run_id!r} was aborted; nothing starts under it any more",
                where=where,
                hint="a new run needs a new run_id",
            )

    def add_rollout(self, run_id: str) -> None:
        """Count an accepted rollout of the run."""
        run = self._touch(run_id)
        run.started_at = run.started_at or datetime.now(UTC)
        run.unfinished += 1

    def end_rollout(self, run_id: str, status: RolloutStatus) -> None:
        """Count an ended rollout of the run, and wake the callers that wait for it."""
        run = self._touch(run_id)
        run.unfinished -= 1
        run.ended_counts[status] += 1
        run.last_end_at = datetime.now(UTC)
        run.change.set()
        run.change = asyncio.Event()

    def abort(self, run_id: str) -> RunLife:
        """Mark the run as aborted, even if it is not known yet; a later call keeps the time of the first."""
        run = self._touch(run_id)
        run.aborted_at = run.aborted_at or datetime.now(UTC)
        return run

    def expire(self) -> int:
        """Forget runs that ended long ago; return their number."""
        before_s = self._clock() - self._idle_s
        old = [name for name, run in self._runs.items() if not run.unfinished and run.last_use_s < before_s]
        for name in old:
            del self._runs[name]
        return len(old)

    def _touch(self, run_id: str) -> RunLife:
        """Return the run, created if it is new, and mark it as the most recently used run."""
        run = self._runs.pop(run_id, None) or RunLife()
        run.last_use_s = self._clock()
        if len(self._runs) >= self._at_most:
            idle = next((name for name, other in self._runs.items() if not other.unfinished), None)
            if idle is not None:
                del self._runs[idle]
        self._runs[run_id] = run
        return run
