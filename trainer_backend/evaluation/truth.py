"""`turnwise truth`: what stored decisions were truly worth, by playing on from before and after them.

The definition of the measured advantage is in `core.truth`.
"""

import asyncio
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from service_kit.logs import configure_logs_from
from shared_schemas.replay import ReplayRequest, ReplayTurn
from shared_schemas.rollouts import Rollout, RolloutRequest, Start
from shared_schemas.trajectory import StepData, StopReason, Trajectory
from trainer_backend.collect.apps import TaskApps
from trainer_backend.collect.collector import Collector
from trainer_backend.collect.plan import Continuation, Inference, Planner
from trainer_backend.collect.task_apps import task_apps
from trainer_backend.collect.wire import ReplayDeparts
from trainer_backend.core.rewards import discounted_returns
from trainer_backend.core.seeds import derived_seed
from trainer_backend.core.statistics import staleness_metrics
from trainer_backend.core.truth import TrueAdvantage, even_order, mean_difference
from trainer_backend.credit.recredit import stored_iterations, with_records
from trainer_backend.credit.rewards import Policies, Rewards
from trainer_backend.data.dataset import data_of
from trainer_backend.errors import JobError, RunDirectoryError, TaskAppError
from trainer_backend.evaluation.play import Tell, by_checkpoint, task_app_log
from trainer_backend.job.schema import JobConfig
from trainer_backend.rundir.checkpoint_paths import STATE_FILE, whole_checkpoints
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.truth_file import TruthFile, TruthSetting


@dataclass(frozen=True, slots=True)
class TruthOptions:
    """What to measure.

    Attributes:
        decisions: how many stored decisions.
        continuations: pairs of continuations for each.
        horizon: the most decisions of a continuation; None: to the end of its episode.
        budget: stop once so many decisions were played; None: never.
        iteration: whose rollouts; None: the newest whose policy is still stored.
        checkpoint: plays on instead of the policy that sampled them.
        out: the file to write, or to go on with.
        seed: of the choice of decisions, and of all draws.
    """

    decisions: int
    continuations: int
    horizon: int | None
    budget: int | None
    iteration: int | None
    checkpoint: Path | None
    out: Path
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """What `measure_truth` did.

    Attributes:
        lost: decisions of which infrastructure left fewer than two pairs; a repeated command tries again.
        is_over_budget: whether it ended before all decisions that were asked for.
    """

    file: TruthFile
    lost: int
    is_over_budget: bool


