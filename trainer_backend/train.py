"""The main loop of a training run. Numbers in comments refer to the numbered stops in docs/route.md.

This file does not import torch: the learner and the inference server are protocols (`parts`).
"""

import asyncio
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

from service_kit.tasks import end_tasks
from trainer_backend.collect.metrics import batch_metrics, evaluation_metrics
from trainer_backend.collect.plan import digest_tasks
from trainer_backend.core.statistics import staleness_metrics
from trainer_backend.errors import (
    CreditError,
    LearnerLost,
    SamplerMismatch,
    TrainerError,
    UpdateStopped,
)
from trainer_backend.evaluation.best import TASKS_DIGEST
from trainer_backend.parts import Progress
from trainer_backend.run.iteration import Iteration
from trainer_backend.run.iteration_metrics import IterationResult, Moment, iteration_metrics, moment
from trainer_backend.run.run import Run
from trainer_backend.run.stopping import until
from trainer_backend.run.warnings import find_warnings
from trainer_backend.rundir.rollout_files import write_rollouts
from trainer_backend.rundir.spool import LedgerEntry, append_to_ledger

__all__ = ["Run", "train", "work_left"]


async def train(
    run: Run, progress: Progress, stop: asyncio.Event, served: Callable[[], None] = lambda: None
) -> Progress:
    """Run iterations until the job is done or `stop` is set; return the progress at the end.

    A stop interrupts the collection of rollouts and the publication of weights, but not an update. The saved
    state is always the state at the end of an iteration, even after an error in rollouts or an update.

    Args:
        served: called once the policy in training and the fixed policies are served.
    """
    saving, ahead = run.saving, Ahead(run, stop)
    await until(stop, run.server.publish(progress.policy_version))
    if not stop.is_set():
        served()
    saving.mark_best()  # an earlier start may have been killed after an evaluation, before it set the mark
    try:
        while True:
            try:
                if saving.due(progress.iteration):
                    await saving.save(progress)  # in the background
                ahead.begin_early(progress)
                if saving.evaluation_due(progress):
                    await _evaluate(run, progress, stop)
                ends = progress.iteration >= saving.last_iteration or stop.is_set()
                iteration = None if ends else ahead.take(progress)
                result = None if iteration is None else await _play(iteration)
            except TrainerError as error:
                if not isinstance(error, LearnerLost):  # a lost learner has no weights to save
                    await _save_last(run, progress)
                raise
            learned = None
            if iteration is not None and result is not None:
                learned = await _learn_or_reject(ahead, progress, iteration, result)
            if learned is None:
                await _save_last(run, progress)
                return progress
            progress = learned
            del iteration, result  # so that memory holds one batch at a time
            gc.collect()  # the only full garbage collection while batches grow (garbage.py)
    finally:
        await ahead.end()
        if (failure := await saving.end()) is not None:
            run.reporter.say(f"the last checkpoint is not written: {failure}")


def work_left(run: Run, progress: Progress) -> bool:
    """Return whether an iteration or an evaluation of the job is still to be run."""
    return progress.iteration < run.saving.last_iteration or run.saving.evaluation_due(progress)


class Ahead:
    """Begins to collect iterations while the learner works on earlier ones.

    Rollouts are requested for the next iteration, and for up to `max_staleness` iterations after it.
    Iteration k can begin when the weights after iteration k - 1 - max_staleness are served. So a token of
    iteration k is sampled by weights that are at most `max_staleness` iterations older than the weights
    before update k. The learner trains the iterations in order, each with exactly its planned rollouts.

    Source: DESIGN.md section 8.
    """

    def __init__(self, run: Run, stop: asyncio.Event) -> None:
        self.run, self.stop = run, stop
        self.last_row = Moment(0.0, {})  # when the metrics row of the last finished iteration was made
        self._iterations: dict[int, Iteration] = {}

    def begin_early(self, progress: Progress) -> None:
        """Begin all iterations that may be collected now. Does nothing if `max_staleness` is 0."""
        staleness, following = self.run.planner.table.max_staleness, progress.iteration + 1
        if staleness and not self.stop.is_set():
            last = min(following + staleness, self.run.saving.last_iteration)
            for number in range(following, last + 1):
                self._begin(number, progress)

    def take(self, progress: Progress) -> "Iteration":
        """Return the iteration after `progress`; begin it first, unless `begin_early` has begun it."""
        self._begin(progress.iteration + 1, progress)
        return self._iterations.pop(progress.iteration + 1)

    async def end(self) -> None:
        """Cancel all iterations that have begun and were not taken."""
        iterations, self._iterations = self._iterations, {}
        for iteration in iterations.values():
            await iteration.cancel()

    def _begin(self, number: int, progress: Progress) -> None:
        if number not in self._iterations:
            self._iterations[number] = Iteration(self.run, number, progress, self.stop)


