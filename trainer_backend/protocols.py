"""The roles that the orchestrator (`trainer_backend.train`) joins, so that each can move to another process.

*learner* scores and updates the policy, *inference* serves it; `reporter` tells a person what happens.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from shared_schemas.trajectory import Trajectory
from trainer_backend.collect.plan import Inference
from trainer_backend.core.critic import CriticTargets, OfEpisode
from trainer_backend.core.kl_reward import ScoredTokens
from trainer_backend.core.policies import ACTOR
from trainer_backend.core.segments import Segment

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class CreditedEpisode:
    """An episode that is ready for an update.

    Attributes:
        rollout_id: named in errors.
        segments: its token sequences (core.segments).
        advantages: [T] of its decisions, or those of its sampled tokens.
        critic: what a critic is to learn from it; None where there is none.
        policy: who sampled it: the one that is trained, or a fixed one of the job by its name.
    """

    rollout_id: str
    segments: Sequence[Segment]
    advantages: OfEpisode
    critic: CriticTargets | None = None
    policy: str = ACTOR


@dataclass(frozen=True, slots=True)
class Progress:
    """How far training has come; what a checkpoint's state.json holds.

    Attributes:
        iteration: iterations that are finished; 0 after warm-up.
        policy_version: counts published weights.
        updates: optimizer steps of RL.
    """

    iteration: int = 0
    policy_version: int = 0
    updates: int = 0


class Learner(Protocol):
    """Holds the policy that is trained. Calls block; the orchestrator makes them on a thread."""

    def warm_up(self, episodes: Sequence[Trajectory], tell: Callable[[int, int], None]) -> dict[str, float]:
        """Supervised steps on a teacher's decisions.

        `tell` is called with the steps done and their total; what it raises ends the warm-up there.
        """

    def values(self, episodes: Mapping[str, Sequence[Segment]]) -> dict[str, OfEpisode]:
        """V of each episode where the job's estimator reads it; only a job whose estimator needs it asks.

        Raises AdvantageError where one is not finite, by rollout, turn and token.
        """

    def score(self, episodes: Mapping[str, Sequence[Segment]]) -> dict[str, ScoredTokens]:
        """What the policy and the one that RL started from say of each episode's tokens, by rollout id.

        Only a job whose rewards have the KL between the two asks.
        """

    def update(self, episodes: Sequence[CreditedEpisode], *, iteration: int) -> dict[str, float]:
        """Score, then one iteration of policy updates; the metrics of it.

        Raises NonFiniteLoss before anything non-finite has reached the weights.
        """

    def save(self, folder: Path, progress: Progress) -> None:
        """A whole checkpoint, or a CheckpointError and nothing."""


class InferenceServer(Protocol):
    """Serves the policy to task apps."""

    inference: Inference

    async def publish(self, policy_version: int) -> None:
        """Serve the learner's weights from now on, under this version; no request is lost."""

    async def while_serving(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of work that asks it, which has ended in any case.

        Raises EngineStopped where it can answer nobody any more: whatever asks would only ask again.
        """

    def totals(self) -> Mapping[str, float]:
        """Counts since the start: requests, prompt_tokens, sampled_tokens, steps, and more."""


class Reporter(Protocol):
    """Tells a person what happens. Calls return at once."""

    def say(self, text: str) -> None:
        """One line worth keeping."""

    def stage(self, name: str, done: int, total: int) -> None:
        """How far the current stage has come."""

    def metrics(self, row: dict[str, Any]) -> None:
        """A row of metrics.jsonl that was just written."""
