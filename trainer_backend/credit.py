"""Stops 7, 9 and 10 of the route: finished rollouts -> segments, r_t and advantages.

Pure: a stored rollout file gives the same numbers anywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import Trajectory
from trainer_backend.core.advantages.episodes import AdvantageConfig, Advantages, EpisodeRewards
from trainer_backend.core.advantages.gae import foretold
from trainer_backend.core.branching import Branches
from trainer_backend.core.critic import (
    ByToken,
    CriticTargets,
    OfEpisode,
    firsts,
    targets_of,
)
from trainer_backend.core.errors import AdvantageError, place
from trainer_backend.core.flat_groups import flat_groups
from trainer_backend.core.kl_reward import ScoredTokens
from trainer_backend.core.policies import ACTOR
from trainer_backend.core.returns import discounted_returns
from trainer_backend.core.segments import Segment
from trainer_backend.core.statistics import decision_metrics
from trainer_backend.evaluation.metrics import finished_trajectories
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.plugins import estimator
from trainer_backend.protocols import CreditedEpisode
from trainer_backend.rewarding import Earned, earned_by, kl_metrics
from trainer_backend.rundir.rollout_files import Credit
from trainer_backend.sampled_by import final_view_by, policy_by, segments_by


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of rollouts after they were played, for estimators that ask; by rollout id.

    Attributes:
        values: of a critic; they are stored with the credit.
        after: V of the state after the last decision of episodes that a limit cut short; None: none was read.
        branches: what was played on from an episode's decisions; None: nobody did.
        scored: what policy and reference say of its tokens, and of its branches'.
    """

    values: Mapping[str, OfEpisode] = field(default_factory=dict)
    after: Mapping[str, float] | None = None
    branches: Mapping[str, Branches] | None = None
    scored: Mapping[str, ScoredTokens] = field(default_factory=dict)


NOTHING = Measured()


@dataclass(frozen=True, slots=True)
class Credited:
    """Stops 7, 9 and 10 for a batch of episodes: what the update needs, and what the logs say.

    Attributes:
        episodes: those to be trained: all of them, or without `flat` where the job skips it.
        credits: of every episode, in the order given.
        flat: ids of the groups whose advantages are all 0 (core.flat_groups), by what was earned: what is
            paid for KL differs a little between any two episodes, and is no spread of theirs.
    """

    episodes: list[CreditedEpisode]
    credits: list[Credit]
    metrics: dict[str, float]
    flat: list[str]


def credit(job: JobConfig, rollouts: Sequence[Rollout], measured: Measured = NOTHING) -> Credited:
    """Segments, r_t and advantages of finished rollouts. Pure: a stored file gives the same anywhere.

    Args:
        rollouts: finished ones.
        measured: what the job's estimator needs beside them.

    Raises:
        CreditError: what an episode lacks, or has broken, by the name of its rollout.
    """
    found = _estimate(job, rollouts, measured)
    flat = _flat(rollouts, _estimate(_without_kl(job), rollouts, measured) if _pays_kl(job) else found)
    skipped = set(flat) if job.training.skip_flat_groups else set()
    columns = zip(rollouts, found.policies, found.trained, found.targets, strict=True)
    episodes = [
        CreditedEpisode(rollout.rollout_id, segments_by(job, rollout), given, critic, policy)
        for rollout, policy, given, critic in columns
        if rollout.group_id not in skipped
    ]
    metrics = {
        **found.of_the_actor(job),
        **kl_metrics(found.earned),
        "group/flat": float(len(flat)),
    }
    return Credited(episodes, found.credits(job), metrics, flat)


def credits_of(job: JobConfig, rollouts: Sequence[Rollout], measured: Measured = NOTHING) -> list[Credit]:
    """The credits of `credit` alone, without what only an update and its logs need; else the same."""
    return _estimate(job, rollouts, measured).credits(job)


def _flat(rollouts: Sequence[Rollout], found: "_Estimated") -> list[str]:
    """By the groups as they were played, whichever of their episodes were compared with each other."""
    advantages = [item.flat if isinstance(item, ByToken) else item for item in found.trained]
    played = zip(found.episodes, rollouts, strict=True)
    return flat_groups([replace(item, group_id=rollout.group_id) for item, rollout in played], advantages)