async def _play(iteration: Iteration) -> IterationResult | None:
    """Collect and credit an iteration's rollouts (stops 2 to 10); return None if a stop came first."""
    while not iteration.is_complete:
        if not await iteration.add_round():
            return None
    return iteration.result()


async def _learn_or_reject(
    ahead: Ahead, progress: Progress, iteration: Iteration, result: IterationResult
) -> Progress | None:
    """Call `_learn`. If the update rejects rollouts, collect others in their place, and learn again.

    Returns the new progress, or None if the run was asked to stop while other rollouts were collected. Raises
    the update's error if the rollouts cannot be replaced.
    """
    run = ahead.run
    try:
        return await _learn(ahead, progress, result)
    except (CreditError, UpdateStopped) as error:
        is_whole = not getattr(error, "steps_taken", 0)  # else some steps of the update changed the weights
        if not iteration.reject(error, goes_on=is_whole):
            if is_whole:
                await _save_last(run, progress)
            raise
    try:
        other = await _play(iteration)
    except TrainerError as lost:
        if not isinstance(lost, LearnerLost):
            await _save_last(run, progress)
        raise
    return None if other is None else await _learn_or_reject(ahead, progress, iteration, other)


async def _learn(ahead: Ahead, progress: Progress, result: IterationResult) -> Progress:
    """Update the policy, serve the weights and record metrics (stops 11 to 13); return the new progress."""
    run, iteration = ahead.run, progress.iteration + 1
    staleness = _staleness(run, progress, result)
    keeping = asyncio.ensure_future(_keep_starts(run, iteration, result))  # while the learner works
    try:
        with run.timeline.working("learn") as learning:
            run.reporter.stage(f"update {iteration}", 0, 1)
            update = await _update(run, result, progress)  # 8 (log-probs), 11
            updated, steps = time.monotonic(), int(update["optim/steps"])
            progress = replace(
                progress,
                iteration=iteration,
                policy_version=progress.policy_version + (steps > 0),
                updates=progress.updates + steps,
            )
            error = await _publish(ahead, progress) if steps else None  # 12
            publish_s = time.monotonic() - updated
        starts = await keeping
    finally:
        await end_tasks(keeping)
    # Iterations may be collected at the same time. Each row reports only what happened since the previous
    # row, so that no request counts in two rows.
    since = max(ahead.last_row, result.start, key=attrgetter("seconds"))
    now = await moment(run.server)
    ahead.last_row = now
    row = {  # 13
        "kind": "iteration",
        "iteration": iteration,
        **iteration_metrics(run.credit.policies, result, since=since, now=now),
        **update,
        "policy/version": progress.policy_version,
        **staleness,
        **starts,
        "time/update_s": learning.seconds - publish_s,
        "time/publish_s": publish_s,
        "time/checkpoint_s": run.saving.take_seconds(),
        **run.timeline.waits(),
        "timeline/collect_start": result.collect_spans[0].start,
        "timeline/collect_end": result.collect_spans[-1].end,
        "timeline/learn_start": result.credit_spans[0].start,
        "timeline/learn_end": learning.end,
        "recovery/resumes": float(run.resumes),
    }
    consumed = tuple(episode.rollout_id for episode in result.credited.episodes)
    append_to_ledger(run.directory.path, LedgerEntry(iteration, progress.policy_version, consumed))
    run.record(row)
    compares_siblings = run.credit.estimator.compares_siblings
    for warning in find_warnings(row, run.directory.metrics, compares_siblings=compares_siblings):
        run.reporter.say(warning)
    if error is not None:  # no server loaded the new weights; a resumed run publishes them again
        await _save_last(run, progress)
        raise error
    return progress


async def _keep_starts(run: Run, iteration: int, result: IterationResult) -> dict[str, float]:
    """Store snapshots at which later games may start, and return metrics. Do nothing without [curriculum]."""
    if run.curriculum is None:
        return {}
    return await run.curriculum.keep(iteration, result.requests, result.batch.rollouts)


