"""What the service counts while it runs: plain numbers, cheap to raise. `exposition.py` tells Prometheus.

One object a service, so that two of them in a process (tests) never mix. All of it runs in the event loop.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

# Upper edges in seconds: a step takes tenths of a millisecond, a long poll up to half a minute.
LATENCY_EDGES_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
NO_ROUTE = "none"


@dataclass(slots=True)
class Histogram:
    """Observations by bucket; the last bucket holds what lies above every edge."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_EDGES_S) + 1))
    sum_s: float = 0.0

    def observe(self, value_s: float) -> None:
        self.counts[bisect_left(LATENCY_EDGES_S, value_s)] += 1
        self.sum_s += value_s

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper edge, how many lie at or below it), with "+Inf" at the end."""
        edges = [*(f"{edge:g}" for edge in LATENCY_EDGES_S), "+Inf"]
        return [(edge, sum(self.counts[: index + 1])) for index, edge in enumerate(edges)]


@dataclass(slots=True)
class Metrics:
    """Every counter only grows.

    Attributes:
        requests: by (method, route, status); a route is its template, so that ids never become labels.
        latency: by route.
        rollouts_ended: by (status, reason): the stop reason of a finished one, the code of a failure.
        decisions, env_steps: by source, `rollout` (those of finished ones) or `session`.
        inference_retries: attempts to ask a model after the first.
    """

    requests: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    latency: dict[str, Histogram] = field(default_factory=dict)
    rollouts_ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)
    env_steps: Counter[str] = field(default_factory=Counter)
    inference_retries: int = 0

    def request_ended(self, method: str, route: str, status: int, took_s: float) -> None:
        self.requests[method if method in METHODS else "other", route, status] += 1
        histogram = self.latency.get(route)
        if histogram is None:
            histogram = self.latency[route] = Histogram()
        histogram.observe(took_s)

    def rollout_ended(self, status: str, reason: str, *, decisions: int, env_steps: int) -> None:
        self.rollouts_ended[status, reason] += 1
        self.decisions["rollout"] += decisions
        self.env_steps["rollout"] += env_steps

    def session_decided(self, env_steps: int) -> None:
        """A session took a decision of so many env steps."""
        self.decisions["session"] += 1
        self.env_steps["session"] += env_steps

    def inference_retried(self) -> None:
        self.inference_retries += 1
