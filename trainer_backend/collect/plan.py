"""Plans the rollout requests of iterations, warm-ups and evaluations.

All functions are pure: the same job and arguments give the same requests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

from pydantic import SecretStr

from shared_schemas.rewards import StepRewards
from shared_schemas.rollouts import (
    CostKeys,
    EnvSpec,
    PolicySpec,
    Rollout,
    RolloutLimits,
    RolloutRequest,
    Start,
)
from shared_schemas.trajectory import exact_tokens
from trainer_backend.collect.sources import (
    Allocation,
    Inference,
    Origin,
    Source,
    group_name,
    model_config,
)
from trainer_backend.core.advantages.branch import branch_group, branch_turns
from trainer_backend.core.forks import ForkPlug, Parent
from trainer_backend.core.policies import ACTOR, name_model
from trainer_backend.core.seeds import derived_seed
from trainer_backend.core.starts import CurriculumKeys, Moment, Starts
from trainer_backend.job.mixture_table import RolloutOnlyTable
from trainer_backend.job.rollout_table import MultiTurnTable, RolloutTable, WarmupTable
from trainer_backend.job.schema import EvaluationTable
from trainer_backend.job.training_table import AlgorithmTable, TrainingTable
from trainer_backend.plugins import estimator, fork_rule

__all__ = ["Inference", "Planner", "digest_tasks", "retried"]

# The shortest time limit of a branch. A limit of 0 s would mean that there is no limit.
_LEAST_TIMEOUT_S = 1.0
# The fields of a request that define its task, without the policy that plays it.
_TASK: dict[str, Any] = {
    **dict.fromkeys(("start", "env", "multi_turn", "ground_truth", "reward_function", "interaction"), True),
    "limits": RolloutLimits.model_fields.keys() - {"timeout_s"} - CostKeys.model_fields.keys(),
}


NO_STEP_REWARDS = StepRewards()


class Slot(NamedTuple):
    """The position of a rollout in the plan. It determines the rollout's id and its seeds."""

    stage: str
    iteration: int
    group: int
    sibling: int = 0


@dataclass(frozen=True, slots=True)
class Players:
    """Builds the environment, the policy and the limits of a rollout request from a job's settings."""

    rollout: RolloutTable
    multi_turn: MultiTurnTable
    held_out: EvaluationTable
    fixed: tuple[RolloutOnlyTable, ...]
    servers: Mapping[str, Inference]
    """The model server of each policy, by the policy's name; empty if no policy is a language model."""
    seed: int

    @property
    def max_decisions(self) -> int:
        return self.multi_turn.max_decisions(self.rollout.max_turns)

    def sampled_by(self, policy: str, rollout_id: str, *seed_parts: int | str) -> PolicySpec:
        """Return the specification of the policy that samples a training rollout.

        Args:
            policy: the name of the actor or of a fixed policy.
            seed_parts: determine the sampling seed, together with the job's seed.
        """
        server = self._server(policy).for_rollout(rollout_id)
        fixed = next((table for table in self.fixed if table.name == policy), None)
        seed = derived_seed(self.seed, *seed_parts)
        config = model_config(self.multi_turn, server, self.rollout.choose_sampling(fixed))
        return _spec(self.rollout.policy_name, {**config, **self.rollout.policy_config}, server, seed)

    def scripted(self, name: str, purpose: str, group: int, config: Mapping[str, Any]) -> PolicySpec:
        """Return the specification of a policy other than the actor, such as the random policy."""
        return _spec(name, config, self.servers.get(ACTOR), derived_seed(self.seed, purpose, group))

    def evaluated(
        self, rollout_id: str, group: int, config: Mapping[str, Any], *, repeat: int = 0
    ) -> PolicySpec:
        """Return the specification of the actor in an evaluation, with the same seeds in every evaluation."""
        rollout, server = self.rollout, self._server(ACTOR).for_rollout(rollout_id)
        seed = derived_seed(self.seed, *Slot("evaluation", 0, group, repeat))
        temperature = self.held_out.evaluation_temperature(rollout)
        sampling = rollout.choose_sampling().model_copy(update={"temperature": temperature})
        own = model_config(self.multi_turn, server, sampling)
        return _spec(rollout.policy_name, {**own, **rollout.policy_config, **config}, server, seed)

    def env(self, origin: Origin) -> EnvSpec:
        rollout = self.rollout
        return EnvSpec(env_name=rollout.env_name, config={**rollout.env_config, **origin.env_config})

    def limits(self, *, decisions_done: int = 0, invalid: int = 0, used_s: float = 0.0) -> RolloutLimits:
        """Return the limits for the rest of an episode.

        Args:
            decisions_done: the number of decisions that the episode had before.
            invalid: the number of these decisions that were invalid.
            used_s: the seconds that the episode took before.
        """
        rollout = self.rollout
        rest = {
            "max_decisions": self.max_decisions - decisions_done,
            "max_invalid_decisions": rollout.max_invalid_decisions - invalid,
            "timeout_s": max(rollout.timeout_s - used_s, min(rollout.timeout_s, _LEAST_TIMEOUT_S)),
        }
        return RolloutLimits(**rollout.dump_limits() | rest)

    def _server(self, policy: str) -> Inference:
        server = self.servers.get(policy)
        if server is None:
            whom = "a language model" if policy == ACTOR else f"the fixed policy {policy!r}"
            raise ValueError(f"this plan needs {whom}, and no inference server was given for it")
        return server