def _pays_kl(job: JobConfig) -> bool:
    return job.training.kl_reward_coef > 0


def _without_kl(job: JobConfig) -> JobConfig:
    return job.model_copy(update={"training": job.training.model_copy(update={"kl_reward_coef": 0.0})})


@dataclass(frozen=True, slots=True)
class _Estimated:
    """Stops 9 and 10; all lists in the order of the rollouts.

    Attributes:
        policies: who sampled each.
        trained: what the update is given of each episode, by decision or by token.
        targets: of the critic; None without one.
    """

    trajectories: list[Trajectory]
    policies: list[str]
    earned: list[Earned]
    episodes: list[EpisodeRewards]
    advantages: Advantages
    trained: Sequence[OfEpisode]
    targets: list[CriticTargets | None]

    def credits(self, job: JobConfig) -> list[Credit]:
        return [
            _credit(job, episode, self.advantages, index, self.targets[index])
            for index, episode in enumerate(self.episodes)
        ]

    def of_the_actor(self, job: JobConfig) -> dict[str, float]:
        """What the actor's samples earned, absent where there are none; and what the estimator met in all."""
        own = [index for index, policy in enumerate(self.policies) if policy == ACTOR]
        met = self.advantages.diagnostics
        if not own:
            return met
        if self.episodes[0].values_T:
            met = met | foretold([self.episodes[index] for index in own], job.algorithm.gamma)
        paid = [self.earned[index].paid_T for index in own]
        return decision_metrics([self.trajectories[index] for index in own], paid) | met


def _estimate(job: JobConfig, rollouts: Sequence[Rollout], measured: Measured) -> _Estimated:
    trajectories = finished_trajectories(rollouts, "credit")
    policies = [policy_by(job, rollout) for rollout in rollouts]
    earned = [earned_by(job, rollout, measured.scored) for rollout in rollouts]
    episodes = [
        _rewarded(job, rollout, item, found.rewards_T, measured)
        for rollout, item, found in zip(rollouts, trajectories, earned, strict=True)
    ]
    advantages = estimator(job.algorithm.advantage).compute(episodes, advantage_config(job))
    trained: Sequence[OfEpisode] = advantages.per_token or advantages.per_episode
    targets = [
        targets_of(episode.token_values or episode.values_T, item) if episode.values_T else None
        for episode, item in zip(episodes, trained, strict=True)
    ]
    return _Estimated(trajectories, policies, earned, episodes, advantages, trained, targets)


def segments_by_rollout(job: JobConfig, rollouts: Sequence[Rollout]) -> dict[str, list[Segment]]:
    """Stop 7 for those that finished.

    Raises:
        SegmentError: see `segments_by`.
    """
    return {item.rollout_id: segments_by(job, item) for item in rollouts if item.trajectory is not None}


def final_views(job: JobConfig, rollouts: Sequence[Rollout]) -> dict[str, Segment]:
    """Of those that a limit cut short the view of the state that they were left in, where it was asked for.

    Raises:
        SegmentError: see `segments_by`.
    """
    found = {item.rollout_id: final_view_by(job, item) for item in rollouts}
    return {name: view for name, view in found.items() if view is not None}


def _compared_with(job: JobConfig, rollout: Rollout) -> str:
    """The key of the episodes that an estimator compares it with: its group, or of that its policy's own."""
    policy = policy_by(job, rollout)
    alone = policy != ACTOR and job.fixed(policy).baseline == "per_policy"
    return f"{rollout.group_id}/{policy}" if alone else rollout.group_id


