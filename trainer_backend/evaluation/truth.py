"""`turnwise truth`: measures the true advantages of stored decisions.

Episodes are continued from before and from after a decision; `core.truth` defines the advantage.
"""

import asyncio
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from uuid import uuid4

from service_kit.logs import configure_logs_from
from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import StopReason, exact_tokens
from trainer_backend import job_parts
from trainer_backend.collect.apps import TaskApps
from trainer_backend.collect.client import InstanceInfo
from trainer_backend.collect.plan import Inference, Planner
from trainer_backend.collect.sources import read_row_id
from trainer_backend.collect.trial import describe_environment
from trainer_backend.collect.wire import pick_error
from trainer_backend.core.truth import CHOICES, even_order
from trainer_backend.credit.recredit import stored_iterations, with_records
from trainer_backend.credit.rewards import Policies, Rewards
from trainer_backend.errors import JobError, RunDirectoryError
from trainer_backend.evaluation.play import Tell, task_app_log
from trainer_backend.evaluation.truth_player import ContinuationPlayer, StoredDecision
from trainer_backend.job.rollout_table import RolloutTable
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.training_table import TrainingTable
from trainer_backend.rundir.checkpoint_paths import STATE_FILE, model_in, whole_checkpoints
from trainer_backend.rundir.data_record import DataRecord, accept_rows
from trainer_backend.rundir.digests import read_digest
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_files import read_rollout, rollout_ids
from trainer_backend.rundir.truth_file import TruthFile, TruthSetting, select_play, select_rewards


@dataclass(frozen=True, slots=True)
class TruthOptions:
    decisions: int
    """Number of stored decisions to measure."""
    continuations: int
    """Number of pairs of continuations for each decision."""
    horizon: int | None
    """Maximum length of a continuation in decisions. 0: to the episode's end; None: see `find_horizon`."""
    budget: int | None
    """Number of played decisions after which to stop; None: no limit."""
    iteration: int | None
    """The iteration to measure. None: the newest one whose policy is still stored."""
    checkpoint: Path | None
    """The policy that continues the episodes. None: the policy that sampled them."""
    out: Path
    """The result file. If it exists, the measurement in it is continued."""
    seed: int = 0
    """Determines the choice of decisions and all random numbers."""


@dataclass(frozen=True, slots=True)
class Measurement:
    file: TruthFile
    lost: int
    """Number of decisions for which failures left too few pairs. Repeating the command tries them again."""
    is_over_budget: bool
    """Whether the budget ended the measurement early."""
    left_out: int = 0
    """Number of rollouts left out because their row of the data set was removed or changed."""


