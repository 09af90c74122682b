"""Computes segments, rewards r_t and advantages of finished rollouts (stops 7, 9 and 10 of docs/route.md).

Pure: the same stored rollouts give the same numbers on any machine.
"""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile
from typing import Any

from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import Trajectory, prompts
from trainer_backend.collect.metrics import finished_trajectories
from trainer_backend.core.advantages.branch import Branches
from trainer_backend.core.advantages.episodes import Advantages, EpisodeRewards, EstimatorPlug
from trainer_backend.core.advantages.gae import foretold
from trainer_backend.core.advantages.spread import flat_groups
from trainer_backend.core.critic import ByToken, CriticTargets, OfEpisode, firsts, make_targets
from trainer_backend.core.forks import compare_at_forks, cut_rest
from trainer_backend.core.kl_reward import ScoredTokens
from trainer_backend.core.metric import Metric, Panel, Row
from trainer_backend.core.policies import ACTOR
from trainer_backend.core.rewards import discounted_returns
from trainer_backend.core.segments import Segment
from trainer_backend.core.statistics import decision_metrics
from trainer_backend.credit.rewards import Earned, Policies, Rewards, kl_metrics
from trainer_backend.errors import AdvantageError, CreditError, place
from trainer_backend.job.training_table import AlgorithmTable
from trainer_backend.parts import CreditedEpisode
from trainer_backend.plugins import estimator, fork_rule
from trainer_backend.rundir.rollout_files import Credit


@dataclass(frozen=True, slots=True)
class Measured:
    """Inputs that some estimators need in addition to the rollouts, keyed by rollout id."""

    values: Mapping[str, OfEpisode] = field(default_factory=dict)
    """The critic's values V(s_t) of each episode."""
    after: Mapping[str, float] | None = None
    """V of the state after the last decision, for episodes that a limit cut short; None: not measured."""
    branches: Mapping[str, Branches] | None = None
    """Rollouts that start in the middle of an episode; None: no branches were played."""
    scored: Mapping[str, ScoredTokens] = field(default_factory=dict)
    """Log-probs of the tokens of rollouts and branches, under the policy and under the reference policy."""


NOTHING = Measured()


@dataclass(frozen=True, slots=True)
class Credited:
    """The result of crediting a batch of rollouts: the update's input, the credit to store, and metrics."""

    episodes: list[CreditedEpisode]
    """The episodes to train on. If the job skips flat groups, their episodes are left out."""
    credits: list[Credit]
    """The credit of each rollout, in the order of the rollouts passed to `credit`."""
    metrics: dict[str, float]
    flat: list[str]
    """Ids of the groups of whole episodes whose advantages are all 0 (`spread.flat_groups`). This test leaves
    out the cost of KL, because the cost differs a little between any two episodes."""
    fork_credits: Mapping[str, Credit] = field(default_factory=dict)
    """Credit of the continuations that are trained (`train_branches`), by rollout id."""


def _find_flat_groups(estimate: "_Estimate") -> list[str]:
    """Return the ids of the rollout groups whose advantages are all 0.

    With `baseline = "per_policy"`, the advantages of all policies in the group must be 0.
    """
    advantages = [item.flat if isinstance(item, ByToken) else item for item in estimate.trained]
    played = zip(estimate.episodes, estimate.rollouts, strict=True)
    return flat_groups([replace(item, group_id=rollout.group_id) for item, rollout in played], advantages)


