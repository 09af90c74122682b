"""Counters of the service for Prometheus.

Each service has its own registry, because tests run several services in one process. HTTP requests are
counted by `service_kit.observed` in plain numbers. The counters of prometheus_client would take 3 us more per
request, and would write the upper edge of a histogram bucket as `1.0`, not as `1`.
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
        # `labels` is called once here, because calling it in each step of a session would be slow.
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
        """Count a rollout by its stop reason or by the code of its failure.

        Also count its decisions and its env steps.
        """
        self._rollouts_ended.labels(record.status, record.reason).inc()
        for counter, number in zip(self._of_rollouts, (record.decisions, record.env_steps), strict=True):
            counter.inc(number)

    def count_decision(self, env_steps: int) -> None:
        """Count one decision of a session, and the env steps of this decision."""
        decided, stepped = self._of_sessions
        decided.inc()
        stepped.inc(env_steps)

    def count_dropped_options(self, names: Iterable[str]) -> None:
        for name in names:
            self._options_dropped.labels(name).inc()
