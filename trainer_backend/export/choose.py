"""Which episodes are exported. Pure; what is left out is counted by its cause."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shared_schemas.rollouts import Rollout
from trainer_backend.core.policies import player_of
from trainer_backend.errors import JobError

# What was played to train. Held-out worlds are for measuring: who learns them cannot be measured by them.
DEFAULT_STAGES = ("train", "warmup")
STAGES = (*DEFAULT_STAGES, "branches", "evaluation", "prompts")


@dataclass(frozen=True, slots=True)
class Choice:
    """What an episode must be like; what is absent does not narrow.

    Attributes:
        min_reward: least outcome_reward.
        achievements: it unlocked all of these.
        policy: last part of its model, or the name of the policy.
    """

    stages: Sequence[str] = DEFAULT_STAGES
    min_reward: float | None = None
    achievements: Sequence[str] = ()
    policy: str | None = None

    def __post_init__(self) -> None:
        unknown = sorted(set(self.stages) - set(STAGES))
        if unknown:
            raise JobError(f"--stage is {unknown[0]!r}; known: {', '.join(STAGES)}")


def why_not(choice: Choice, rollout: Rollout) -> str | None:
    """Why an episode is left out, in the words of the options; None: it is not."""
    trajectory = rollout.trajectory
    if trajectory is None:
        return f"not finished ({rollout.failure.code if rollout.failure else rollout.status})"
    player = player_of(trajectory.model, trajectory.policy_name)
    if choice.policy is not None and player != choice.policy:
        return f"--policy (by {player})"
    if choice.min_reward is not None and trajectory.outcome_reward < choice.min_reward:
        return "--min-reward"
    counts = trajectory.achievements_counts
    missing = next((name for name in choice.achievements if not counts.get(name)), None)
    return None if missing is None else f"--achievement {missing}"


@dataclass(frozen=True, slots=True)
class Exported:
    """What came of an export.

    Attributes:
        left_out: episodes by cause.
    """

    rows: int
    episodes: int
    left_out: Counter[str]

    def __str__(self) -> str:
        causes = ", ".join(f"{count} {cause}" for cause, count in self.left_out.most_common())
        return f"{self.rows} rows of {self.episodes} episodes" + (f"; left out: {causes}" if causes else "")