@dataclass(frozen=True, slots=True)
class _Estimate:
    """Rewards and advantages of rollouts; all lists are in the order of the rollouts."""

    rollouts: Sequence[Rollout]
    trajectories: list[Trajectory]
    policies: list[str]
    """The policy that sampled each rollout."""
    earned: list[Earned]
    episodes: list[EpisodeRewards]
    advantages: Advantages
    trained: Sequence[OfEpisode]
    """Advantages for the update, by decision or by token."""
    targets: list[CriticTargets | None]
    """Targets of the critic; None without a critic."""

    def credits(self, algorithm: AlgorithmTable) -> list[Credit]:
        return [self._credit(index, algorithm) for index in range(len(self.episodes))]

    def actor_metrics(self, gamma: float) -> dict[str, float]:
        """Return the decision metrics of the actor's rollouts and the estimator's metrics of all rollouts."""
        own = [index for index, policy in enumerate(self.policies) if policy == ACTOR]
        metrics = self.advantages.diagnostics
        if not own:
            return metrics
        if self.episodes[0].values_T:
            metrics = metrics | foretold([self.episodes[index] for index in own], gamma)
        paid = [self.earned[index].paid_T for index in own]
        return decision_metrics([self.trajectories[index] for index in own], paid) | metrics

    def _credit(self, index: int, algorithm: AlgorithmTable) -> Credit:
        """Return the credit to store for an episode. With a critic, the stored returns are its targets."""
        episode, advantages, targets = self.episodes[index], self.advantages, self.targets[index]
        discounted_T = discounted_returns(episode.rewards_T, algorithm.gamma)
        return Credit(
            episode.rewards_T,
            advantages.per_episode[index],
            discounted_T if targets is None else firsts(targets.returns),
            algorithm.advantage,
            {name: values[index] for name, values in advantages.parts.items()},
            state_keys_T=episode.state_keys_T,
            branch_returns_T=episode.branch_returns_T,
            token_advantages=advantages.per_token[index] if advantages.per_token else None,
            token_values=episode.token_values,
            value_after=episode.value_after,
        )


