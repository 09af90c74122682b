"""The parts that the orchestrator (`trainer_backend.train`) connects; each could run in another process.

The *learner* scores and updates the policy, *inference* serves it, and the *reporter* informs the user.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from shared_schemas.trajectory import Trajectory
from trainer_backend.collect.plan import Inference
from trainer_backend.core.critic import CriticTargets, OfEpisode
from trainer_backend.core.kl_reward import ScoredTokens
from trainer_backend.core.policies import ACTOR
from trainer_backend.core.prompt_lengths import LongPrompt
from trainer_backend.core.segments import Segment
from trainer_backend.rundir.state import ProcessRole

Result = TypeVar("Result")
WeightPart = Literal["whole", "base", "adapters"]


@dataclass(frozen=True, slots=True)
class CreditedEpisode:
    """An episode that is ready for an update."""

    rollout_id: str
    """The name of the episode in errors."""
    segments: Sequence[Segment]
    """The episode's token sequences (core.segments)."""
    advantages: OfEpisode
    """[T] for each decision its advantage, or a row with the advantage of each of its sampled tokens."""
    critic: CriticTargets | None = None
    """The critic's targets; None without a critic."""
    policy: str = ACTOR
    """The policy that sampled the episode: ACTOR, or the name of a fixed policy of the job."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of training, stored in a checkpoint's state.json."""

    iteration: int = 0
    """Finished iterations; 0 after warm-up."""
    policy_version: int = 0
    """Version of the published weights, counted from 0."""
    updates: int = 0
    """Optimizer steps of RL."""


# The environment variable that selects a process's GPUs.
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Hardware:
    """Where a learner computes, for code that starts servers on the same machine."""

    dtype: str
    """The precision in which servers hold its policy, such as "float32"."""
    devices: tuple[str, ...] = ()
    """The accelerators of this machine, as CUDA_VISIBLE_DEVICES names them; none on a CPU."""


