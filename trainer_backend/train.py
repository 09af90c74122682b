"""A training run, read top to bottom. The numbers are those of docs/route.md.

No torch here: the learner and the inference server are behind protocols.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared_schemas.rollouts import RolloutRequest
from shared_schemas.trajectory import Trajectory
from trainer_backend.collect.collector import Collection, Collector
from trainer_backend.collect.plan import Planner
from trainer_backend.core.statistics import (
    ach_by_turn,
    episode_metrics,
    unique_by_turn,
)
from trainer_backend.credit import Credited, credit
from trainer_backend.errors import TrainerError
from trainer_backend.evaluation import (
    collection_metrics,
    evaluation_metrics,
    finished_trajectories,
    refuse_empty,
)
from trainer_backend.job_schema import JobConfig
from trainer_backend.protocols import InferenceServer, Learner, Progress, Reporter
from trainer_backend.rundir.checkpoint_paths import mark_best, prune_checkpoints
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_files import Credit, write_rollouts
from trainer_backend.stopping import until


@dataclass(frozen=True, slots=True)
class Run:
    """What a run works with.

    Attributes:
        run_id: names this start of the run at the task apps (start.run_job).
    """

    job: JobConfig
    directory: RunDirectory
    run_id: str
    collector: Collector
    learner: Learner
    server: InferenceServer
    reporter: Reporter

    @property
    def planner(self) -> Planner:
        return Planner(self.job, self.run_id, self.server.inference)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Stops 2 to 10 of an iteration: collected, credited, stored."""

    collection: Collection
    trajectories: list[Trajectory]
    credited: Credited
    inference: dict[str, float]
    started: float
    collected: float
    credit_done: float


async def train(run: Run, progress: Progress, stop: asyncio.Event) -> Progress:
    """Iterate until the job is done or `stop` is set; the state of the last finished iteration.

    A stop is heeded between stages and while rollouts are collected, never in the middle of an update,
    so what is saved is always the end of an iteration. That holds for errors of the rollouts too.
    """
    await run.server.publish(progress.policy_version)
    _mark_best(run)  # a kill may have come between an evaluation and this
    while True:
        evaluation_due = _evaluation_due(run, progress)
        if evaluation_due or progress.iteration % run.job.training.checkpoint_every == 0:
            await _save(run, progress)
        try:
            if evaluation_due:
                await _evaluate(run, progress, stop)
            ends = progress.iteration >= run.job.training.iterations or stop.is_set()
            gathered = None if ends else await _gather(run, progress.iteration + 1, stop)
        except TrainerError:
            await _save(run, progress)
            raise
        if gathered is None:
            await _save(run, progress)
            return progress
        progress = await _learn(run, progress, gathered)


def work_left(run: Run, progress: Progress) -> bool:
    """Whether a resumed run would have something to do."""
    return progress.iteration < run.job.training.iterations or _evaluation_due(run, progress)


def _evaluation_due(run: Run, progress: Progress) -> bool:
    """At both ends and every so often; also when a stop came before an evaluation that was due."""
    iteration = progress.iteration
    last = iteration == run.job.training.iterations
    if iteration % run.job.evaluation.every_n_iters and not last:
        return False
    rows = run.directory.metrics()
    return not any(row["kind"] == "evaluation" and row["iteration"] == iteration for row in rows)


async def _gather(run: Run, iteration: int, stop: asyncio.Event) -> Gathered | None:
    """Stops 2 to 10; None when it was stopped while it collected."""
    started, before = time.monotonic(), run.server.totals()
    name = f"iteration_{iteration}"
    requests = run.planner.training(iteration)  # 2, 3
    collection = await _collect(run, requests, f"collect {iteration}", stop)  # 4 to 6
    if collection is None:
        return None
    collected, inferred = time.monotonic(), inference_metrics(before, run.server.totals())
    try:
        refuse_empty(collection, f"iteration {iteration}")
        credited = credit(run.job, collection.rollouts)  # 7, 9, 10
    except TrainerError:
        _store(run, name, collection, None)  # what was wrong with them can be looked at
        raise
    _store(run, name, collection, credited.credits)
    await run.collector.ack(run.run_id, collection.all)
    trajectories = finished_trajectories(collection.rollouts, name)
    return Gathered(collection, trajectories, credited, inferred, started, collected, time.monotonic())


