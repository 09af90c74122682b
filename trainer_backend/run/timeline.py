"""Measures when rollouts were collected, when the learner worked, and how long each waited for the other."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from trainer_backend.core.metric import Metric, Row

Lane = Literal["collect", "learn"]
_KEPT = 64  # ended spans kept per lane, several times as many as ever run at once
# Metrics with this prefix are times of day, which make no curve.
PREFIX = "timeline/"


METRICS = (
    Row(
        Metric("time/wait_collect_s", "seconds in which the learner waited for rollouts", "waits",
               "the learner"),
        Metric("time/wait_learner_s", "seconds in which it worked while nothing was collected", "waits",
               "the collectors"),
        when="since the last line",
    ),
    Row(
        Metric("perf/overlap", "share of the working time in which both worked; 0 where they take turns "
               "(`training.max_staleness = 0`)"),
    ),
    Row(
        Metric("timeline/collect_start", "when collecting began"),
        Metric("timeline/collect_end", "when it ended"),
        Metric("timeline/learn_start", "when credit, update and publish began"),
        Metric("timeline/learn_end", "when these ended"),
        when="seconds since 1970",
        note="An iteration that had to wait for the one before it begins at that one's end. Rows of "
        "evaluations have the first two. [The page of a run](dashboard.md) draws them; the sinks do not get "
        "them, since a time of day makes no curve",
    ),
)  # fmt: skip


@dataclass(slots=True)
class Span:
    """Start and end of some work, in seconds of the timeline's clock. `end` is 0 until the work ends."""

    start: float
    end: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Timeline:
    """Measures the two lanes of a run's work, collecting and learning, which may overlap in time.

    Args:
        clock: returns seconds since 1970, and never goes back.
    """

    def __init__(self, *, clock: Callable[[], float] | None = None) -> None:
        offset = time.time() - time.monotonic()
        self._clock = clock or (lambda: offset + time.monotonic())
        self._running: dict[Lane, int] = {"collect": 0, "learn": 0}
        self._ended: dict[Lane, deque[Span]] = {"collect": deque(maxlen=_KEPT), "learn": deque(maxlen=_KEPT)}
        self._alone: dict[Lane, float] = {"collect": 0.0, "learn": 0.0}
        self._both, self._counted_to = 0.0, self._clock()

    @contextmanager
    def working(self, lane: Lane) -> Iterator[Span]:
        """Count the lane as working until the context is left.

        If earlier work of the same lane ends while this work runs, the span begins only when the earlier work
        ends, because this work had to wait for it.
        """
        span = Span(self._count())
        self._running[lane] += 1
        try:
            yield span
        finally:
            begin, span.end = span.start, self._count()
            self._running[lane] -= 1
            before = [other.end for other in self._ended[lane] if other.start < begin]
            span.start = max([begin, *before])
            self._ended[lane].append(Span(begin, span.end))

    def waits(self) -> dict[str, float]:
        """Return metrics since the last call: how long each lane waited for the other, and their overlap."""
        self._count()
        worked = self._both + sum(self._alone.values())
        waits = {
            "time/wait_collect_s": self._alone["collect"],
            "time/wait_learner_s": self._alone["learn"],
            "perf/overlap": self._both / worked if worked else 0.0,
        }
        self._alone, self._both = {"collect": 0.0, "learn": 0.0}, 0.0
        return waits

    def _count(self) -> float:
        """Add the time since the last call to the totals of the lanes that are working. Return the time."""
        now = self._clock()
        passed, self._counted_to = now - self._counted_to, now
        working: list[Lane] = [lane for lane, count in self._running.items() if count]
        if len(working) == 2:
            self._both += passed
        elif working:
            self._alone[working[0]] += passed
        return now