class Learner(Protocol):
    """Holds the trained policy. Calls block, so the orchestrator makes them on a thread."""

    def warm_up(self, episodes: Sequence[Trajectory], tell: Callable[[int, int], None]) -> dict[str, float]:
        """Train on a teacher's decisions and return metrics.

        `tell` receives the finished steps and their total; an error that it raises ends the warm-up.
        """

    def values(self, episodes: Mapping[str, Sequence[Segment]]) -> dict[str, OfEpisode]:
        """Return the critic's values by rollout id, for each decision or token as the estimator needs them.

        Raises AdvantageError with rollout, turn and token if a value is not finite.
        """

    def score(self, episodes: Mapping[str, Sequence[Segment]]) -> dict[str, ScoredTokens]:
        """Return, by rollout id, each token's log-prob under the policy and under the reference policy.

        Called only for jobs whose rewards contain the KL between these two policies.
        """

    def update(
        self, episodes: Sequence[CreditedEpisode], *, iteration: int, policy_version: int | None = None
    ) -> dict[str, float]:
        """Score the episodes, do one iteration of policy updates, and return its metrics.

        Args:
            policy_version: version of the weights before the update, if older weights sampled some of the
                actor's tokens; None: the weights before the update sampled all of them.

        Raises NonFiniteLoss before anything non-finite reaches the weights.
        """

    def save(self, folder: Path, progress: Progress) -> None:
        """Write a whole checkpoint, or raise CheckpointError and leave nothing."""

    def publish(self, folder: Path, part: WeightPart = "whole") -> None:
        """Write the policy for engines, or raise CheckpointError and leave nothing.

        Args:
            part: "whole": the model with merged adapters, and the adapters next to it; "base": the base
                model without adapters; "adapters": a folder of the adapters alone.
        """

    def offer(self, peer: str) -> tuple[str, int]:
        """Offer the policy to servers until it changes; return the host and port where they ask for it.

        Args:
            peer: the host of one server; it determines which address of this machine is returned.
        """

    def broadcast(self, expected: int, wait_s: float, tell: Callable[[int, int], None]) -> int:
        """Send the policy that is on offer to servers as they ask for it; return how many have loaded it.

        Args:
            expected: the call returns once this many servers have loaded the policy.
            wait_s: it also returns when no server asks for this long, and at once if nothing is on offer.
            tell: receives the number of servers that have loaded it, and the expected number, while it
                waits; an error that it raises ends the wait.
        """

    def find_long(self, conversations: Sequence[Sequence[Mapping[str, Any]]], most: int) -> list[LongPrompt]:
        """Return the prompts of more than `most` tokens, as the gateway counts them without any tools."""

    def score_ids(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probs of ids[1:] under the policy, each given all ids before it."""

    def hardware(self) -> Hardware:
        """Return the device on which the learner computes, and its precision."""


class LearnerFactory(Protocol):
    """Makes the learner of a run, in this process or in one of its own. Calls block, as a learner's do."""

    def fixed_folders(self, checkpoint: Path | None) -> Mapping[str, Path]:
        """Return the model folders of the fixed policies, by name. A policy at a remote server has none.

        Args:
            checkpoint: the checkpoint that the run continues from; None: the run begins.

        Raises:
            TrainerError: a policy has no such folder, or another tokenizer than the actor.
        """

    def plan_memory(self, checkpoint: Path | None, fixed: Sequence[Path]) -> str:
        """Return a line about the memory that the run will need, then a line for each slow part.

        No weights are read.

        Args:
            checkpoint: the checkpoint that the run continues from; None: the run begins.
            fixed: model folders of the fixed policies that this machine serves too.

        Raises:
            JobError: the job cannot fit.
        """

    def fresh(self, prompts: Sequence[Trajectory], tokenizer_folder: Path | None) -> Learner:
        """Make a learner of the job's model.

        Args:
            prompts: a preset's tokenizer is trained on their texts.
            tokenizer_folder: the model folder of a fixed policy, whose tokenizer a preset shares; None: a
                new tokenizer.
        """

    def resumed(self, checkpoint: Path) -> tuple[Learner, Progress]:
        """Make a learner from a checkpoint, and return the checkpoint's progress too."""


class InferenceServer(Protocol):
    """Serves the policy to task apps."""

    inference: Inference

    async def publish(self, policy_version: int) -> None:
        """Serve the learner's weights from now on, under this version; no request is lost."""

    async def release(self) -> None:
        """Free the memory that the server shares with the learner, because nothing is sampled for a while."""

    async def resume(self) -> None:
        """Serve again after a release, unless new weights were published since then."""

    async def while_serving(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run work that uses the server, and return its result. When this returns or raises, work has ended.

        Raises EngineStopped if the engine has failed, since further requests would be useless.
        """

    def watch(self, reporter: "Reporter") -> None:
        """Report the server's processes now, if it has any, and every later change of one."""

    async def verify(self) -> list[str]:
        """Check that no fixed policy has changed since it was loaded; return a line for each local one."""

    async def totals(self) -> Mapping[str, float]:
        """Return counts since the start: requests, prompt_tokens, sampled_tokens, steps, and more.

        It does not raise: the newest known counts stand for a server that has failed.
        """


class Reporter(Protocol):
    """Informs the user. Calls return at once."""

    def say(self, text: str) -> None:
        """Report one line worth keeping."""

    def note(self, text: str) -> None:
        """Report, in a line that stays in view, what is slow since this start of the run, and why."""

    def stage(self, name: str, done: int, total: int) -> None:
        """Report the progress of the current stage."""

    def metrics(self, row: dict[str, Any], line: str) -> None:
        """Report a row that was just written to metrics.jsonl; `line` says the same in words."""

    def process(
        self, name: str, *, role: ProcessRole, state: str, version: int | None = None, word: str = "",
        host: str = "",
    ) -> None:  # fmt: skip
        """Report a process that works for the run, or a change of one; in the state `GONE` it is forgotten.

        Args:
            name: identifies the process together with the role.
            version: the version of the policy that the process has; None: unchanged.
            word: the last message of the process or about the process.
            host: the host of the process, unless the name contains it; empty: unchanged.
        """