async def measure_truth(
    run: RunDirectory, job: JobConfig, options: TruthOptions, tell: Tell | None = None
) -> Measurement:
    """Measure decisions of stored rollouts, or continue an earlier measurement.

    Args:
        tell: receives the number of measured decisions, and the number of decisions to measure.

    Raises:
        JobError: the job's environment or rewards do not allow a measurement, or the budget is too small.
        RunDirectoryError: the rollouts or their policy are not stored, or `options.out` belongs to a
            measurement with other settings.
    """
    _refuse_options(job.training, job.rollout, options)
    configure_logs_from()
    data, record = await asyncio.to_thread(job_parts.data_of_run, job, run)
    accept_rows(record, job.data, data)
    source = find_source(run, job_parts.policies(job), options)
    _refuse_longer(source.rollouts, job.max_decisions)
    rollouts = find_playable(source, record)
    with task_app_log() as log:
        async with job_parts.task_apps(job, log, data=data) as apps:
            environment = await _environment(apps, job_parts.planner(job, "truth", _UNSENT, data))
            setting = TruthSetting(
                run_id=run.run_id,
                iteration=source.iteration,
                checkpoint=_name(source.checkpoint, run),
                digest=read_digest(source.checkpoint),
                gamma=job.algorithm.gamma,
                continuations=options.continuations,
                horizon=find_horizon(job.training, job.algorithm.gamma)
                if options.horizon is None
                else options.horizon or None,
                fresh_draws=environment.reseedable,
                seed=options.seed,
                rewards=select_rewards(job.training),
                play=select_play(job.rollout),
            )
            file = TruthFile.open(options.out, setting)
            dispatcher = job_parts.dispatcher(job, apps)

            async def measure(inference: Inference) -> Measurement:
                name = f"{job.job.name}.truth.{uuid4().hex[:12]}"
                planner = _with_common_draws(job_parts.planner(job, name, inference, data))
                player = ContinuationPlayer(
                    planner, dispatcher, apps, Rewards(job.training, job.max_decisions), setting
                )
                chosen = list(islice(_chosen(rollouts, options.seed), options.decisions))
                lanes = max(2, 2 * job.rollout.max_concurrent_rollouts // options.continuations)
                measured = await _Measurer(player, file, options, tell).all(chosen, lanes)
                return replace(measured, left_out=len(source.rollouts) - len(rollouts))

            return await job_parts.by_checkpoint(job, source.checkpoint, measure)


def _name(checkpoint: Path, run: RunDirectory) -> str:
    return checkpoint.name if checkpoint.parent == run.checkpoints else str(checkpoint.resolve())


# The default horizon ends where the discount falls to this weight.
_LEAST_WEIGHT = 0.05


def find_horizon(training: TrainingTable, gamma: float) -> int | None:
    """Return after how many decisions the discount is 5 % or less; None to play to the episode's end."""
    if gamma == 1.0 or _why_to_the_end(training) is not None:
        return None
    return 1 if gamma <= _LEAST_WEIGHT else math.ceil(math.log(_LEAST_WEIGHT) / math.log(gamma))


def _with_common_draws(planner: Planner) -> Planner:
    """Make the policy draw the same random numbers in both episodes of a pair.

    By default, equal seeds give equal numbers only until the two prompts differ.
    """
    rollout = planner.players.rollout
    if rollout.policy_name != "openai":
        return planner
    extra = {**rollout.policy_config.get("extra_body", {}), "common_draws": True}
    config = {**rollout.policy_config, "extra_body": extra}
    rollout = rollout.model_copy(update={"policy_config": config})
    return replace(planner, players=replace(planner.players, rollout=rollout))


# Placeholder for the model server in a planner whose requests are never sent.
_UNSENT = Inference("http://127.0.0.1:1", "unused", None)


def _refuse_options(training: TrainingTable, rollout: RolloutTable, options: TruthOptions) -> None:
    """Raise JobError if the budget is too small for one decision, or if continuations cannot be rewarded."""
    least = (CHOICES + 1) * options.continuations
    if options.budget is not None and options.budget < least:
        raise JobError(
            f"--budget {options.budget} is too small for a single decision: it takes "
            f"{least - options.continuations} decisions to see what the policy does there, and "
            f"{options.continuations} continuations of at least one, so {least} at least",
            hint="Decisions that an earlier command played for the same file count too.",
        )
    if training.kl_reward_coef > 0:
        raise JobError(
            f"training.kl_reward_coef is {training.kl_reward_coef:g}, and continuations are not scored by a "
            "reference; --set training.kl_reward_coef=0 measures the truth of all other rewards"
        )
    if rollout.reward_function is not None:
        raise JobError("rollout.reward_function judges whole episodes, and no part of one")
    if options.horizon and (why := _why_to_the_end(training)) is not None:
        raise JobError(f"--horizon cuts continuations short, and this job {why}; leave --horizon out")


def _why_to_the_end(table: TrainingTable) -> str | None:
    """Return why continuations must play to the end of the episode; None if they need not."""
    if table.reward_mode == "off":
        return "pays at the end of an episode"
    looks_ahead = table.step_rewards_beta > 0 and table.step_rewards_horizon == "realised"
    return "pays by the length of an episode" if looks_ahead else None


@dataclass(frozen=True, slots=True)
class Source:
    """The iteration to measure, its rollouts by the actor, and the checkpoint that continues them."""

    iteration: int
    rollouts: Sequence[Rollout]
    checkpoint: Path


def find_source(run: RunDirectory, policies: Policies, options: TruthOptions) -> Source:
    """Find the iteration to measure, and the checkpoint that continues its episodes.

    If the options name neither, choose the newest iteration whose tokens were all sampled by one stored
    checkpoint. If they name only a checkpoint, choose the newest iteration.

    Raises:
        RunDirectoryError: no rollouts are stored, or no stored checkpoint sampled all tokens.
    """
    stored = list(run.iterations())
    if not stored:
        raise RunDirectoryError(f"{run.path}: no rollouts of any iteration are stored")
    if options.checkpoint is not None:
        number = options.iteration or stored[-1]
        return Source(number, _by_actor(run, policies, number), model_in(options.checkpoint))
    checkpoints = dict(whole_checkpoints(run.checkpoints))
    newest_first = reversed(stored) if options.iteration is None else [options.iteration]
    for number in newest_first:
        if (
            options.iteration is None
            and _sampler(_read_first(run, policies, number), number, checkpoints) is None
        ):
            continue
        rollouts = _by_actor(run, policies, number)
        sampler = _sampler(rollouts, number, checkpoints)
        if sampler is not None:
            return Source(number, rollouts, sampler)
    number = options.iteration or stored[-1]
    raise _no_sampler_error(run, number, _by_actor(run, policies, number), checkpoints)


def find_playable(source: Source, record: DataRecord | None) -> list[Rollout]:
    """Return the rollouts whose row of the data set still exists unchanged.

    Raises RunDirectoryError if all rows were removed or changed.
    """
    replaced = record.find_replaced(source.iteration) if record is not None else frozenset()
    rollouts = [item for item in source.rollouts if read_row_id(item.group_id) not in replaced]
    if source.rollouts and not rollouts:
        raise RunDirectoryError(
            f"the rows of all {len(source.rollouts)} rollouts of iteration {source.iteration} are gone or "
            "changed since, so nothing can play on from them",
            hint="--iteration chooses an iteration that was played on rows that still exist.",
        )
    return rollouts


def _by_actor(run: RunDirectory, policies: Policies, number: int) -> list[Rollout]:
    (rollouts,) = stored_iterations(run, [number])
    return policies.by_actor(rollouts)


def _read_first(run: RunDirectory, policies: Policies, number: int) -> list[Rollout]:
    """Return a list of the first finished rollout by the actor, or an empty list; read no further ones."""
    path = run.rollouts_file(f"iteration_{number}")
    rollouts = (read_rollout(path, rollout_id) for rollout_id in rollout_ids(path))
    finished = (item for item in rollouts if item.trajectory is not None and policies.by_actor([item]))
    return list(islice(finished, 1))


def _versions(rollouts: Sequence[Rollout]) -> set[int]:
    """Return the policy versions that sampled the rollouts' tokens; empty if no versions are stored."""
    steps = (step for item in rollouts if item.trajectory is not None for step in item.trajectory.steps)
    return {sampler for step in steps if (call := exact_tokens(step)) for _, sampler in call.versions}


def _sampler(rollouts: Sequence[Rollout], iteration: int, checkpoints: Mapping[int, Path]) -> Path | None:
    """Return the checkpoint that sampled all tokens of an iteration; None if it is not stored.

    It is older than the iteration, and has the version that is stored with the tokens. If no versions are
    stored, it is the checkpoint of the previous iteration.
    """
    versions = _versions(rollouts)
    if not versions:
        return checkpoints.get(iteration - 1) if rollouts else None
    before = (checkpoints[number] for number in sorted(checkpoints, reverse=True) if number < iteration)
    return next((path for path in before if versions == {_version(path)}), None)


def _version(checkpoint: Path) -> int:
    return int(json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))["policy_version"])


