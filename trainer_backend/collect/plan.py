"""Which rollouts an iteration, a warm-up or an evaluation asks for. Pure: same job, same requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import SecretStr

from shared_schemas.rewards import StepRewards
from shared_schemas.rollouts import EnvSpec, PolicySpec, Rollout, RolloutLimits, RolloutRequest, Start
from trainer_backend.collect.sources import Origin, Source, group_name, largest_origin, source_of
from trainer_backend.core.branching import branch_turns, invalid_before, seconds_before
from trainer_backend.core.seeds import derived_seed
from trainer_backend.data.dataset import DataSet
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.plugins import estimator

# Of a branch: its parent began that decision in time, but a limit of 0 s is none.
_LEAST_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Inference:
    """Where a language-model policy asks, under which model name, with which key, if it needs one.

    Attributes:
        max_model_len: what the server's prompts and responses may have together, in tokens; None: not known.
    """

    url: str
    model: str
    key: SecretStr | None
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class Planner:
    """Turns a job into rollout requests.

    Attributes:
        run_id: names the run at the task apps; rollout ids begin with it.
        inference: None when no policy of the plan is a language model.
        data: the rows of [data]; None where the job has no such table.
    """

    job: JobConfig
    run_id: str
    inference: Inference | None = None
    data: DataSet | None = None

    def training(self, iteration: int) -> list[RolloutRequest]:
        """G siblings a group: same origin, own sampling seeds."""
        return self._groups("train", iteration, self._trained_on(iteration))

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

    def warmup(self, key: SecretStr | None = None) -> list[RolloutRequest]:
        """The teacher's episodes, an origin each; `key` is for the server that its config names."""
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
            for group, origin in enumerate(self._source.training("warmup", range(table.episodes), 0))
        ]  # fmt: skip

    def prompts(self, episodes: int) -> list[RolloutRequest]:
        """Random play, for the prompts that a preset's tokenizer is trained on when there is no warm-up."""
        return [
            self._request(
                stage="prompts", iteration=0, group=group, sibling=0, origin=origin,
                policy=self._policy("random", {"seed": derived_seed(self.job.job.seed, "prompts", group)}),
            )
            for group, origin in enumerate(self._source.training("prompts", range(episodes), 0))
        ]  # fmt: skip

    def evaluation(
        self, label: str, *, policy_name: str | None = None, policy_config: Mapping[str, Any] | None = None
    ) -> list[RolloutRequest]:
        """One episode on each held-out origin; the sampling seeds are those of every other evaluation."""
        name = policy_name or self.job.rollout.policy_name
        requests = []
        for group, origin in enumerate(self._source.evaluation()):
            seed = derived_seed(self.job.job.seed, "evaluation", group)
            config: dict[str, Any] = {"seed": seed}
            if policy_name is None:
                config = self._model_config(self.job.evaluation_temperature, "evaluation", 0, group, 0)
                config |= self.job.rollout.policy_config
            config |= policy_config or {}
            requests.append(
                self._request(
                    stage=f"eval-{label}", iteration=0, group=group, sibling=0, origin=origin,
                    policy=self._policy(name, config), step_rewards=self.job.training.step_rewards,
                )
            )  # fmt: skip
        return requests

    def largest(self) -> RolloutRequest:
        """One of the row that takes the most room, of all that are trained or evaluated on."""
        return self._groups("train", 1, [largest_origin(self.job, self.data)])[0]

    @property
    def _groups_per_iteration(self) -> int:
        return self.job.rollout.episodes_per_batch // self.job.training.group_size

    def _groups(self, stage: str, iteration: int, origins: Sequence[Origin]) -> list[RolloutRequest]:
        requests = []
        for group, origin in enumerate(origins):
            for sibling in range(self.job.training.group_size):
                config = self._model_config(self.job.rollout.temperature, stage, iteration, group, sibling)
                requests.append(
                    self._request(
                        stage=stage, iteration=iteration, group=group, sibling=sibling, origin=origin,
                        policy=self._policy(
                            self.job.rollout.policy_name, {**config, **self.job.rollout.policy_config}
                        ),
                        step_rewards=self.job.training.step_rewards,
                        state_keys=stored_state_keys(self.job),
                        snapshot_turns=self._snapshot_turns(stage, iteration, group, sibling),
                    )
                )  # fmt: skip
        return requests

    def _branch(self, parent: Rollout, turn: int, snapshot: str, sibling: int) -> RolloutRequest:
        assert parent.trajectory is not None
        rollout, invalid = self.job.rollout, invalid_before(parent.trajectory, turn)
        used_s = seconds_before(parent.trajectory, turn)
        origin = self._source.of_group(parent.group_id, parent.trajectory.seed)
        group_id = f"{parent.rollout_id.replace(':', '.')}/branch-{turn}"
        seed_parts = ("branch", parent.group_id, parent.sibling, turn, sibling)
        config = self._model_config(rollout.temperature, *seed_parts)
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
            policy=self._policy(rollout.policy_name, {**config, **rollout.policy_config}),
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

    def _model_config(self, temperature: float, *seed_parts: int | str) -> dict[str, Any]:
        if self.inference is None:
            raise ValueError("this plan needs a language model, and no inference server was given")
        rollout, multi_turn = self.job.rollout, self.job.multi_turn
        return {
            "inference_url": self.inference.url,
            "model": self.inference.model,
            "temperature": temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "max_tokens": rollout.max_tokens,
            **({"max_model_length": min(self._lengths(self.inference))} if multi_turn.enable else {}),
            "seed": derived_seed(self.job.job.seed, *seed_parts),
        }

    def _lengths(self, inference: Inference) -> list[int]:
        """That bound prompt and response; the model plans with the lower one, where it may ask."""
        found = (self.job.multi_turn.max_model_length, inference.max_model_len)
        return [length for length in found if length is not None]

    def _policy(self, name: str, config: Mapping[str, Any]) -> PolicySpec:
        asks_model = self.inference is not None and config.get("inference_url") == self.inference.url
        key = self.inference.key if asks_model and self.inference else None
        return PolicySpec(policy_name=name, config=dict(config), inference_key=key)

    def _request(
        self, *, stage: str, iteration: int, group: int, sibling: int, origin: Origin, policy: PolicySpec,
        step_rewards: StepRewards | None = None, state_keys: tuple[str, ...] = (),
        snapshot_turns: tuple[int, ...] = (),
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
            ground_truth=origin.ground_truth,
            interaction=origin.interaction,
            # Random play for a tokenizer earns nothing.
            reward_function=None if stage == "prompts" else self.job.rollout.reward_function,
        )

    def _env(self, origin: Origin) -> EnvSpec:
        rollout = self.job.rollout
        return EnvSpec(env_name=rollout.env_name, config={**rollout.env_config, **origin.env_config})

    def _limits(self, *, decisions_done: int = 0, invalid: int = 0, used_s: float = 0.0) -> RolloutLimits:
        """What is left of an episode's limits after so many decisions."""
        rollout = self.job.rollout
        return RolloutLimits(
            max_decisions=self.job.max_decisions - decisions_done,
            max_invalid_decisions=rollout.max_invalid_decisions - invalid,
            timeout_s=max(rollout.timeout_s - used_s, min(rollout.timeout_s, _LEAST_TIMEOUT_S)),
            termination_regex=rollout.termination_regex,
            termination_target=rollout.termination_target,
        )


def stored_state_keys(job: JobConfig) -> tuple[str, ...]:
    """Those that the job names, and the one that its estimator compares decisions by."""
    needed = estimator(job.algorithm.advantage).needs_state_keys
    names = [*job.rollout.state_keys, *([job.algorithm.state_hashing_function] if needed else [])]
    return tuple(dict.fromkeys(names))


def retried(request: RolloutRequest) -> RolloutRequest:
    """The same episode once more, after an infrastructure failure: same seeds, another id."""
    attempt = request.attempt + 1
    base = request.rollout_id.partition(":")[0]
    return request.model_copy(update={"attempt": attempt, "rollout_id": f"{base}:{attempt}"})
