"""Interfaces of the parts that the orchestrator (`trainer_backend.train`) connects.

The *learner* scores and updates the policy, the *inference server* serves the policy, and the *reporter*
informs the user. Each part may run in another process.
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
    """An episode with its advantages, ready for an update."""

    rollout_id: str
    """Id of the episode's rollout, for errors."""
    segments: Sequence[Segment]
    """The episode's token sequences (core.segments)."""
    advantages: OfEpisode
    """[T] the advantage of each decision; or a `ByToken` with the advantage of each sampled token."""
    critic: CriticTargets | None = None
    """The critic's targets; None without a critic."""
    policy: str = ACTOR
    """The policy that sampled the episode: ACTOR, or the name of a fixed policy of the job."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of training, stored in a checkpoint's state.json."""

    iteration: int = 0
    """Number of finished iterations; 0 at the start of RL."""
    policy_version: int = 0
    """Version of the published weights, counted from 0."""
    updates: int = 0
    """Number of optimizer steps since the start of RL."""


# The environment variable that selects a process's GPUs.
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Hardware:
    """The precision and the accelerators of a learner, for code that starts servers on the same machine."""

    dtype: str
    """The precision in which servers hold the policy, such as "float32"."""
    devices: tuple[str, ...] = ()
    """The accelerators of this machine, as CUDA_VISIBLE_DEVICES names them; empty on a CPU."""


class Learner(Protocol):
    """Scores and trains the policy. Its methods block, so the orchestrator calls them on a thread."""

    def warm_up(self, episodes: Sequence[Trajectory], tell: Callable[[int, int], None]) -> dict[str, float]:
        """Train the policy to imitate a teacher's episodes, and return metrics.

        `tell` receives the number of finished steps and the total number of steps. If `tell` raises an error,
        the warm-up ends with this error.
        """

    def values(self, episodes: Mapping[str, Sequence[Segment]]) -> dict[str, OfEpisode]:
        """Return the critic's values of each episode by rollout id.

        There is one value per decision, or per sampled token if the job's estimator needs values of tokens.
        If a value is not finite, AdvantageError is raised, which names the rollout, turn and token.
        """

    def score(self, episodes: Mapping[str, Sequence[Segment]]) -> dict[str, ScoredTokens]:
        """Return, by rollout id, the log-probs of sampled tokens under the policy and the reference policy.

        Called only for jobs whose rewards contain the KL between these two policies.
        """

    def update(
        self, episodes: Sequence[CreditedEpisode], *, iteration: int, policy_version: int | None = None
    ) -> dict[str, float]:
        """Score the episodes, run the policy updates of one iteration, and return metrics of the iteration.

        Args:
            policy_version: version of the weights before the update, so that tokens of older weights are
                recognised. None: the weights before the update sampled all of the actor's tokens.

        Raises NonFiniteLoss before a non-finite value reaches the weights.
        """

    def save(self, folder: Path, progress: Progress) -> None:
        """Write a whole checkpoint. On failure, raise CheckpointError and leave no partial checkpoint."""

    def publish(self, folder: Path, part: WeightPart = "whole") -> None:
        """Write the policy for engines to load. On failure, raise CheckpointError and leave no files.

        Args:
            part: "whole": the model with merged adapters, and the adapters in separate files; "base": the
                base model without adapters; "adapters": only the adapters.
        """

    def offer(self, peer: str) -> tuple[str, int]:
        """Offer the current weights to servers; return the host and port at which servers request them.

        The offer ends when the weights change.

        Args:
            peer: the host of one server. The returned host is the address from which this machine reaches it.
        """

    def broadcast(self, expected: int, wait_s: float, tell: Callable[[int, int], None]) -> int:
        """Send the offered weights to each server that requests them; return how many servers loaded them.

        Returns 0 at once if no weights are offered.

        Args:
            expected: the call returns once this number of servers have loaded the weights.
            wait_s: the call also returns if no server requests the weights for this many seconds.
            tell: called during the wait with the number of servers that have loaded the weights, and with
                `expected`. If `tell` raises an error, the wait ends with this error.
        """

    def find_long(self, conversations: Sequence[Sequence[Mapping[str, Any]]], most: int) -> list[LongPrompt]:
        """Return the conversations that have more than `most` tokens when they are rendered without tools."""

    def score_ids(self, ids: Sequence[int]) -> list[float]:
        """Return the log-prob of each id in ids[1:] under the policy, given all ids before this id."""

    def hardware(self) -> Hardware:
        """Return the precision and the accelerators of the learner."""


