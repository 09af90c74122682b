"""What the service counts while it runs: plain numbers, cheap to raise. `exposition.py` tells Prometheus.

One object a service, so that two of them in a process (tests) never mix. All of it runs in the event loop.
"""

from collections import Counter
from dataclasses import dataclass, field

from service_kit.observed import Requests
from task_app.rollouts.results import Record


@dataclass(slots=True)
class Metrics:
    """Every counter only grows."""

    requests: Requests = field(default_factory=Requests)
    """What was answered over HTTP."""
    rollouts_ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By (status, reason): the stop reason of a finished one, the code of a failure."""
    decisions: Counter[str] = field(default_factory=Counter)
    """By source, as `env_steps`: `rollout` (those of finished ones) or `session`."""
    env_steps: Counter[str] = field(default_factory=Counter)
    options_dropped: Counter[str] = field(default_factory=Counter)
    """Settings of captured agents that the policy does not follow, by name."""
    inference_retries: int = 0
    """Attempts to ask a model after the first."""

    def rollout_ended(self, record: Record) -> None:
        self.rollouts_ended[record.status, record.reason] += 1
        self.decisions["rollout"] += record.decisions
        self.env_steps["rollout"] += record.env_steps

    def session_decided(self, env_steps: int) -> None:
        """A session took a decision of so many env steps."""
        self.decisions["session"] += 1
        self.env_steps["session"] += env_steps

    def inference_retried(self) -> None:
        self.inference_retries += 1
