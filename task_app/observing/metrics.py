"""What the service counts while it runs: plain numbers, cheap to raise. `exposition.py` tells Prometheus.

One object a service, so that two of them in a process (tests) never mix. All of it runs in the event loop.
"""

from collections import Counter
from dataclasses import dataclass, field

from service_kit.observed import Requests


@dataclass(slots=True)
class Metrics:
    """Every counter only grows.

    Attributes:
        requests: what was answered over HTTP.
        rollouts_ended: by (status, reason): the stop reason of a finished one, the code of a failure.
        decisions, env_steps: by source, `rollout` (those of finished ones) or `session`.
        options_dropped: settings of captured agents that the policy does not follow, by name.
        inference_retries: attempts to ask a model after the first.
    """

    requests: Requests = field(default_factory=Requests)
    rollouts_ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)
    env_steps: Counter[str] = field(default_factory=Counter)
    options_dropped: Counter[str] = field(default_factory=Counter)
    inference_retries: int = 0

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