def _no_sampler_error(
    run: RunDirectory, iteration: int, rollouts: Sequence[Rollout], checkpoints: Mapping[int, Path]
) -> RunDirectoryError:
    versions = sorted(_versions(rollouts))
    having = ", ".join(f"{path.name} (version {_version(path)})" for path in checkpoints.values()) or "none"
    if len(versions) > 1:
        why = f"policies of the versions {versions[0]} to {versions[-1]} sampled iteration {iteration}"
    else:
        of_version = f" of version {versions[0]}" if versions else ""
        why = f"the policy{of_version} that sampled iteration {iteration} is gone"
    return RunDirectoryError(
        f"{run.path}: {why}; the checkpoints are {having}. --iteration {iteration} --checkpoint PATH "
        "plays on by another policy, whose true advantages differ; training.keep_checkpoints and "
        "checkpoint_every keep more"
    )


def _refuse_longer(rollouts: Sequence[Rollout], most: int) -> None:
    played = (len(item.trajectory.steps) for item in rollouts if item.trajectory is not None)
    if (longest := max(played, default=0)) > most:
        raise JobError(
            f"rollout.max_turns allows {most} decisions, and a stored episode has {longest}",
            hint="Leave it as the rollouts were played; --horizon bounds the continuations.",
        )


async def _environment(apps: TaskApps, planner: Planner) -> InstanceInfo:
    """Return a task app's description of the job's environment. Raise JobError if it has no snapshots."""
    client, info = await describe_environment(planner, apps)
    if info.conversation or not info.restorable:
        why = "has no snapshots"
        if info.conversation:
            why = "is a conversation, which no snapshot holds"
        elif info.restorable is None:
            why = f"is at a task app that does not say whether it has snapshots ({client.url}); update it"
        raise JobError(
            f"{planner.players.rollout.env_name!r} {why}, and the truth is measured by playing on from one",
            where="rollout.env_name",
            hint="An environment with snapshot() and restore() can be measured (docs/plugins.md).",
        )
    return info


