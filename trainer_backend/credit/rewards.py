"""Computes the rewards r_t (stop 9 of docs/route.md), policy and segments of a finished rollout. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shared_schemas.rewards import UndefinedReward, reward_vector
from shared_schemas.rollouts import Rollout
from trainer_backend.core.guards import refuse_lost_reward
from trainer_backend.core.kl_reward import ScoredTokens, kl_estimates, kl_rewards
from trainer_backend.core.metric import Metric, Row
from trainer_backend.core.policies import ACTOR, policy_in
from trainer_backend.core.segments import Segment, build_segments
from trainer_backend.errors import RewardError, SegmentError, place
from trainer_backend.job.mixture_table import RolloutOnlyTable
from trainer_backend.job.training_table import TrainingTable


@dataclass(frozen=True, slots=True)
class Earned:
    """The rewards of an episode's decisions."""

    paid_T: Sequence[float]
    """[T] rewards without the cost of KL."""
    kl_T: Sequence[float] = ()
    """[T] cost of the KL to the reference policy, as a term of the reward: -`training.kl_reward_coef` * KL.
    Empty, like `kl_nats`, if this coefficient is 0."""
    kl_nats: Sequence[Sequence[float]] = ()
    """For each decision, the KL estimate at each of its tokens, in nats."""

    @property
    def rewards_T(self) -> Sequence[float]:
        """[T] rewards r_t that estimators read: `paid_T` plus `kl_T`."""
        if not self.kl_T:
            return self.paid_T
        return [paid + kl for paid, kl in zip(self.paid_T, self.kl_T, strict=True)]


@dataclass(frozen=True, slots=True)
class Rewards:
    """Computes the rewards of decisions, with the settings of a job."""

    table: TrainingTable
    """The job's [training], which configures step rewards and the cost of KL."""
    max_decisions: int
    """Maximum number of decisions in an episode."""

    @property
    def pays_kl(self) -> bool:
        return self.table.kl_reward_coef > 0

    def without_kl(self) -> "Rewards":
        """Return the same rewards without the cost of KL."""
        return replace(self, table=self.table.model_copy(update={"kl_reward_coef": 0.0}))

    def earned_by(
        self, rollout: Rollout, scored: Mapping[str, ScoredTokens], *, decisions_done: int = 0
    ) -> Earned:
        """Compute r_t of a finished rollout.

        `scored` contains the log-probs, by rollout id, that `training.kl_reward_coef` needs.
        `decisions_done` is the number of decisions before the snapshot at which the rollout starts; it
        shortens the horizon. Raises RewardError if a reward is undefined, if log-probs are missing, or if
        `refuse_lost_reward` finds a wrong sum.
        """
        episode, name, horizon = rollout.trajectory, rollout.rollout_id, None
        assert episode is not None, "only finished rollouts earned anything"
        if self.table.step_rewards_horizon == "max_decisions":
            horizon = self.max_decisions - decisions_done
        try:
            paid_T = reward_vector(episode.steps, episode.outcome_reward, self.table, horizon=horizon)
        except UndefinedReward as error:
            raise RewardError(str(error), where=place(name, error.turn)) from error
        earned = self._with_kl(paid_T, scored.get(name), rollout_id=name)
        refuse_lost_reward(
            episode, earned.rewards_T, self.table, horizon=horizon, rollout_id=name, kl_T=earned.kl_T
        )
        return earned

    def _with_kl(self, paid_T: Sequence[float], scored: ScoredTokens | None, *, rollout_id: str) -> Earned:
        training = self.table
        if training.kl_reward_coef == 0:
            return Earned(paid_T)
        if scored is None:
            raise RewardError(
                "no log-probs of policy and reference, "
                f"which training.kl_reward_coef = {training.kl_reward_coef} needs",
                where=place(rollout_id),
                hint="Runs with that key store them; 0 leaves the KL out.",
            )
        if len(scored.policy_T) != len(paid_T):
            raise RewardError(
                f"log-probs of {len(scored.policy_T)} decisions, but the rollout has {len(paid_T)}",
                where=place(rollout_id),
            )
        nats = kl_estimates(scored, training.kl_reward_kind, rollout_id=rollout_id)
        return Earned(paid_T, kl_rewards(nats, training.kl_reward_coef), nats)