def inferences(
    job_name: str, rollout: RolloutTable, fixed: Sequence[RolloutOnlyTable], actor: Inference
) -> dict[str, Inference]:
    """Return the model server of the actor and of each fixed policy, by the name of the policy.

    All of them are the actor's gateway; the model name in a request selects the policy there.
    """
    # If sampling is truncated (top-p, top-k), the behaviour log-probs are those within the truncated
    # vocabulary.
    asks = {"processed_logprobs": True}
    return {ACTOR: actor} | {
        table.name: replace(
            actor,
            model=name_model(job_name, table.name),
            asks=asks if rollout.choose_sampling(table).is_truncated else {},
        )
        for table in fixed
    }


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans rollout requests from the tables of a job."""

    run_id: str
    """The name of the run at task apps. Every rollout id begins with this name."""
    players: Players
    source: Source
    allocation: Allocation
    table: TrainingTable
    """The job's table [training]."""
    algorithm: AlgorithmTable
    teacher: WarmupTable | None = None
    """The job's table [warmup]; None: the job has no such table."""
    curriculum: CurriculumKeys | None = None
    """The job's table [curriculum]; None: the job has no such table."""
    starts: Starts | None = None
    """Chooses snapshots from which groups of an iteration start; None: no group starts from a snapshot."""

    def training(self, iteration: int) -> list[RolloutRequest]:
        """Plan the groups of an iteration. Siblings have the same origin and different sampling seeds."""
        origins = self._origins(iteration)
        if self.starts is not None:  # the last groups start from snapshots
            moments = self.starts.choose(iteration, len(origins))
            first = len(origins) - len(moments)
            draws = [self.starts.draws_seed(iteration, group) for group in range(first, len(origins))]
            origins[first:] = map(self._origin_at, moments, draws)
        return self._groups("train", iteration, origins)

    def first_training(self) -> RolloutRequest:
        """Plan only the first request of the first iteration, without the cost of planning all requests."""
        return self._groups("train", 1, self.source.training("train", range(1), 1), siblings=1)[0]

    def refill(
        self, iteration: int, round_number: int, groups: int, *, refilled: int = 0
    ) -> list[RolloutRequest]:
        """Plan further groups of an iteration, on origins that the iteration has not played yet.

        If the origins are a fixed set, played origins are repeated only after all others, because a group
        that was flat (all advantages 0) would probably be flat again.

        Args:
            round_number: the number of the refill in this iteration, from 1.
            groups: the number of groups to plan.
            refilled: the number of groups that earlier refills of the iteration have requested.
        """
        stage, numbers = f"refill-{round_number}", range(refilled, refilled + groups)
        played = self._origins(iteration)
        origins = self.source.refill(stage, iteration, played=played, numbers=numbers)
        return self._groups(stage, iteration, origins)

    def branches(self, parents: Sequence[Rollout]) -> list[RolloutRequest]:
        """Plan branches that estimate the values at the snapshots of finished rollouts.

        A branch is played by the actor with other seeds than its parent. Its limits, including the time
        limit, are what the parent had left at the snapshot. These branches are not trained; see `forks`.
        """
        return [
            request
            for parent in (() if self.algorithm.train_branches else parents)
            for step in (() if parent.trajectory is None else parent.trajectory.steps)
            if step.snapshot is not None
            for request in self._branches_from(parent, step.turn, step.snapshot)
        ]

    @property
    def fork_rule(self) -> ForkPlug | None:
        """The rule that chooses the turns where trained branches start; None: branches are not trained."""
        return fork_rule(self.algorithm.fork_rule) if self.algorithm.train_branches else None

    def fork_turns(self, parent: Rollout, td_errors_T: Sequence[float] = ()) -> tuple[int, ...]:
        """Choose the turns of a finished episode before which trained branches start, by `fork_rule`.

        The result is empty if the episode started from a snapshot, because it cannot be replayed from a seed.

        Args:
            td_errors_T: the critic's TD error of each decision; may be empty if the rule needs no values.
        """
        rule, episode = self.fork_rule, parent.trajectory
        if rule is None or episode is None or episode.is_continued:
            return ()
        surprise_T = [-math.fsum(call.logprobs if call else ()) for call in map(exact_tokens, episode.steps)]
        return self._chosen_by(rule, parent.group_id, parent.sibling, surprise_T, td_errors_T)

    def _chosen_by(
        self,
        rule: ForkPlug,
        group_id: str,
        sibling: int,
        surprise_T: Sequence[float],
        td_errors_T: Sequence[float] = (),
    ) -> tuple[int, ...]:
        facts = Parent(self._first_branch, self.players.max_decisions, surprise_T, td_errors_T)
        seed = derived_seed(self.players.seed, "forks", group_id, sibling)
        return rule.choose(facts, self.algorithm.branches_per_episode, seed)

    def forks(
        self, parent: Rollout, snapshots: Mapping[int, str], *, fresh_draws: bool
    ) -> list[RolloutRequest]:
        """Plan the trained branches of a finished rollout.

        Args:
            snapshots: maps a number of decisions to the snapshot after them, at which branches start.
            fresh_draws: whether the environment draws random numbers that differ from the parent's. All
                siblings of a group draw the same ones.
        """
        return [
            request.model_copy(
                update={
                    "state_keys": self._state_keys,
                    "final_view": self.algorithm.bootstrap_truncated,
                }
            )
            for done, snapshot in sorted(snapshots.items())
            for request in self._branches_from(parent, done + 1, snapshot, fresh_draws=fresh_draws)
        ]

    def _branches_from(
        self, parent: Rollout, turn: int, snapshot: str, *, fresh_draws: bool = False
    ) -> list[RolloutRequest]:
        """Plan a group of branches that start from the snapshot before turn `turn` of a rollout."""
        name, origin = parent.rollout_id, (parent.group_id, parent.sibling, turn)
        draws = derived_seed(self.players.seed, "fork draws", *origin) if fresh_draws else None
        start = Start(snapshot=snapshot, draws_seed=draws, parent_rollout_id=name, parent_turn=turn - 1)
        group_id = branch_group(name, turn)
        return [
            self.continuation(parent, start, group_id, sibling, seed_parts=("branch", *origin, sibling))
            for sibling in range(self.algorithm.branch_rollouts)
        ]

    def warmup(self, key: SecretStr | None = None, *, most: int | None = None) -> list[RolloutRequest]:
        """Plan the teacher's episodes for the warm-up. The result is empty if the job has no warm-up.

        Args:
            key: API key of the teacher's model server, if the teacher is a language model.
            most: plan only this many of the first episodes.
        """
        table = self.teacher
        if table is None:
            return []
        origins = self.source.training("warmup", range(table.episodes)[:most], 0)
        requests = []
        for group, origin in enumerate(origins):
            spec = PolicySpec(
                policy_name=table.policy_name,
                config=table.policy_config,
                seed=derived_seed(self.players.seed, "warmup", group),
                inference_key=key,
            )
            requests.append(self._request(Slot("warmup", 0, group), origin, spec))
        return requests

    def prompts(self, episodes: int) -> list[RolloutRequest]:
        """Plan episodes of a random policy.

        If there is no warm-up, the tokenizer of a preset is trained on the prompts of these episodes.
        """
        return [
            self._request(
                Slot("prompts", 0, group), origin, self.players.scripted("random", "prompts", group, {})
            )
            for group, origin in enumerate(self.source.training("prompts", range(episodes), 0))
        ]

    def evaluation(
        self,
        label: str,
        *,
        policy_name: str | None = None,
        policy_config: Mapping[str, Any] | None = None,
        most: int | None = None,
        repeats: int = 1,
    ) -> list[RolloutRequest]:
        """Plan episodes on each held-out origin. Every evaluation has the same sampling seeds.

        Args:
            label: becomes a part of the rollout ids.
            policy_name: a policy of the task app that plays; None: the actor plays.
            policy_config: overrides settings of the actor's config, or is the whole config of `policy_name`.
            most: the number of origins; None: all.
            repeats: the number of episodes on each origin. The first is the same as with `repeats = 1`.
        """
        config, requests = policy_config or {}, []
        for group, origin in enumerate(self.source.evaluation(most)):
            for repeat in range(repeats):
                slot = Slot(f"eval-{label}", 0, group, repeat)
                if policy_name is None:
                    spec = self.players.evaluated(self._rollout_id(slot), group, config, repeat=repeat)
                else:
                    purpose = f"evaluation.{repeat}" if repeat else "evaluation"
                    spec = self.players.scripted(policy_name, purpose, group, config)
                requests.append(self._request(slot, origin, spec, self.table.step_rewards))
        return requests

    def largest(self) -> RolloutRequest:
        """Plan a request with the training or held-out row that needs the most bytes."""
        return self._groups("train", 1, [self.source.largest()], siblings=1)[0]

    def _groups(
        self, stage: str, iteration: int, origins: Sequence[Origin], *, siblings: int | None = None
    ) -> list[RolloutRequest]:
        """Plan a group of `siblings` rollouts on each origin; None: a group has `training.group_size`."""
        size = siblings or self.table.group_size
        samplers = self.allocation.samplers(stage, iteration, groups=len(origins), siblings=size)
        requests = []
        for group, origin in enumerate(origins):
            for sibling, policy in enumerate(samplers[group]):
                slot = Slot(stage, iteration, group, sibling)
                spec = self.players.sampled_by(policy, self._rollout_id(slot), *slot)
                request = self._request(
                    slot, origin, spec, self.table.step_rewards,
                    state_keys=self._state_keys,
                    snapshot_turns=self._snapshot_turns(slot, origin) if policy == ACTOR else (),
                    final_view=self.algorithm.bootstrap_truncated,
                )  # fmt: skip
                requests.append(request)
        return requests

    def continuation(
        self, parent: Rollout, start: Start, group_id: str, sibling: int, *,
        seed_parts: Sequence[int | str], max_decisions: int | None = None,
        snapshot_turns: tuple[int, ...] = (),
    ) -> RolloutRequest:  # fmt: skip
        """Plan a rollout in which the actor continues from a snapshot of a finished rollout, the parent.

        The limits are what the parent had left at the snapshot.

        Args:
            start: the snapshot. `parent_turn` is the number of the parent's decisions before the snapshot.
            group_id: id of the group of continuations; together with `sibling` it is the rollout's id.
            seed_parts: determine the sampling seed, together with the job's seed.
            max_decisions: a further limit on the decisions after the snapshot.
            snapshot_turns: turns before which the task app takes snapshots, counted from the start snapshot.
        """
        episode, done = parent.trajectory, start.parent_turn
        assert episode is not None and done is not None, "it continues from a decision of a finished rollout"
        before = [step.step_info for step in episode.steps[:done]]
        limits = self.players.limits(
            decisions_done=done,
            invalid=sum(info.invalid_reason is not None for info in before),
            used_s=sum(info.policy_s + info.environment_s for info in before),
        )
        if max_decisions is not None and max_decisions < limits.max_decisions:
            limits = limits.model_copy(update={"max_decisions": max_decisions})
        origin = self.source.of_group(parent.group_id, episode.seed)
        rollout_id = f"{group_id}/{sibling}"
        return RolloutRequest(
            rollout_id=rollout_id,
            run_id=self.run_id,
            iteration=parent.iteration,
            group_id=group_id,
            sibling=sibling,
            start=start,
            env=self.players.env(origin),
            ground_truth=origin.ground_truth,
            interaction=origin.interaction,
            policy=self.players.sampled_by(ACTOR, rollout_id, *seed_parts),
            step_rewards=self.table.step_rewards,
            multi_turn=self.players.multi_turn.for_requests(),
            limits=limits,
            snapshot_turns=snapshot_turns,
        )

    @property
    def _state_keys(self) -> tuple[str, ...]:
        """Names of the job's state keys; one may be the key by which the estimator compares decisions."""
        algorithm = self.algorithm
        compares = estimator(algorithm.advantage).needs_state_keys
        own = [algorithm.state_hashing_function] if compares else []
        return tuple(dict.fromkeys((*self.players.rollout.state_keys, *own)))

    @property
    def _first_branch(self) -> int:
        """The first turn that may have branches: turn 2 if there are siblings, which all start at turn 1."""
        return 1 if self.table.group_size == 1 else 2

    def _snapshot_turns(self, slot: Slot, origin: Origin) -> tuple[int, ...]:
        """Choose the turns before which a snapshot is taken; empty if they are chosen after the episode."""
        rule, most = self.fork_rule, self.players.max_decisions
        if rule is not None:
            if rule.reads_samples or origin.start is not None:
                return ()
            name = group_name(slot.stage, slot.iteration, slot.group, origin)
            return self._chosen_by(rule, name, slot.sibling, [0.0] * most)
        if not estimator(self.algorithm.advantage).needs_branches:
            return ()
        return branch_turns(
            derived_seed(self.players.seed, "branch turns", *slot),
            count=self.algorithm.branches_per_episode,
            max_decisions=most,
            first=self._first_branch,
        )

    def _origins(self, iteration: int) -> list[Origin]:
        """Return the origins of an iteration, which counts from 1: the next ones in the training sequence."""
        count = self.players.rollout.episodes_per_batch // self.table.group_size
        first = max(iteration - 1, 0) * count
        return self.source.training("train", range(first, first + count), iteration)

    def _origin_at(self, moment: Moment, draws_seed: int | None) -> Origin:
        start = Start(
            snapshot=moment.snapshot,
            draws_seed=draws_seed,
            parent_rollout_id=moment.rollout_id,
            parent_turn=moment.turn,
        )
        world = self.source.of_group(moment.group_id, moment.seed)
        return replace(world, start=start, decisions_done=moment.turn, invalid=moment.invalid)

    def _rollout_id(self, slot: Slot) -> str:
        return f"{self.run_id}/{slot.stage}/{slot.iteration}/{slot.group}/{slot.sibling}"

    def _request(
        self, slot: Slot, origin: Origin, policy: PolicySpec, step_rewards: StepRewards = NO_STEP_REWARDS, *,
        state_keys: tuple[str, ...] = (), snapshot_turns: tuple[int, ...] = (), final_view: bool = False,
    ) -> RolloutRequest:  # fmt: skip
        players = self.players
        return RolloutRequest(
            rollout_id=self._rollout_id(slot),
            run_id=self.run_id,
            iteration=slot.iteration,
            group_id=group_name(slot.stage, slot.iteration, slot.group, origin),
            sibling=slot.sibling,
            start=origin.start or Start(seed=origin.seed),
            env=players.env(origin),
            policy=policy,
            step_rewards=step_rewards,
            # The time limit is the full one even after a snapshot, because the time used before it is not
            # reproducible.
            limits=players.limits(decisions_done=origin.decisions_done, invalid=origin.invalid),
            multi_turn=players.multi_turn.for_requests(),
            state_keys=state_keys,
            snapshot_turns=snapshot_turns,
            final_view=final_view,
            ground_truth=origin.ground_truth,
            interaction=origin.interaction,
            # Random play only provides prompts for a tokenizer, so it needs no reward.
            reward_function=None if slot.stage == "prompts" else players.rollout.reward_function,
        )


def _spec(name: str, config: Mapping[str, Any], server: Inference | None, seed: int) -> PolicySpec:
    """Build a policy's specification. It contains the server's API key only if the config names its URL."""
    asks_it = server is not None and config.get("inference_url") == server.url
    key = server.key if server and asks_it else None
    return PolicySpec(policy_name=name, config=dict(config), seed=seed, inference_key=key)


def retried(request: RolloutRequest) -> RolloutRequest:
    """Return the request for a retry after an infrastructure failure, with the same seeds and a new id."""
    attempt = request.attempt + 1
    base = request.rollout_id.partition(":")[0]
    return request.model_copy(update={"attempt": attempt, "rollout_id": f"{base}:{attempt}"})


def digest_tasks(requests: Sequence[RolloutRequest]) -> str:
    """Return 16 hex digits that identify the requests' tasks, independent of their policies and order."""
    digest = blake2b(digest_size=8)
    for text in sorted(request.model_dump_json(include=_TASK) for request in requests):
        digest.update(text.encode())
    return digest.hexdigest()
