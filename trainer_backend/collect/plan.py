"""Which rollouts an iteration, a warm-up or an evaluation asks for. Pure: same job, same requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import SecretStr

from shared_schemas.rewards import StepRewards
from shared_schemas.rollouts import EnvSpec, PolicySpec, Rollout, RolloutLimits, RolloutRequest, Start
from trainer_backend.collect.sources import (
    Inference,
    Origin,
    Source,
    group_name,
    model_config,
    samplers,
    schedule_of,
    source_of,
)
from trainer_backend.core.advantages.branch import branch_turns, invalid_before, seconds_before
from trainer_backend.core.allocation import DrawnSchedule
from trainer_backend.core.mixture_history import Past
from trainer_backend.core.policies import ACTOR
from trainer_backend.core.seeds import derived_seed
from trainer_backend.data.dataset import DataSet
from trainer_backend.job.rollout_table import RolloutTable
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.training_table import AlgorithmTable
from trainer_backend.plugins import estimator

__all__ = ["Inference", "Planner", "retried", "stored_state_keys"]

# Of a branch: its parent began that decision in time, but a limit of 0 s is none.
_LEAST_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Planner:
    """Turns a job into rollout requests.

    Attributes:
        run_id: names the run at the task apps; rollout ids begin with it.
        inference: of the actor; None when no policy of the plan is a language model.
        data: the rows of [data]; None where the job has no such table.
        fixed: of the fixed policies, by name.
        history: iterations that are over, for a schedule that looks back on them.
    """

    job: JobConfig
    run_id: str
    inference: Inference | None = None
    data: DataSet | None = None
    fixed: Mapping[str, Inference] = field(default_factory=dict)
    history: Sequence[Past] = ()

    def training(self, iteration: int) -> list[RolloutRequest]:
        """G siblings a group: same origin, own sampling seeds; who samples them says the job's schedule."""
        return self._groups("train", iteration, self._trained_on(iteration))

    def first_training(self) -> RolloutRequest:
        """The first request of the first iteration, made alone: a larger job costs no more."""
        return self._groups("train", 1, self._source.training("train", range(1), 1), siblings=1)[0]

    def refill(
        self, iteration: int, round_number: int, groups: int, *, refilled: int = 0
    ) -> list[RolloutRequest]:
        """Further groups of an iteration, on origins that it has not played; rounds count from 1.

        Of a fixed set one comes again only after all the others: it was flat, and is asked in vain.

        Args:
            refilled: groups that earlier rounds of the iteration have asked for.
        """
        stage, numbers = f"refill-{round_number}", range(refilled, refilled + groups)
        played = self._trained_on(iteration)
        origins = self._source.refill(stage, iteration, played=played, numbers=numbers)
        return self._groups(stage, iteration, origins)

    def branches(self, parents: Sequence[Rollout]) -> list[RolloutRequest]:
        """Rollouts that play on from the snapshots of finished ones: same policy, own sampling seeds.

        What is left of an episode's limits is theirs, of its time too. A lost one is asked for again like any
        other.
        """
        return [
            self._branch(parent, step.turn, step.snapshot, sibling)
            for parent in parents
            if parent.trajectory is not None
            for step in parent.trajectory.steps
            if step.snapshot is not None
            for sibling in range(self.job.algorithm.branch_rollouts)
        ]

    def warmup(self, key: SecretStr | None = None, *, most: int | None = None) -> list[RolloutRequest]:
        """The teacher's episodes, an origin each; `key` is for the server that its config names.

        Args:
            most: make only so many, the first ones; absent: all.
        """
        table = self.job.warmup
        if table is None:
            return []
        return [
            self._request(
                stage="warmup", iteration=0, group=group, sibling=0, origin=origin,
                policy=PolicySpec(
                    policy_name=table.policy_name,
                    config={"seed": derived_seed(self.job.job.seed, "warmup", group), **table.policy_config},
                    inference_key=key,
                ),
            )
            for group, origin in enumerate(self._source.training("warmup", range(table.episodes)[:most], 0))
        ]  # fmt: skip

    def prompts(self, episodes: int) -> list[RolloutRequest]:
        """Random play, for the prompts that a preset's tokenizer is trained on when there is no warm-up."""
        return [
            self._request(
                stage="prompts", iteration=0, group=group, sibling=0, origin=origin,
                policy=_spec("random", {"seed": derived_seed(self.job.job.seed, "prompts", group)}, None),
            )
            for group, origin in enumerate(self._source.training("prompts", range(episodes), 0))
        ]  # fmt: skip

    def evaluation(
        self,
        label: str,
        *,
        policy_name: str | None = None,
        policy_config: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[RolloutRequest]:
        """Plan one episode on each held-out origin, with the same sampling seeds in every evaluation.

        Args:
            most: make only so many, the first ones; absent: all.
        """
        name = policy_name or self.job.rollout.policy_name
        requests = []
        for group, origin in enumerate(self._source.evaluation(most)):
            config: dict[str, Any] = {"seed": derived_seed(self.job.job.seed, "evaluation", group)}
            if policy_name is None:
                seed = derived_seed(self.job.job.seed, "evaluation", 0, group, 0)
                sampling = self.job.sampling_of(None)
                sampling = sampling.model_copy(update={"temperature": self.job.evaluation_temperature})
                config = model_config(self.job.multi_turn, self._server(ACTOR), sampling, seed=seed)
                config |= self.job.rollout.policy_config
            config |= policy_config or {}
            requests.append(
                self._request(
                    stage=f"eval-{label}", iteration=0, group=group, sibling=0, origin=origin,
                    policy=_spec(name, config, self.inference), step_rewards=self.job.training.step_rewards,
                )
            )  # fmt: skip
        return requests

    def sampled_by(self, policy: str, *seed_parts: int | str) -> PolicySpec:
        """How a policy, the actor or a fixed one, is asked in training."""
        rollout, server = self.job.rollout, self._server(policy)
        table = None if policy == ACTOR else self.job.fixed(policy)
        seed = derived_seed(self.job.job.seed, *seed_parts)
        config = model_config(self.job.multi_turn, server, self.job.sampling_of(table), seed=seed)
        return _spec(rollout.policy_name, {**config, **rollout.policy_config}, server)

    def largest(self) -> RolloutRequest:
        """One of the row that takes the most room, of all that are trained or evaluated on."""
        return self._groups("train", 1, [self._source.largest()], siblings=1)[0]

    @property
    def schedule(self) -> DrawnSchedule | None:
        """Who samples what; None where the job has no fixed policy."""
        table, fixed = self.job.rollout_allocation_schedule, self.job.fixed_policies
        return schedule_of(table, fixed, seed=self.job.job.seed, history=self.history)

    @property
    def _groups_per_iteration(self) -> int:
        return self.job.rollout.episodes_per_batch // self.job.training.group_size

    def _groups(
        self, stage: str, iteration: int, origins: Sequence[Origin], *, siblings: int | None = None
    ) -> list[RolloutRequest]:
        """A group on each origin; `siblings`: only so many of each, the first ones."""
        requests = []
        table, size = self.job.rollout_allocation_schedule, siblings or self.job.training.group_size
        unit = "iteration" if table is None else table.unit
        chosen = samplers(self.schedule, unit, stage, iteration, groups=len(origins), siblings=size)
        for group, origin in enumerate(origins):
            for sibling, policy in enumerate(chosen[group]):
                requests.append(
                    self._request(
                        stage=stage, iteration=iteration, group=group, sibling=sibling, origin=origin,
                        policy=self.sampled_by(policy, stage, iteration, group, sibling),
                        step_rewards=self.job.training.step_rewards,
                        state_keys=stored_state_keys(self.job.algorithm, self.job.rollout),
                        snapshot_turns=self._snapshot_turns(stage, iteration, group, sibling),
                        final_view=self.job.algorithm.bootstrap_truncated,
                    )
                )  # fmt: skip
        return requests

    def _branch(self, parent: Rollout, turn: int, snapshot: str, sibling: int) -> RolloutRequest:
        assert parent.trajectory is not None
        invalid = invalid_before(parent.trajectory, turn)
        used_s = seconds_before(parent.trajectory, turn)
        origin = self._source.of_group(parent.group_id, parent.trajectory.seed)
        group_id = f"{parent.rollout_id.replace(':', '.')}/branch-{turn}"
        seed_parts = ("branch", parent.group_id, parent.sibling, turn, sibling)
        return RolloutRequest(
            rollout_id=f"{group_id}/{sibling}",
            run_id=self.run_id,
            iteration=parent.iteration,
            group_id=group_id,
            sibling=sibling,
            start=Start(snapshot=snapshot, parent_rollout_id=parent.rollout_id, parent_turn=turn - 1),
            env=self._env(origin),
            ground_truth=origin.ground_truth,
            interaction=origin.interaction,
            policy=self.sampled_by(ACTOR, *seed_parts),
            step_rewards=self.job.training.step_rewards,
            multi_turn=self.job.multi_turn.for_requests(),
            limits=self._limits(decisions_done=turn - 1, invalid=invalid, used_s=used_s),
        )

    def _snapshot_turns(self, *seed_parts: int | str) -> tuple[int, ...]:
        """Not the first turn where there are siblings: their episodes are its branches."""
        algorithm, job = self.job.algorithm, self.job
        if not estimator(algorithm.advantage).needs_branches:
            return ()
        return branch_turns(
            derived_seed(job.job.seed, "branch turns", *seed_parts),
            count=algorithm.branches_per_episode,
            max_decisions=job.max_decisions,
            first=1 if job.training.group_size == 1 else 2,
        )

    @property
    def _source(self) -> Source:
        return source_of(self.job, self.data)

    def _trained_on(self, iteration: int) -> list[Origin]:
        """Iterations count from 1; the first place of one follows the last of the one before."""
        count = self._groups_per_iteration
        first = max(iteration - 1, 0) * count
        return self._source.training("train", range(first, first + count), iteration)

    def _server(self, policy: str) -> Inference:
        found = self.inference if policy == ACTOR else self.fixed.get(policy)
        if found is None:
            whom = "a language model" if policy == ACTOR else f"the fixed policy {policy!r}"
            raise ValueError(f"this plan needs {whom}, and no inference server was given for it")
        return found

    def _request(
        self, *, stage: str, iteration: int, group: int, sibling: int, origin: Origin, policy: PolicySpec,
        step_rewards: StepRewards | None = None, state_keys: tuple[str, ...] = (),
        snapshot_turns: tuple[int, ...] = (), final_view: bool = False,
    ) -> RolloutRequest:  # fmt: skip
        return RolloutRequest(
            rollout_id=f"{self.run_id}/{stage}/{iteration}/{group}/{sibling}",
            run_id=self.run_id,
            iteration=iteration,
            group_id=group_name(stage, iteration, group, origin),
            sibling=sibling,
            start=Start(seed=origin.seed),
            env=self._env(origin),
            policy=policy,
            step_rewards=step_rewards or StepRewards(),
            limits=self._limits(),
            multi_turn=self.job.multi_turn.for_requests(),
            state_keys=state_keys,
            snapshot_turns=snapshot_turns,
            final_view=final_view,
            ground_truth=origin.ground_truth,
            interaction=origin.interaction,
            # Random play for a tokenizer earns nothing.
            reward_function=None if stage == "prompts" else self.job.rollout.reward_function,
        )

    def _env(self, origin: Origin) -> EnvSpec:
        rollout = self.job.rollout
        return EnvSpec(env_name=rollout.env_name, config={**rollout.env_config, **origin.env_config})

    def _limits(self, *, decisions_done: int = 0, invalid: int = 0, used_s: float = 0.0) -> RolloutLimits:
        """Return the rest of an episode's limits after a number of decisions."""
        rollout = self.job.rollout
        return RolloutLimits(
            max_decisions=self.job.max_decisions - decisions_done,
            max_invalid_decisions=rollout.max_invalid_decisions - invalid,
            timeout_s=max(rollout.timeout_s - used_s, min(rollout.timeout_s, _LEAST_TIMEOUT_S)),
            termination_regex=rollout.termination_regex,
            termination_target=rollout.termination_target,
        )


def _spec(name: str, config: Mapping[str, Any], server: Inference | None) -> PolicySpec:
    """With the key of the server, where it is the server's address that the policy asks."""
    asks_it = server is not None and config.get("inference_url") == server.url
    return PolicySpec(
        policy_name=name, config=dict(config), inference_key=server.key if server and asks_it else None
    )


def stored_state_keys(algorithm: AlgorithmTable, rollout: RolloutTable) -> tuple[str, ...]:
    """Those that the job names, and the one that its estimator compares decisions by."""
    needed = estimator(algorithm.advantage).needs_state_keys
    names = [*rollout.state_keys, *([algorithm.state_hashing_function] if needed else [])]
    return tuple(dict.fromkeys(names))


def retried(request: RolloutRequest) -> RolloutRequest:
    """The same episode once more, after an infrastructure failure: same seeds, another id."""
    attempt = request.attempt + 1
    base = request.rollout_id.partition(":")[0]
    return request.model_copy(update={"attempt": attempt, "rollout_id": f"{base}:{attempt}"})