METRICS = (
    Row(
        Metric("kl/reference", "KL to the policy that RL started from, in nats per token", "kl",
               "to the reference"),
        Metric("reward/kl", "mean cost of that KL for an episode, in reward units", "reward", "paid for KL"),
        when="only with `kl_reward_coef`",
        note="No other reward metric includes it",
    ),
)  # fmt: skip


def kl_metrics(episodes: Sequence[Earned]) -> dict[str, float]:
    """Return the mean KL per token, in nats, and the mean cost of KL per episode; empty if KL has no cost."""
    nats = [value for item in episodes for row in item.kl_nats for value in row]
    if not nats:
        return {}
    paid = math.fsum(math.fsum(item.kl_T) for item in episodes)
    return {"kl/reference": math.fsum(nats) / len(nats), "reward/kl": paid / len(episodes)}


@dataclass(frozen=True, slots=True)
class Policies:
    """Tells which policy of a job sampled a rollout, and builds the rollout's segments accordingly."""

    job_name: str
    """Name of the job, which is a part of its models' names."""
    fixed: tuple[RolloutOnlyTable, ...]
    """Policies that are never trained."""
    temperature: float
    """The actor's sampling temperature."""

    def policy_by(self, rollout: Rollout) -> str:
        """Return the policy that sampled the rollout: ACTOR, or the name of a fixed policy.

        Raises SegmentError if the trajectory's model is not a policy of the job. Treating such samples as
        the actor's would silently train on them without behaviour weights.
        """
        model = None if rollout.trajectory is None else rollout.trajectory.model
        policy = policy_in(self.job_name, model)
        names = [ACTOR, *(table.name for table in self.fixed)]
        if policy not in names:
            raise SegmentError(
                f"sampled by {policy!r} (model {model!r}); the policies of this job are {', '.join(names)}",
                where=place(rollout.rollout_id),
                hint="Was [rollout_only] taken out of the job, or its name changed?",
            )
        return policy

    def segments_by(self, rollout: Rollout) -> list[Segment]:
        """Build the segments of a rollout (stop 7 of docs/route.md); empty if the rollout is not finished.

        Samples of a fixed policy are scored at the actor's temperature, because the policy in training is
        softmax(logits / rollout.temperature) (DESIGN.md 4.9). Raises SegmentError if `policy_by` or
        `build_segments` does.
        """
        if rollout.trajectory is None:
            return []
        own = None if self.policy_by(rollout) == ACTOR else self.temperature
        return build_segments(rollout.trajectory.steps, rollout_id=rollout.rollout_id, temperature=own)

    def final_view_by(self, rollout: Rollout) -> Segment | None:
        """Build the prompt that would have followed the last decision; None if it is not stored.

        The prompt is stored if a limit cut the episode short. The segment ends with one more token, because
        a critic reads the value where the next token is predicted. This token belongs to no decision and is
        never trained. Raises SegmentError if `build_segments` does.
        """
        episode = rollout.trajectory
        if episode is None or episode.final_view is None:
            return None
        last = episode.steps[-1]
        after = last.model_copy(update={"turn": last.turn + 1, "policy_logprobs": episode.final_view})
        whole = build_segments([*episode.steps, after], rollout_id=rollout.rollout_id)[-1]
        n = int((whole.decision == last.turn).argmax())
        start = int(whole.sampled_positions[n])
        return Segment.of(
            whole.rollout_id,
            token_ids=whole.token_ids[: start + 1].tolist(),
            logprobs=[float(whole.logprobs[n])],
            spans=[(start, start + 1, 0, int(whole.versions[n]), 1.0)],
        )

    def by_actor(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts that the actor sampled."""
        return [rollout for rollout in rollouts if self.policy_by(rollout) == ACTOR]