async def _learn(run: Run, progress: Progress, gathered: Gathered) -> Progress:
    """Stops 11 to 13: the update, the new weights served, the row of metrics."""
    iteration = progress.iteration + 1
    episodes = gathered.credited.episodes
    started = time.monotonic()
    update = await asyncio.to_thread(run.learner.update, episodes, iteration=iteration)  # 8, 11
    updated = time.monotonic()
    progress = replace(
        progress,
        iteration=iteration,
        policy_version=progress.policy_version + 1,
        updates=progress.updates + int(update["optim/steps"]),
    )
    await run.server.publish(progress.policy_version)  # 12
    row = {  # 13
        "kind": "iteration",
        "iteration": iteration,
        **_gathered_metrics(gathered, ended=time.monotonic()),
        **update,
        "policy/version": progress.policy_version,
        "time/update_s": updated - started,
        "time/publish_s": time.monotonic() - updated,
    }
    run.directory.append_metrics(row)
    run.reporter.metrics(row)
    return progress


def _gathered_metrics(gathered: Gathered, *, ended: float) -> dict[str, Any]:
    """What the rollouts of an iteration that ended at `ended` say of themselves."""
    trajectories, metrics = gathered.trajectories, gathered.credited.metrics
    steps = [step.step_info for item in trajectories for step in item.steps]
    decisions = metrics["decision/count"]
    return {
        **episode_metrics(trajectories),
        **metrics,
        **collection_metrics(gathered.collection),
        **gathered.inference,
        "decision/unique_by_turn": unique_by_turn(trajectories),
        "decision/ach_by_turn": ach_by_turn(trajectories),
        "time/collect_s": gathered.collected - gathered.started,
        "time/credit_s": gathered.credit_done - gathered.collected,
        "time/environment_s": sum(step.environment_s for step in steps),
        "time/policy_s": sum(step.policy_s for step in steps),
        "perf/decisions_per_s": decisions / (ended - gathered.started),
        "perf/collect_decisions_per_s": decisions / (gathered.collected - gathered.started),
    }


def inference_metrics(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, float]:
    """What was inferred between two looks at `InferenceServer.totals`. Pure.

    A step samples one token for every request that runs, so their mean number is tokens a step.
    """
    used = {name: float(after[name] - before[name]) for name in after}
    steps = used["steps"]
    return {
        **{f"inference/{name}": count for name, count in used.items()},
        "inference/mean_running": used["sampled_tokens"] / steps if steps else 0.0,
    }


async def _evaluate(run: Run, progress: Progress, stop: asyncio.Event) -> None:
    """Play the held-out worlds; this checkpoint, saved before, becomes the best if none was better."""
    started = time.monotonic()
    requests = run.planner.evaluation(str(progress.iteration))
    collection = await _collect(run, requests, f"evaluate {progress.iteration}", stop)
    if collection is None:
        return
    _store(run, f"evaluation_{progress.iteration}", collection, None)
    refuse_empty(collection, f"evaluation after iteration {progress.iteration}")
    await run.collector.ack(run.run_id, collection.all)
    row = {
        "kind": "evaluation",
        "iteration": progress.iteration,
        **evaluation_metrics(collection.rollouts),
        **collection_metrics(collection),
        "time/evaluate_s": time.monotonic() - started,
    }
    run.directory.append_metrics(row)
    run.reporter.metrics(row)
    _mark_best(run)


def _mark_best(run: Run) -> None:
    """Point at the checkpoint with the best evaluation, the first of equals.

    Derived from the rows and the folders, so that a kill between any two writes is made good by the next
    start. An evaluation that lost worlds to failures is not comparable, and never the best.
    """
    found = [
        (row["eval/outcome_reward"], _folder(run, row["iteration"]))
        for row in run.directory.metrics()
        if row["kind"] == "evaluation" and row["rollout/failed"] == 0
    ]
    kept = [(score, folder) for score, folder in found if folder.exists()]
    if kept:
        mark_best(max(kept, key=lambda item: item[0])[1])


async def _collect(
    run: Run, requests: Sequence[RolloutRequest], name: str, stop: asyncio.Event
) -> Collection | None:
    def tell(done: int, total: int) -> None:
        run.reporter.stage(name, done, total)

    return await until(stop, run.collector.collect(requests, tell))


def _folder(run: Run, iteration: int) -> Path:
    return run.directory.checkpoints / f"iteration_{iteration}"


async def _save(run: Run, progress: Progress) -> None:
    """A checkpoint of this iteration, unless it is on disk."""
    folder = _folder(run, progress.iteration)
    if not folder.exists():
        await asyncio.to_thread(run.learner.save, folder, progress)
        prune_checkpoints(run.directory.checkpoints, run.job.training.keep_checkpoints)


def _store(run: Run, name: str, collection: Collection, credits: Sequence[Credit] | None) -> None:
    write_rollouts(run.directory.rollouts_file(name), collection.all, credits)
