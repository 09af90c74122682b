"""Stops 7, 9 and 10 of the route: finished rollouts -> segments, r_t and advantages.

Pure: a stored rollout file gives the same numbers anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared_schemas.rollouts import Rollout
from trainer_backend.core.advantages.episodes import AdvantageConfig, EpisodeRewards
from trainer_backend.core.flat_groups import flat_groups
from trainer_backend.core.rewards import RewardConfig, reward_vector
from trainer_backend.core.segments import segments_of
from trainer_backend.core.statistics import decision_metrics
from trainer_backend.evaluation import finished_trajectories
from trainer_backend.job_schema import JobConfig
from trainer_backend.plugins import estimator
from trainer_backend.protocols import CreditedEpisode
from trainer_backend.rundir.rollout_files import Credit


@dataclass(frozen=True, slots=True)
class Credited:
    """Stops 7, 9 and 10 for a batch of episodes: what the update needs, and what the logs say.

    Attributes:
        episodes: those to be trained: all of them, or without `flat` where the job skips it.
        credits: of every episode, in the order given.
        flat: ids of the groups whose advantages are all 0 (core.flat_groups).
    """

    episodes: list[CreditedEpisode]
    credits: list[Credit]
    metrics: dict[str, float]
    flat: list[str]


def credit(job: JobConfig, rollouts: Sequence[Rollout]) -> Credited:
    """Segments, r_t and advantages of finished rollouts. Pure: a stored file gives the same anywhere."""
    config = reward_config(job)
    trajectories = finished_trajectories(rollouts, "credit")
    rewards = [
        reward_vector(
            item.steps, outcome_reward=item.outcome_reward, config=config, rollout_id=rollout.rollout_id
        )
        for rollout, item in zip(rollouts, trajectories, strict=True)
    ]
    rewarded = [
        EpisodeRewards(rollout.rollout_id, rollout.group_id, rewards_T)
        for rollout, rewards_T in zip(rollouts, rewards, strict=True)
    ]
    advantages = estimator(job.algorithm.advantage)(rewarded, AdvantageConfig(gamma=job.algorithm.gamma))
    flat = flat_groups(rewarded, advantages.per_episode)
    skipped = set(flat) if job.training.skip_flat_groups else set()
    episodes = [
        CreditedEpisode(
            rollout.rollout_id, segments_of(item.steps, rollout_id=rollout.rollout_id), advantages_T
        )
        for rollout, item, advantages_T in zip(rollouts, trajectories, advantages.per_episode, strict=True)
        if rollout.group_id not in skipped
    ]
    credits = [Credit(*pair) for pair in zip(rewards, advantages.per_episode, strict=True)]
    metrics = {
        **decision_metrics(trajectories, rewards),
        **advantages.diagnostics,
        "group/flat": float(len(flat)),
    }
    return Credited(episodes, credits, metrics, flat)


def reward_config(job: JobConfig) -> RewardConfig:
    """The step-reward switches of [training], for `core.rewards`."""
    table = job.training
    return RewardConfig(
        enabled=table.step_rewards_enabled,
        mode=table.step_rewards_mode,
        kind=table.event_rewards_kind,
        beta=table.step_rewards_beta,
        indicator_lambda=table.step_rewards_indicator_lambda,
        horizon=table.step_rewards_horizon,
        max_decisions=job.rollout.max_turns,
    )