async def measure_truth(
    run: RunDirectory, job: JobConfig, options: TruthOptions, tell: Tell | None = None
) -> Measurement:
    """Measure decisions of stored rollouts, or go on with a measurement that was begun.

    Args:
        tell: receives the number of measured decisions, and the total.

    Raises:
        JobError: the job's environment or rewards do not allow it; the budget is too small.
        RunDirectoryError: no stored rollouts, or not the policy that sampled them; see `TruthFile.open`.
    """
    _refuse_rewards(job, options)
    configure_logs_from()
    iteration, checkpoint = _policy_of(run, options)
    (rollouts,) = stored_iterations(run, [iteration])
    rollouts = Policies(job.job.name, job.fixed_policies, job.rollout.temperature).by_actor(rollouts)
    if options.checkpoint is None:
        _refuse_other_versions(rollouts, checkpoint)
    data = await asyncio.to_thread(data_of, job)
    with task_app_log() as log:
        async with task_apps(job, log, data=data) as apps:
            fresh_draws = await _draws_afresh(apps, Planner.of(job, "truth", _NOBODY, data).first_training())
            setting = TruthSetting(
                run_id=run.run_id,
                iteration=iteration,
                checkpoint=checkpoint.name,
                gamma=job.algorithm.gamma,
                continuations=options.continuations,
                horizon=options.horizon,
                fresh_draws=fresh_draws,
                seed=options.seed,
                rewards=job.training.step_rewards.model_dump(mode="json"),
            )
            file = TruthFile.open(options.out, setting)
            collector = Collector(
                apps,
                timeout_s=job.services.iteration_timeout_s,
                max_running=job.rollout.max_concurrent_rollouts,
            )

            async def measure(inference: Inference) -> Measurement:
                planner = Planner.of(job, f"{job.job.name}.truth.{uuid4().hex[:12]}", inference, data)
                player = _Player(planner, collector, apps, Rewards(job.training, job.max_decisions), setting)
                chosen = list(islice(_chosen(rollouts, options.seed), options.decisions))
                lanes = max(2, 2 * job.rollout.max_concurrent_rollouts // options.continuations)
                return await _Measuring(player, file, options, tell).all(chosen, lanes)

            return await by_checkpoint(job, checkpoint, measure)


# For a plan whose requests are read and not sent.
_NOBODY = Inference("http://127.0.0.1:1", "nobody", None)


def _refuse_rewards(job: JobConfig, options: TruthOptions) -> None:
    """Refuse rewards that a part of an episode does not tell."""
    training = job.training
    if options.budget is not None and options.budget < 2 * options.continuations:
        raise JobError(
            f"--budget {options.budget} is too small for a single decision: it takes {options.continuations} "
            "decisions to see what the policy does there, and as many continuations of at least one"
        )
    if training.kl_reward_coef > 0:
        raise JobError(
            f"training.kl_reward_coef is {training.kl_reward_coef:g}, and continuations are not scored by a "
            "reference; --set training.kl_reward_coef=0 measures the truth of all other rewards"
        )
    if job.rollout.reward_function is not None:
        raise JobError("rollout.reward_function judges whole episodes, and no part of one")
    switches = training.step_rewards
    to_the_end = switches.mode == "off" or not switches.enabled
    looks_ahead = switches.step_beta > 0 and training.step_rewards_horizon == "realised"
    if options.horizon is not None and (to_the_end or looks_ahead):
        why = "pays at the end of an episode" if to_the_end else "pays by the length of an episode"
        raise JobError(f"--horizon cuts continuations short, and this job {why}; leave --horizon out")


def _policy_of(run: RunDirectory, options: TruthOptions) -> tuple[int, Path]:
    """The iteration to measure, and the checkpoint that sampled it, or the one that is asked for."""
    stored = sorted(int(path.stem.removeprefix("iteration_")) for path in run.iteration_files())
    checkpoints = dict(whole_checkpoints(run.checkpoints))
    if not stored:
        raise RunDirectoryError(f"{run.path}: no rollouts of any iteration are stored")
    if options.checkpoint is not None:
        return options.iteration or stored[-1], options.checkpoint
    known = [number for number in stored if number - 1 in checkpoints]
    number = options.iteration or (known[-1] if known else stored[-1])
    if number not in known:
        having = ", ".join(f"iteration_{item}" for item in checkpoints) or "none"
        raise RunDirectoryError(
            f"{run.path}: the policy that sampled iteration {number} is gone: it was checkpoint "
            f"iteration_{number - 1}; there are {having}. --checkpoint names another policy, whose truth is "
            f"another; training.keep_checkpoints and checkpoint_every keep more"
        )
    return number, checkpoints[number - 1]


def _refuse_other_versions(rollouts: Sequence[Rollout], checkpoint: Path) -> None:
    state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    played = [item.trajectory for item in rollouts if item.trajectory is not None]
    staleness = staleness_metrics(played, int(state["policy_version"]))
    if any(staleness.values()):
        raise RunDirectoryError(
            f"{checkpoint} has version {state['policy_version']}, and the rollouts were sampled by others "
            f"(up to {staleness['policy/staleness_max']:g} before it), as with training.max_staleness; "
            f"--checkpoint {checkpoint} measures them by this policy all the same"
        )


async def _draws_afresh(apps: TaskApps, first: RolloutRequest) -> bool:
    """Whether the environment can be given other draws.

    Raises:
        JobError: it has no snapshots.
    """
    apps.refuse_if_none_answers()
    client = next(app.client for app in apps.members if app.fault is None)
    body = {"env_name": first.env.env_name, "config": first.env.config, "seed": first.start.seed}
    created = await client.create("env", body)
    await client.terminate("env", created.id)
    if created.info.conversation or not created.info.restorable:
        talks = created.info.conversation
        why = "is a conversation, which no snapshot holds" if talks else "has no snapshots"
        raise JobError(
            f"{first.env.env_name!r} {why}, and the truth is measured by playing on from one",
            where="rollout.env_name",
            hint="An environment with snapshot() and restore() can be measured (docs/plugins.md).",
        )
    return created.info.reseedable


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A stored decision to measure; its rollout carries decision rewards, also if it was played without."""

    rollout: Rollout
    step: StepData

    @property
    def key(self) -> tuple[str, int]:
        return self.rollout.rollout_id, self.step.turn

    @property
    def episode(self) -> Trajectory:
        assert self.rollout.trajectory is not None, "only finished rollouts are measured"
        return self.rollout.trajectory

    @property
    def goes_on(self) -> bool:
        """Whether the stored episode has a decision after this one."""
        return self.step.turn < len(self.episode.steps)

    def having(self, step: StepData) -> Rollout:
        """The rollout up to this decision, with `step` in its place."""
        before = self.episode.steps[: self.step.turn - 1]
        episode = self.episode.model_copy(update={"steps": (*before, step)})
        return self.rollout.model_copy(update={"trajectory": episode})


def _chosen(rollouts: Sequence[Rollout], seed: int) -> Iterator[_Chosen]:
    """All decisions; any first ones of them are spread evenly over rewards, turns and states.

    The last decision of an episode that ran out of time is left out: it did not end the episode.
    """
    decisions = []
    for rollout in map(with_records, rollouts):
        if (episode := rollout.trajectory) is not None:
            last = len(episode.steps) - (episode.stop_reason is StopReason.DEADLINE)
            decisions += [_Chosen(rollout, step) for step in episode.steps[:last]]
    decisions.sort(key=lambda item: (_earns(item.step), item.step.turn, _state(item.step), item.key))
    for index in even_order(len(decisions), seed):
        yield decisions[index]


def _earns(step: StepData) -> bool:
    events = step.metadata.decision_rewards
    return bool(step.reward_parts or (events and events.ach_delta) or any(step.env_rewards or ()))


def _state(step: StepData) -> str:
    keys = step.observation_data.state_keys
    return keys[min(keys)] if keys else ""


class _Measuring:
    """The measurement of several decisions side by side."""

    def __init__(self, player: "_Player", file: TruthFile, options: TruthOptions, tell: Tell | None) -> None:
        self._player, self._file, self._options, self._tell = player, file, options, tell
        self._played = sum(item.decisions for item in file.truths.values())
        self._lost = 0
        self._is_over_budget = False

    async def all(self, chosen: Sequence[_Chosen], lanes: int) -> Measurement:
        total = len(chosen)
        left = iter([item for item in chosen if item.key not in self._file.truths])
        self._report(total)

        async def lane() -> None:
            for item in left:
                if self._options.budget is not None and self._played >= self._options.budget:
                    self._is_over_budget = True
                    return
                truth = await self._player.truth(item)
                if truth is None:
                    self._lost += 1
                    continue
                self._played += truth.decisions
                self._file.add(truth)
                self._report(total)

        async with asyncio.TaskGroup() as group:
            for _ in range(lanes):
                group.create_task(lane())
        return Measurement(self._file, self._lost, self._is_over_budget)

    def _report(self, total: int) -> None:
        if self._tell is not None:
            self._tell(min(len(self._file.truths), total), total)


class _Side(NamedTuple):
    """One side of a pair: what was done at the decision, and where that led.

    Attributes:
        episode: in which it was done; it ended with it where there is no moment after it.
        moment: the snapshot after it.
    """

    step: StepData
    episode: Trajectory
    moment: str | None


@dataclass(frozen=True, slots=True)
class _Player:
    """Plays on from before and after a decision."""

    planner: Planner
    collector: Collector
    apps: TaskApps
    rewards: Rewards
    setting: TruthSetting

    async def truth(self, item: _Chosen) -> TrueAdvantage | None:
        """The measured truth of a decision; None where fewer than two of its pairs were played.

        Raises:
            TaskAppError: its episode goes otherwise when it is replayed.
        """
        before, after = await self._moments(item)
        count = self.setting.continuations
        firsts = await self._collect([self._first(item, before, k) for k in range(count)])
        others = {
            k: _Side(episode.steps[0], episode, episode.final_snapshot)
            for k, episode in firsts.items()
            if not _is_same(episode.steps[0], item.step)
        }
        stored = _Side(item.step, item.episode, after)
        own = await self._played_on(item, "own", dict.fromkeys(others, stored))
        other = await self._played_on(item, "other", others)
        returns = {k: (self._return(item, own[k]), self._return(item, other[k])) for k in own.keys() & other}
        same = len(firsts) - len(others)
        if same + len(returns) < 2:
            return None
        differences = [mine - its for mine, its in returns.values()]
        advantage, error = mean_difference([*differences, *([0.0] * same)])
        values = [mine for mine, _ in returns.values()]
        return TrueAdvantage(
            rollout_id=item.rollout.rollout_id,
            turn=item.step.turn,
            reward=self.rewards.earned_by(item.rollout, {}).rewards_T[item.step.turn - 1],
            advantage=advantage,
            error=error,
            action_value=math.fsum(values) / len(values) if values else None,
            pairs=same + len(returns),
            failed=count - same - len(returns),
            others=len(returns),
            decisions=len(firsts) + sum(len(e.steps) - 1 for e in (*own.values(), *other.values())),
        )

    async def _played_on(self, item: _Chosen, name: str, sides: Mapping[int, _Side]) -> dict[int, Trajectory]:
        """By pair, the episode from the decision on, where it could be played."""
        requests = [
            self._rest(item, f"{self._group(item)}-{name}", k, side)
            for k, side in sides.items()
            if side.moment is not None
        ]
        rests = await self._collect(requests)
        return {
            k: _joined(side.step, rests[k].steps if side.moment else (), rests.get(k, side.episode))
            for k, side in sides.items()
            if side.moment is None or k in rests
        }

    async def _moments(self, item: _Chosen) -> tuple[str, str | None]:
        """Snapshots before the decision, and after it if the episode went on, by a replay of the episode."""
        turn = item.step.turn
        origin = self.planner.source.of_group(item.rollout.group_id, item.episode.seed)
        env = self.planner.players.env(origin)
        record = ReplayRequest(
            env_name=env.env_name,
            config=env.config,
            seed=item.episode.seed,
            turns=tuple(map(ReplayTurn.of, item.episode.steps[:turn])),
            snapshots=(turn - 1, turn) if item.goes_on else (turn - 1,),
        )
        client = next((app.client for app in self.apps.members if app.fault is None), None)
        if client is None:
            raise TaskAppError(f"no task app answers: {self.apps.answers()}")
        try:
            snapshots = await client.snapshots(record)
        except ReplayDeparts as error:
            raise TaskAppError(
                f"{error.detail}: rollout {item.rollout.rollout_id!r} was played in another environment than "
                "the task app has, or in another version of it",
                hint="Start the task app of the version that the run was trained with.",
            ) from error
        return snapshots[turn - 1], snapshots.get(turn)

    def _first(self, item: _Chosen, before: str, k: int) -> RolloutRequest:
        """The policy's new choice before the decision: one decision, and the moment after it."""
        done = item.step.turn - 1
        start = Start(snapshot=before, parent_rollout_id=item.rollout.rollout_id, parent_turn=done)
        is_last = item.step.turn >= self.planner.players.max_decisions
        what = Continuation(
            f"{self._group(item)}-first",
            k,
            ("truth first", *self._seed_parts(item, k)),
            max_decisions=1,
            snapshot_turns=() if is_last else (2,),
        )
        return self.planner.continuation(item.rollout, start, what)

    def _rest(self, item: _Chosen, group: str, k: int, side: _Side) -> RolloutRequest:
        """What comes after one side of pair k; both sides draw the same."""
        draws = derived_seed("truth draws", *self._seed_parts(item, k))
        start = Start(
            snapshot=side.moment,
            draws_seed=draws if self.setting.fresh_draws else None,
            parent_rollout_id=item.rollout.rollout_id,
            parent_turn=item.step.turn,
        )
        seed_parts = ("truth", *self._seed_parts(item, k))
        what = Continuation(group, k, seed_parts, max_decisions=self.setting.horizon)
        return self.planner.continuation(item.having(side.step), start, what)

    def _return(self, item: _Chosen, episode: Trajectory) -> float:
        """The discounted return of an episode from the decision on."""
        rollout = item.rollout.model_copy(update={"trajectory": episode})
        earned = self.rewards.earned_by(rollout, {}, decisions_done=item.step.turn - 1)
        return discounted_returns(earned.rewards_T, self.setting.gamma)[0]

    async def _collect(self, requests: Sequence[RolloutRequest]) -> dict[int, Trajectory]:
        """By pair, those that were played."""
        collection = await self.collector.collect(requests)
        if requests:
            await self.collector.ack(self.planner.run_id, collection.all)
        return {item.sibling: item.trajectory for item in collection.rollouts if item.trajectory is not None}

    def _group(self, item: _Chosen) -> str:
        return f"{item.rollout.rollout_id.replace(':', '.')}/truth-{item.step.turn}"

    def _seed_parts(self, item: _Chosen, k: int) -> tuple[int | str, ...]:
        return self.setting.seed, item.rollout.group_id, item.rollout.sibling, item.step.turn, k


def _is_same(step: StepData, stored: StepData) -> bool:
    """Whether the policy chose as stored: the same calls, or the same reason why there are none."""
    calls, stored_calls = (
        [(call.function.name, call.function.arguments) for call in one.tool_calls] for one in (step, stored)
    )
    return calls == stored_calls and step.step_info.invalid_reason == stored.step_info.invalid_reason


def _joined(step: StepData, rest: Sequence[StepData], ending: Trajectory) -> Trajectory:
    """The episode that begins with a decision, goes on with others, and ends like `ending`."""
    steps = tuple(_at_turn(one, turn) for turn, one in enumerate((step, *rest), start=1))
    return ending.model_copy(update={"steps": steps})


def _at_turn(step: StepData, turn: int) -> StepData:
    """The decision as the `turn`-th of an episode, its record of rewards too."""
    metadata = step.metadata
    if (rewards := metadata.decision_rewards) is not None:
        metadata = metadata.model_copy(update={"decision_rewards": rewards.model_copy(update={"turn": turn})})
    return step.model_copy(update={"turn": turn, "metadata": metadata})