def _rewarded(
    job: JobConfig, rollout: Rollout, trajectory: Trajectory, rewards_T: Sequence[float], measured: Measured
) -> EpisodeRewards:
    """An episode as the job's estimator sees it."""
    plug, name = estimator(job.algorithm.advantage), rollout.rollout_id
    values = measured.values.get(name, ())
    by_token = values if plug.needs_values == "token" and isinstance(values, ByToken) else None
    branched = plug.needs_branches and measured.branches is not None
    by_outcome = job.algorithm.episode_score == "outcome" and "episode_score" in plug.takes
    return EpisodeRewards(
        name,
        _compared_with(job, rollout),
        rewards_T,
        state_keys_T=_state_keys(job, trajectory, name) if plug.needs_state_keys else (),
        values_T=firsts(values) if plug.needs_values else (),
        token_values=by_token,
        branch_returns_T=_branch_returns(job, trajectory, measured, name) if branched else (),
        final_score=trajectory.outcome_reward if by_outcome else None,
        truncated=trajectory.cut_short,
        value_after=_value_after(job, rollout, trajectory, measured),
    )


def _value_after(
    job: JobConfig, rollout: Rollout, trajectory: Trajectory, measured: Measured
) -> float | None:
    """V of the state that a limit left the episode in, where the job's estimator goes on with it.

    Raises:
        AdvantageError: it was never looked at.
    """
    goes_on = "bootstrap_truncated" in estimator(job.algorithm.advantage).takes
    if not (job.algorithm.bootstrap_truncated and goes_on and trajectory.cut_short):
        return None
    if measured.after is None:
        raise AdvantageError(
            "no value of the state after its last decision, which algorithm.bootstrap_truncated needs",
            where=place(rollout.rollout_id),
            hint="They are asked for and stored while a run trains with that key.",
        )
    return measured.after.get(rollout.rollout_id)


def _branch_returns(
    job: JobConfig, parent: Trajectory, measured: Measured, rollout_id: str
) -> list[list[float]]:
    """[T] the discounted return of each branch from before a decision: what the parent's is held against."""
    of_episode = (measured.branches or {}).get(rollout_id, {})
    return [
        [_return_from(job, step.turn, rollout, measured.scored) for rollout in of_episode.get(step.turn, ())]
        for step in parent.steps
    ]


def _return_from(job: JobConfig, turn: int, branch: Rollout, scored: Mapping[str, ScoredTokens]) -> float:
    """G of a branch, which counts its decisions anew: its horizon is what was left of the parent's."""
    earned = earned_by(job, branch, scored, decisions_done=turn - 1)
    return discounted_returns(earned.rewards_T, job.algorithm.gamma)[0]


def _credit(
    job: JobConfig,
    episode: EpisodeRewards,
    advantages: Advantages,
    index: int,
    targets: CriticTargets | None,
) -> Credit:
    """What is stored with the episode of that index; with a critic, returns are its targets."""
    discounted_T = discounted_returns(episode.rewards_T, job.algorithm.gamma)
    return Credit(
        episode.rewards_T,
        advantages.per_episode[index],
        discounted_T if targets is None else firsts(targets.returns),
        {name: values[index] for name, values in advantages.parts.items()},
        episode.state_keys_T,
        branch_returns_T=episode.branch_returns_T,
        token_advantages=advantages.per_token[index] if advantages.per_token else None,
        token_values=episode.token_values,
        value_after=episode.value_after,
    )


def advantage_config(job: JobConfig) -> AdvantageConfig:
    """The keys of [algorithm], for estimators."""
    table = job.algorithm
    return AdvantageConfig(
        gamma=table.gamma,
        gae_lambda=table.gae_lambda,
        gae_token_lambda=table.gae_token_lambda,
        bootstrap_truncated=table.bootstrap_truncated,
        omega=table.omega,
        step_advantage_w=table.step_advantage_w,
        default_step_reward=table.default_step_reward,
        fnorm=table.fnorm,
        episode_baseline=table.episode_baseline,
        context_depth=table.context_depth,
        context_alpha=table.context_alpha,
    )


def _state_keys(job: JobConfig, trajectory: Trajectory, rollout_id: str) -> list[str]:
    """[T] the key of each decision's state, under the name that the job gives."""
    name, keys = job.algorithm.state_hashing_function, []
    for step in trajectory.steps:
        key = step.observation_data.state_keys.get(name)
        if key is None:
            stored = ", ".join(sorted(step.observation_data.state_keys)) or "none"
            raise AdvantageError(
                f"no state key {name!r}; stored: {stored}",
                where=place(rollout_id, step.turn),
                hint="They are made while an episode is played (rollout.state_keys).",
            )
        keys.append(key)
    return keys