def _staleness(run: Run, progress: Progress, result: IterationResult) -> dict[str, float]:
    """Return metrics of the staleness of the iteration's tokens, in policy versions.

    Raises SamplerMismatch if `max_staleness` is above 0, and the staleness of a token exceeds it.
    """
    after_forks = result.branches.rollouts if run.credit.algorithm.train_branches else ()
    own = run.credit.policies.by_actor([*result.batch.rollouts, *after_forks])
    played = [rollout.trajectory for rollout in own if rollout.trajectory is not None]
    staleness = staleness_metrics(played, progress.policy_version)
    bound = run.planner.table.max_staleness
    if bound and staleness.get("policy/staleness_max", 0.0) > bound:
        raise SamplerMismatch(
            f"iteration {progress.iteration + 1} has tokens whose sampler is "
            f"{staleness['policy/staleness_max']:.0f} versions behind, and training.max_staleness is {bound}",
            hint="A server may have been restarted with old weights; look at its log.",
        )
    return staleness


async def _publish(ahead: Ahead, progress: Progress) -> TrainerError | None:
    """Publish the new weights, unless a stop comes first.

    If publishing fails, the error is returned instead of raised, so that the caller can first record the
    finished update. LearnerLost is raised, because the update is then lost.
    """
    try:
        await until(ahead.stop, ahead.run.server.publish(progress.policy_version))
    except TrainerError as error:
        if isinstance(error, LearnerLost):
            raise
        return error
    return None


async def _update(run: Run, result: IterationResult, progress: Progress) -> dict[str, float]:
    """Update the policy and return metrics of the update. If the policy takes no step, tell the user why."""
    episodes, iteration = result.credited.episodes, progress.iteration + 1
    if not episodes:
        run.reporter.say(f"iteration {iteration}: every group is flat, so no step is taken")
        return {"optim/steps": 0.0, "optim/steps_skipped": 0.0}
    algorithm, metrics = run.credit.algorithm, result.credited.metrics
    if run.credit.estimator.needs_state_keys and not metrics["anchors/met_after_start_frac"]:
        run.reporter.say(
            f"iteration {iteration}: no state was met twice after the start, so algorithm.advantage = "
            f"{algorithm.advantage!r} compares first decisions alone; algorithm.state_hashing_function = "
            f"{algorithm.state_hashing_function!r} may tell states apart that are alike"
        )
    update = await asyncio.to_thread(
        run.learner.update,
        episodes,
        iteration=iteration,
        policy_version=progress.policy_version if run.planner.table.max_staleness else None,
    )
    if not update["optim/steps"]:
        is_certain = update.get("optim/certain_frac") == 1.0
        reason = "every decision is certain" if is_certain else "the critic warms up"
        run.reporter.say(f"iteration {iteration}: {reason}, so the policy takes no step")
    return update


async def _save_last(run: Run, progress: Progress) -> None:
    """Save a checkpoint, and wait until it is written."""
    await run.saving.save(progress)
    await run.settled()


async def _evaluate(run: Run, progress: Progress, stop: asyncio.Event) -> None:
    """Play the held-out worlds, record their metrics, and mark the checkpoint with the best evaluation."""
    started = time.monotonic()
    requests = run.planner.evaluation(str(progress.iteration))
    name = f"evaluation_{progress.iteration}"
    spool = run.spool(name, requests, range(progress.policy_version, progress.policy_version + 1))
    with run.timeline.working("collect") as span:
        collecting = run.collect(f"evaluate {progress.iteration}", requests, spool=spool, stop=stop)
        batch = await run.saving.while_written(collecting)
    await run.settled()  # the checkpoint is written before the evaluation's row
    if batch is None:
        return
    write_rollouts(run.directory.rollouts_file(name), batch.all)
    stage = f"evaluation after iteration {progress.iteration}"
    run.losses.report(batch, stage)
    run.losses.refuse(batch, stage, progress.iteration)
    await run.dispatcher.ack(run.planner.run_id, batch.all)
    row = {
        "kind": "evaluation",
        "iteration": progress.iteration,
        **evaluation_metrics(batch.rollouts),
        **batch_metrics(batch),
        TASKS_DIGEST: digest_tasks(requests),
        "time/evaluate_s": time.monotonic() - started,
        "timeline/collect_start": span.start,
        "timeline/collect_end": span.end,
    }
    run.record(row)
    spool.remove()
    if note := run.saving.mark_best().get(progress.iteration):
        run.reporter.say(note)
