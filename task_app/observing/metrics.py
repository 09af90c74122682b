"""Counters of the service for Prometheus.

Each service has its own registry, because tests run several in a process. HTTP requests are counted in plain
numbers (service_kit.observed): the library's counters would take 3 us more per request, and write the edge
`1` of a bucket as `1.0`.
"""

from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter

from service_kit.observed import Requests
from task_app.rollouts.results import Record


class Metrics:
    """Counters since the start of the service."""

    def __init__(self) -> None:
        self.requests = Requests()
        self.registry = CollectorRegistry(auto_describe=False)
        counter = partial(Counter, registry=self.registry)
        self._rollouts_ended = counter(
            "turnwise_rollouts_ended", "Rollouts that ended, by stop reason or failure.", ["status", "reason"]
        )
        decisions = counter("turnwise_decisions", "Decisions taken.", ["source"])
        env_steps = counter("turnwise_env_steps", "Env steps that ran.", ["source"])
        # Looked up once, because a look-up for each step of a session would be slow.
        self._of_rollouts, self._of_sessions = (
            (decisions.labels(source), env_steps.labels(source)) for source in ("rollout", "session")
        )
        self._options_dropped = counter(
            "turnwise_options_dropped", "Settings of captured agents' calls that had no effect.", ["option"]
        )
        self.inference_retries = counter(
            "turnwise_inference_retries", "Attempts to ask a model after the first."
        )

    def count_rollout(self, record: Record) -> None:
        """Count a rollout by its stop reason, or by the code of its failure."""
        self._rollouts_ended.labels(record.status, record.reason).inc()
        for counter, number in zip(self._of_rollouts, (record.decisions, record.env_steps), strict=True):
            counter.inc(number)

    def count_decision(self, env_steps: int) -> None:
        """Count a decision of a session with its env steps."""
        decided, stepped = self._of_sessions
        decided.inc()
        stepped.inc(env_steps)

    def count_dropped_options(self, names: Iterable[str]) -> None:
        for name in names:
            self._options_dropped.labels(name).inc()