GROUP_METRICS = (
    Row(
        Metric("group/count", "groups that were played"),
        Metric(
            "group/flat", "groups whose advantages are all 0 (a KL in the rewards is left out of this test)"
        ),
        Metric("group/refilled", "extra groups that replaced them"),
    ),
)
FORK_METRICS = (
    Row(
        Metric("forks/count", "forks"),
        Metric("forks/flat", "those whose advantages are all 0"),
        Metric("forks/rollouts", "continuations that are credited"),
        Metric("forks/share", "share of the trained decisions that come after forks", "forks", "after forks"),
        when="only with `train_branches`",
    ),
    Row(
        Metric("forks/left_out", "episodes that are not forked, since they began at a snapshot themselves "
               "([`[curriculum]`](credit.md#where-games-start))"),
        when="only with `train_branches`",
    ),
    Row(
        Metric(
            "forks/gain", "mean return of continuations less that of their parents from the fork on",
            Panel("fork_gain", "Rewards and credit", "Gain of forks",
                  "Mean return of continuations less that of their parents from there on."),
            "gain",
        ),
        when="only with `train_branches`",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CreditAssignment:
    """Computes rewards and advantages of rollouts, with the settings and the estimator of a job."""

    algorithm: AlgorithmTable
    policies: Policies
    rewards: Rewards
    skips_flat_groups: bool = False
    """Whether groups whose advantages are all 0 are left out of the update."""

    @property
    def has_branches(self) -> bool:
        """Return whether the job plays branches, for its estimator or for training."""
        return self.estimator.needs_branches or self.algorithm.train_branches

    @property
    def estimator(self) -> EstimatorPlug[Any]:
        return estimator(self.algorithm.advantage)

    def credit(self, rollouts: Sequence[Rollout], measured: Measured = NOTHING) -> Credited:
        """Compute segments, r_t and advantages of finished rollouts.

        `measured` contains the inputs that the job's estimator needs in addition to the rollouts. Raises
        CreditError, which names the rollout, if data is missing or invalid.
        """
        estimate, forks = estimates = self._estimates(rollouts, measured)
        without_kl = estimates
        if self.rewards.pays_kl:
            without_kl = replace(self, rewards=self.rewards.without_kl())._estimates(rollouts, measured)
        flat, flat_forks = map(_find_flat_groups, without_kl)
        skipped = {*flat, *flat_forks} if self.skips_flat_groups else set()
        trained, after_forks = (self._credited(item, skipped) for item in estimates)
        metrics = {
            **estimate.actor_metrics(self.algorithm.gamma),
            **kl_metrics(estimate.earned),
            **(self._fork_metrics(estimates, trained, after_forks) if self.algorithm.train_branches else {}),
            **({"forks/flat": float(len(flat_forks))} if self.algorithm.train_branches else {}),
            "group/count": float(len({rollout.group_id for rollout in rollouts})),
            "group/flat": float(len(flat)),
        }
        credits, fork_credits = (item.credits(self.algorithm) for item in estimates)
        names = (rollout.rollout_id for rollout in forks.rollouts)
        by_name = dict(zip(names, fork_credits, strict=True))
        return Credited([*trained, *after_forks], credits, metrics, flat, by_name)

    def credits(self, rollouts: Sequence[Rollout], measured: Measured = NOTHING) -> list[Credit]:
        """Compute the credit of finished rollouts, without the update's input and metrics; see `credit`."""
        return self._estimate(rollouts, measured).credits(self.algorithm)

    def continuations(self, measured: Measured) -> list[Rollout]:
        """Return the branches to train on, grouped by fork; empty without `train_branches`."""
        if not self.algorithm.train_branches:
            return []
        forks = (fork for by_turn in (measured.branches or {}).values() for fork in by_turn.values())
        return list(chain.from_iterable(forks))

    def fork_credits(self, rollouts: Sequence[Rollout], measured: Measured) -> list[Credit]:
        """Compute the credit of `continuations(measured)`; `rollouts` must contain their parent rollouts."""
        _, forks = self._estimates(rollouts, measured)
        return forks.credits(self.algorithm)

    def td_errors(self, rollout: Rollout, measured: Measured) -> list[float]:
        """Compute the [T] TD errors r_t + gamma V(s_{t+1}) - V(s_t) of a rollout; V is from `measured`."""
        episode = rollout.trajectory
        assert episode is not None, "only finished rollouts have values"
        rewards_T = self._earned(rollout, measured).rewards_T
        values_T = firsts(measured.values[rollout.rollout_id])
        after = self._value_after(rollout, episode, measured) or 0.0
        following = zip(rewards_T, [*values_T[1:], after], values_T, strict=True)
        return [reward + self.algorithm.gamma * then - value for reward, then, value in following]

    def find_rejected(
        self, rollouts: Sequence[Rollout], measured: Measured = NOTHING
    ) -> dict[str, CreditError]:
        """Return the error of each finished rollout that cannot be credited, by rollout id.

        If measurements of a rollout are missing, only its segments are checked. They can be missing because
        measuring another rollout failed.
        """
        rejected: dict[str, CreditError] = {}
        for rollout in rollouts:
            if rollout.trajectory is None:
                continue
            try:
                self.policies.segments_by(rollout)
                self.policies.final_view_by(rollout)
                if (self.rewards.pays_kl and rollout.rollout_id not in measured.scored) or (
                    self.estimator.needs_values and rollout.rollout_id not in measured.values
                ):  # it was not measured
                    continue
                rewards_T = self._earned(rollout, measured).rewards_T
                self._rewarded(rollout, rollout.trajectory, rewards_T, measured)
            except CreditError as error:
                rejected[rollout.rollout_id] = error
        return rejected

    def segments(self, rollouts: Sequence[Rollout]) -> dict[str, list[Segment]]:
        """Build the segments of finished rollouts, by rollout id; see `Policies.segments_by`."""
        return {
            item.rollout_id: self.policies.segments_by(item)
            for item in rollouts
            if item.trajectory is not None
        }

    def final_views(self, rollouts: Sequence[Rollout]) -> dict[str, Segment]:
        """Build the final prompts of episodes cut short by a limit, by id; see `Policies.final_view_by`."""
        views = {item.rollout_id: self.policies.final_view_by(item) for item in rollouts}
        return {name: view for name, view in views.items() if view is not None}

    def _earned(self, rollout: Rollout, measured: Measured) -> Earned:
        """Compute the rewards of a rollout. Decisions before a snapshot at its start shorten its horizon."""
        done = None if rollout.trajectory is None else rollout.trajectory.parent_turn
        return self.rewards.earned_by(rollout, measured.scored, decisions_done=done or 0)

    def _credited(self, estimate: _Estimate, skipped: Container[str]) -> list[CreditedEpisode]:
        """Return the episodes to train on, without those of the `skipped` groups."""
        columns = zip(estimate.rollouts, estimate.policies, estimate.trained, estimate.targets, strict=True)
        return [
            CreditedEpisode(
                rollout.rollout_id,
                self.policies.segments_by(rollout),
                advantages,
                critic=critic,
                policy=policy,
            )
            for rollout, policy, advantages, critic in columns
            if rollout.group_id not in skipped
        ]

    def _estimates(self, rollouts: Sequence[Rollout], measured: Measured) -> tuple[_Estimate, _Estimate]:
        """Return the estimate of whole episodes, and the estimate of trained continuations.

        The continuations from one decision (a fork) form a group of their own.
        """
        estimate = self._estimate(rollouts, measured)
        continuations = self.continuations(measured)
        forks = self._estimate_forks(continuations, estimate, measured) if continuations else _NO_FORKS
        return estimate, forks

    def _estimate_forks(
        self, continuations: Sequence[Rollout], parents: _Estimate, measured: Measured
    ) -> _Estimate:
        """Compute the advantages of continuations.

        The first decision of each continuation is compared with the other members of the fork by
        leave-one-out. Later decisions get the advantages of the job's estimator. If the fork rule reads no
        samples, the part of the parent after the fork is also a member, but is not trained again.
        """
        is_blind = not fork_rule(self.algorithm.fork_rule).reads_samples
        rests = [
            cut_rest(episode, turn, members[0].group_id)
            for episode in (parents.episodes if is_blind else ())
            for turn, members in (measured.branches or {}).get(episode.rollout_id, {}).items()
        ]
        found = self._estimate(continuations, measured, rests)
        advantages = compare_at_forks(found.advantages, found.episodes, rests, self.algorithm.gamma)
        return replace(found, advantages=advantages, trained=advantages.per_token or advantages.per_episode)

    def _fork_metrics(
        self,
        estimates: tuple[_Estimate, _Estimate],
        trained: Sequence[CreditedEpisode],
        after_forks: Sequence[CreditedEpisode],
    ) -> dict[str, float]:
        """Compute the metrics of trained continuations (`FORK_METRICS`), without `forks/flat`."""
        parents, forks = estimates
        gamma = self.algorithm.gamma
        returns = {
            episode.rollout_id: discounted_returns(episode.rewards_T, gamma) for episode in parents.episodes
        }
        gains = [
            discounted_returns(episode.rewards_T, gamma)[0]
            - returns[trajectory.parent_rollout_id or ""][trajectory.parent_turn or 0]
            for episode, trajectory in zip(forks.episodes, forks.trajectories, strict=True)
        ]
        counts = [sum(len(firsts(item.advantages)) for item in part) for part in (trained, after_forks)]
        return {
            "forks/count": float(len({rollout.group_id for rollout in forks.rollouts})),
            "forks/rollouts": float(len(forks.rollouts)),
            "forks/share": counts[1] / max(sum(counts), 1),
            "forks/left_out": float(sum(item.is_continued for item in parents.trajectories)),
            **({"forks/gain": math.fsum(gains) / len(gains)} if gains else {}),
        }

    def _estimate(
        self, rollouts: Sequence[Rollout], measured: Measured, rests: Sequence[EpisodeRewards] = ()
    ) -> _Estimate:
        """Run the job's estimator over the rollouts, and compare them also with the siblings in `rests`."""
        trajectories = finished_trajectories(rollouts, "credit")
        policies = [self.policies.policy_by(rollout) for rollout in rollouts]
        earned = [self._earned(rollout, measured) for rollout in rollouts]
        episodes = [
            self._rewarded(rollout, item, earnings.rewards_T, measured)
            for rollout, item, earnings in zip(rollouts, trajectories, earned, strict=True)
        ]
        keys = self.algorithm.read(self.estimator.keys, self.algorithm.advantage)
        advantages = self.estimator.compute([*episodes, *rests], keys)
        trained: Sequence[OfEpisode] = (advantages.per_token or advantages.per_episode)[: len(episodes)]
        for_critic = trained
        if (others := keys.for_critic()) != keys:
            found = self.estimator.compute(episodes, others)
            for_critic = found.per_token or found.per_episode
        targets = [
            make_targets(episode.token_values or episode.values_T, item) if episode.values_T else None
            for episode, item in zip(episodes, for_critic, strict=True)
        ]
        return _Estimate(
            rollouts, trajectories, policies, earned, episodes,
            advantages=advantages, trained=trained, targets=targets,
        )  # fmt: skip

    def _rewarded(
        self, rollout: Rollout, trajectory: Trajectory, rewards_T: Sequence[float], measured: Measured
    ) -> EpisodeRewards:
        """Convert a rollout to the job's estimator's input. Fill only the fields that the estimator reads."""
        plug, name = self.estimator, rollout.rollout_id
        policy = self.policies.policy_by(rollout)
        # With a baseline per policy, episodes are compared only within their policy's part of the group.
        baselines = {table.name: table.baseline for table in self.policies.fixed}
        alone = policy != ACTOR and baselines[policy] == "per_policy"
        values = measured.values.get(name, ())
        by_token = values if plug.needs_values == "token" and isinstance(values, ByToken) else None
        branched = plug.needs_branches and measured.branches is not None
        by_outcome = self.algorithm.episode_score == "outcome" and "episode_score" in plug.keys.model_fields
        return EpisodeRewards(
            name,
            f"{rollout.group_id}/{policy}" if alone else rollout.group_id,
            rewards_T,
            state_keys_T=_state_keys(self.algorithm.state_hashing_function, trajectory, name)
            if plug.needs_state_keys
            else (),
            texts_T=_texts(trajectory, name) if plug.needs_texts else (),
            values_T=firsts(values) if plug.needs_values else (),
            token_values=by_token,
            branch_returns_T=self._branch_returns(trajectory, measured, name) if branched else (),
            final_score=trajectory.outcome_reward if by_outcome else None,
            truncated=trajectory.cut_short,
            value_after=self._value_after(rollout, trajectory, measured),
        )

    def _value_after(self, rollout: Rollout, trajectory: Trajectory, measured: Measured) -> float | None:
        """Return V of the state after the last decision; None if the estimator does not bootstrap from it.

        An estimator bootstraps only in episodes that a limit cut short. Raises AdvantageError if no values
        of such states were measured.
        """
        reads_key = "bootstrap_truncated" in self.estimator.keys.model_fields
        if not (self.algorithm.bootstrap_truncated and reads_key and trajectory.cut_short):
            return None
        if measured.after is None:
            raise AdvantageError(
                "no value of the state after its last decision, which algorithm.bootstrap_truncated needs",
                where=place(rollout.rollout_id),
                hint="They are asked for and stored while a run trains with that key.",
            )
        return measured.after.get(rollout.rollout_id)

    def _branch_returns(self, parent: Trajectory, measured: Measured, rollout_id: str) -> list[list[float]]:
        """Compute, for each decision, the discounted returns of the branches that start before it."""
        of_episode = (measured.branches or {}).get(rollout_id, {})
        rule = self.algorithm.fork_rule
        if self.algorithm.train_branches and of_episode and fork_rule(rule).reads_samples:
            raise AdvantageError(
                f"algorithm.fork_rule = {rule!r} chose its branches by what was sampled, so they are no "
                "baseline of its own decisions",
                where=place(rollout_id),
                hint="fork_rule = 'uniform' chooses them by seed alone.",
            )
        return [
            [
                # A branch numbers its decisions from 1, but its horizon is what the parent had left.
                discounted_returns(
                    self.rewards.earned_by(branch, measured.scored, decisions_done=step.turn - 1).rewards_T,
                    self.algorithm.gamma,
                )[0]
                for branch in of_episode.get(step.turn, ())
            ]
            for step in parent.steps
        ]


# The estimate of continuations in a job that trains none.
_NO_FORKS = _Estimate([], [], [], [], [], Advantages([]), [], [])


def _texts(trajectory: Trajectory, rollout_id: str) -> list[str]:
    """Return the [T] texts of the observations, each made of the messages since the policy's last answer."""
    texts = []
    for t, prompt in enumerate(prompts(trajectory.steps)):
        if not prompt:
            raise AdvantageError("its prompt is not stored", where=place(rollout_id, t + 1))
        newest = list(takewhile(lambda message: message.role != "assistant", reversed(prompt)))
        texts.append("\n".join(item.content or "" for item in reversed(newest) if item.role != "system"))
    return texts


def _state_keys(name: str, trajectory: Trajectory, rollout_id: str) -> list[str]:
    """Return the [T] state keys that the state hashing function `name` gave to the decisions."""
    keys = []
    for step in trajectory.steps:
        key = step.observation_data.state_keys.get(name)
        if key is None:
            stored = ", ".join(sorted(step.observation_data.state_keys)) or "none"
            raise AdvantageError(
                f"no state key {name!r}; stored: {stored}",
                where=place(rollout_id, step.turn),
                hint="State keys are computed while an episode is played (rollout.state_keys).",
            )
        keys.append(key)
    return keys