class LearnerFactory(Protocol):
    """Makes the learner of a run, in this process or in a separate one. Its methods block."""

    def fixed_folders(self, checkpoint: Path | None) -> Mapping[str, Path]:
        """Check the fixed policies; return the model folders, by name, of policies without a remote server.

        Args:
            checkpoint: the checkpoint from which the run continues; None: the run begins.

        Raises:
            TrainerError: a policy's folder is missing or unsuitable, or its tokenizer is not the actor's.
        """

    def plan_memory(self, checkpoint: Path | None, fixed: Sequence[Path]) -> str:
        """Estimate the memory that the run needs, without reading weights, and return the estimate as text.

        The text has a line about memory, then a line for each part of the run that will be slow.

        Args:
            checkpoint: the checkpoint from which the run continues; None: the run begins.
            fixed: model folders of the fixed policies that this machine also serves.

        Raises:
            JobError: the run needs more memory than the machine has.
        """

    def fresh(self, prompts: Sequence[Trajectory], tokenizer_folder: Path | None) -> Learner:
        """Make a learner that starts from the job's model. Only presets need the arguments, for a tokenizer.

        Args:
            prompts: episodes whose texts train the tokenizer of the preset.
            tokenizer_folder: model folder of a fixed policy, whose tokenizer the preset uses. None: train a
                tokenizer on `prompts`.
        """

    def resumed(self, checkpoint: Path) -> tuple[Learner, Progress]:
        """Make a learner from a checkpoint; return the learner and the stored progress."""


class InferenceServer(Protocol):
    """Serves the policy to task apps."""

    inference: Inference

    async def publish(self, policy_version: int) -> None:
        """Serve the learner's weights from now on, as version `policy_version`. No request is lost."""

    async def release(self) -> None:
        """Free the memory that the server shares with the learner. Called before a pause in sampling."""

    async def resume(self) -> None:
        """Serve the same weights again after `release`. Does nothing if `publish` was called since then."""

    async def while_serving(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work`, which uses the server, and return its result.

        `work` has always ended when this method returns or raises. If the engine fails, `work` is
        cancelled and EngineStopped is raised, because `work` could otherwise wait forever.
        """

    def watch(self, reporter: "Reporter") -> None:
        """Report each process of the server to `reporter`: now, and whenever the process changes."""

    async def verify(self) -> list[str]:
        """Check that the weights of local fixed policies are unchanged; return a line of text per policy."""

    async def totals(self) -> Mapping[str, float]:
        """Return counts since the start by name: requests, prompt_tokens, sampled_tokens, steps, and more.

        If a server has failed, the result contains its last known counts, and no error is raised.
        """


class Reporter(Protocol):
    """Informs the user. Its methods return without waiting."""

    def say(self, text: str) -> None:
        """Report one line worth keeping."""

    def note(self, text: str) -> None:
        """Report in one line which part of the run is slow, and why. The line stays in view."""

    def stage(self, name: str, done: int, total: int) -> None:
        """Report the progress of the current stage."""

    def metrics(self, row: dict[str, Any], line: str) -> None:
        """Report a row that was just written to metrics.jsonl; `line` is a summary of the row in words."""

    def process(
        self, name: str, *, role: ProcessRole, state: str, version: int | None = None, word: str = "",
        host: str = "",
    ) -> None:  # fmt: skip
        """Report a process that works for the run: that it exists, or that it has changed.

        A process in the state `GONE` is no longer shown.

        Args:
            name: identifies the process, together with the role.
            version: the version of the policy that the process serves; None: unchanged.
            word: the last message from the process, or about it.
            host: the host of the process, if the name does not contain it; empty: unchanged.
        """