def _chosen(rollouts: Sequence[Rollout], seed: int) -> Iterator[StoredDecision]:
    """Yield all decisions in an order whose beginnings cover rewards, turns and states evenly.

    If the deadline ended an episode, its last decision is left out, because what would follow is unknown.
    """
    decisions = []
    for rollout in map(with_records, rollouts):
        if (episode := rollout.trajectory) is not None:
            last = len(episode.steps) - (episode.stop_reason is StopReason.DEADLINE)
            decisions += [StoredDecision(rollout, step) for step in episode.steps[:last]]
    decisions.sort(key=_sort_key)
    for index in even_order(len(decisions), seed):
        yield decisions[index]


def _sort_key(item: StoredDecision) -> tuple[bool, int, str, tuple[str, int]]:
    step = item.step
    events, keys = step.metadata.decision_rewards, step.observation_data.state_keys
    earns = bool(step.reward_parts or (events and events.ach_delta) or any(step.env_rewards or ()))
    return earns, step.turn, keys[min(keys)] if keys else "", item.key


class _Measurer:
    """Measures decisions concurrently, and writes each result to the file."""

    def __init__(
        self, player: ContinuationPlayer, file: TruthFile, options: TruthOptions, tell: Tell | None
    ) -> None:
        self._player, self._file, self._options, self._tell = player, file, options, tell
        self._played = sum(item.decisions for item in file.truths.values())
        self._lost = self._open = 0
        self._is_over_budget = False

    async def all(self, chosen: Sequence[StoredDecision], lanes: int) -> Measurement:
        total = len(chosen)
        left = iter([item for item in chosen if item.key not in self._file.truths])
        self._report(total)

        async def lane() -> None:
            for item in left:
                if self._is_spent:
                    self._is_over_budget = True
                    return
                self._open += 1
                truth = await self._player.truth(item)
                self._open -= 1
                if truth is None:
                    self._lost += 1
                    continue
                self._played += truth.decisions
                self._file.add(truth)
                self._report(total)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(lanes):
                    group.create_task(lane())
        except ExceptionGroup as errors:
            raise pick_error(errors) from errors
        return Measurement(self._file, self._lost, self._is_over_budget)

    @property
    def _is_spent(self) -> bool:
        """Whether the decisions in progress will use up the budget, judged by the mean cost so far."""
        if self._options.budget is None:
            return False
        tried, played = len(self._file.truths) + self._lost, self._played + self._player.lost_decisions
        each = played / tried if tried else (CHOICES + 1) * self._options.continuations
        return played + self._open * each >= self._options.budget

    def _report(self, total: int) -> None:
        if self._tell is not None:
            self._tell(min(len(self._file.truths), total), total)
