"""Stops 7, 9 and 10 of the route: finished rollouts -> segments, r_t and advantages.

Pure: a stored rollout file gives the same numbers anywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import Trajectory
from trainer_backend.core.advantages.episodes import AdvantageConfig, Advantages, EpisodeRewards
from trainer_backend.core.critic import (
    ByToken,
    CriticTargets,
    OfEpisode,
    firsts,
    targets_of,
)
from trainer_backend.core.errors import AdvantageError, place
from trainer_backend.core.flat_groups import flat_groups
from trainer_backend.core.guards import refuse_lost_reward
from trainer_backend.core.returns import discounted_returns
from trainer_backend.core.rewards import RewardConfig, reward_vector
from trainer_backend.core.segments import Segment, segments_of
from trainer_backend.core.statistics import decision_metrics
from trainer_backend.evaluation.metrics import finished_trajectories
from trainer_backend.jobfile.schema import JobConfig
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


def credit(
    job: JobConfig, rollouts: Sequence[Rollout], values: Mapping[str, OfEpisode] | None = None
) -> Credited:
    """Segments, r_t and advantages of finished rollouts. Pure: a stored file gives the same anywhere.

    Args:
        rollouts: finished ones.
        values: of a critic, by rollout id, for an estimator that needs them; they are stored with the credit.

    Raises:
        CreditError: what an episode lacks, or has broken, by the name of its rollout.
    """
    found = _estimate(job, rollouts, values)
    flat = flat_groups(
        found.episodes, [item.flat if isinstance(item, ByToken) else item for item in found.trained]
    )
    skipped = set(flat) if job.training.skip_flat_groups else set()
    columns = zip(rollouts, found.trajectories, found.trained, found.targets, strict=True)
    episodes = [
        CreditedEpisode(
            rollout.rollout_id, segments_of(item.steps, rollout_id=rollout.rollout_id), given, critic
        )
        for rollout, item, given, critic in columns
        if rollout.group_id not in skipped
    ]
    metrics = {
        **decision_metrics(found.trajectories, [episode.rewards_T for episode in found.episodes]),
        **found.advantages.diagnostics,
        "group/flat": float(len(flat)),
    }
    return Credited(episodes, found.credits(job), metrics, flat)


def credits_of(
    job: JobConfig, rollouts: Sequence[Rollout], values: Mapping[str, OfEpisode] | None = None
) -> list[Credit]:
    """The credits of `credit` alone, without what only an update and its logs need; else the same."""
    return _estimate(job, rollouts, values).credits(job)


@dataclass(frozen=True, slots=True)
class _Estimated:
    """Stops 9 and 10; all lists in the order of the rollouts.

    Attributes:
        trained: what the update is given of each episode, by decision or by token.
        targets: of the critic; None without one.
    """

    trajectories: list[Trajectory]
    episodes: list[EpisodeRewards]
    advantages: Advantages
    trained: Sequence[OfEpisode]
    targets: list[CriticTargets | None]

    def credits(self, job: JobConfig) -> list[Credit]:
        return [
            _credit(job, episode, self.advantages, index, self.targets[index])
            for index, episode in enumerate(self.episodes)
        ]


def _estimate(
    job: JobConfig, rollouts: Sequence[Rollout], values: Mapping[str, OfEpisode] | None
) -> _Estimated:
    trajectories = finished_trajectories(rollouts, "credit")
    rewards = _rewards(job, rollouts, trajectories)
    episodes = [
        _rewarded(job, rollout, item, rewards_T, (values or {}).get(rollout.rollout_id, ()))
        for rollout, item, rewards_T in zip(rollouts, trajectories, rewards, strict=True)
    ]
    advantages = estimator(job.algorithm.advantage).compute(episodes, advantage_config(job))
    trained: Sequence[OfEpisode] = advantages.per_token or advantages.per_episode
    targets = [
        targets_of(episode.token_values or episode.values_T, item) if episode.values_T else None
        for episode, item in zip(episodes, trained, strict=True)
    ]
    return _Estimated(trajectories, episodes, advantages, trained, targets)


def segments_by_rollout(rollouts: Sequence[Rollout]) -> dict[str, list[Segment]]:
    """Stop 7 for those that finished.

    Raises:
        SegmentError: see `segments_of`.
    """
    return {
        rollout.rollout_id: segments_of(rollout.trajectory.steps, rollout_id=rollout.rollout_id)
        for rollout in rollouts
        if rollout.trajectory is not None
    }


def _rewards(
    job: JobConfig, rollouts: Sequence[Rollout], trajectories: Sequence[Trajectory]
) -> list[list[float]]:
    """r_t [T] of each episode, in which nothing that was achieved is lost."""
    config = reward_config(job)
    rewards = [
        reward_vector(
            item.steps, outcome_reward=item.outcome_reward, config=config, rollout_id=rollout.rollout_id
        )
        for rollout, item in zip(rollouts, trajectories, strict=True)
    ]
    for rollout, item, rewards_T in zip(rollouts, trajectories, rewards, strict=True):
        refuse_lost_reward(item, rewards_T, config, rollout_id=rollout.rollout_id)
    return rewards


def _rewarded(
    job: JobConfig, rollout: Rollout, trajectory: Trajectory, rewards_T: Sequence[float], values: OfEpisode
) -> EpisodeRewards:
    """An episode as the job's estimator sees it."""
    plug = estimator(job.algorithm.advantage)
    by_token = values if plug.needs_values == "token" and isinstance(values, ByToken) else None
    return EpisodeRewards(
        rollout.rollout_id,
        rollout.group_id,
        rewards_T,
        state_keys_T=_state_keys(job, trajectory, rollout.rollout_id) if plug.needs_state_keys else (),
        values_T=firsts(values) if plug.needs_values else (),
        token_values=by_token,
    )


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
        token_advantages=advantages.per_token[index] if advantages.per_token else None,
        token_values=episode.token_values,
    )


def advantage_config(job: JobConfig) -> AdvantageConfig:
    """The keys of [algorithm], for estimators."""
    table = job.algorithm
    return AdvantageConfig(
        gamma=table.gamma,
        gae_lambda=table.gae_lambda,
        gae_token_lambda=table.gae_token_lambda,
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
