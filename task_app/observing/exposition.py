"""The service's counts in Prometheus' words, gathered when somebody scrapes."""

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from task_app.observing.metrics import Metrics
from task_app.services import Services


def families(services: Services, *, version: str, sockets: int) -> Iterator[Metric]:
    """All metrics of a task app."""
    yield InfoMetricFamily(
        "turnwise_task_app",
        "Which task app this is.",
        {"version": version, "instance_id": services.instance_id},
    )
    yield from _now(services, sockets)
    yield from _so_far(services.metrics)


def _now(services: Services, sockets: int) -> Iterator[Metric]:
    """What there is at this moment."""
    runner = services.runner
    sessions = GaugeMetricFamily("turnwise_sessions", "Live sessions.", labels=["kind"])
    sessions.add_metric(["env"], len(services.environments))
    sessions.add_metric(["policy"], len(services.policies))
    sessions.add_metric(["interaction"], len(services.interaction_sessions))
    yield sessions
    yield GaugeMetricFamily(
        "turnwise_interactions",
        "Interactions that are not finalised yet, of rollouts and sessions.",
        len(services.interactions),
    )
    rollouts = GaugeMetricFamily("turnwise_rollouts", "Rollouts that have not ended.", labels=["state"])
    for state, count in runner.unfinished().items():
        rollouts.add_metric([state], count)
    yield rollouts
    yield GaugeMetricFamily(
        "turnwise_rollouts_held", "Rollouts held: not ended, or not acknowledged.", len(runner.results)
    )
    yield GaugeMetricFamily(
        "turnwise_held_bytes",
        "Bytes of rollout requests and results that are not acknowledged.",
        runner.results.held_bytes,
    )
    yield GaugeMetricFamily("turnwise_openenv_sockets", "Open sockets of OpenEnv clients.", sockets)


def _so_far(metrics: Metrics) -> Iterator[Metric]:
    """What has happened since the start."""
    yield metrics.requests.answered_family("turnwise_http_requests")
    latency = HistogramMetricFamily(
        "turnwise_http_request_seconds", "From the request's head to the answer's end.", labels=["route"]
    )
    for route, histogram in metrics.requests.latency.items():
        latency.add_metric([route], buckets=histogram.cumulative(), sum_value=histogram.sum_s)
    yield latency
    ended = CounterMetricFamily(
        "turnwise_rollouts_ended",
        "Rollouts that ended, by stop reason or failure.",
        labels=["status", "reason"],
    )
    for (state, reason), count in metrics.rollouts_ended.items():
        ended.add_metric([state, reason], count)
    yield ended
    yield _by_source("turnwise_decisions", "Decisions taken.", metrics.decisions)
    yield _by_source("turnwise_env_steps", "Env steps that ran.", metrics.env_steps)
    yield CounterMetricFamily(
        "turnwise_inference_retries",
        "Attempts to ask a model after the first.",
        value=metrics.inference_retries,
    )


def _by_source(name: str, text: str, counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=["source"])
    for source in ("rollout", "session"):
        family.add_metric([source], counts.get(source, 0))
    return family
