"""A training run, read top to bottom. The numbers are those of docs/route.md.

No torch here: the learner and the inference server are behind protocols.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from shared_schemas.rollouts import RolloutRequest
from trainer_backend.collect.collector import Collection, joined
from trainer_backend.core.branching import by_parent
from trainer_backend.core.critic import firsts
from trainer_backend.core.statistics import staleness_metrics
from trainer_backend.credit import NOTHING, Credited, Measured, credit, final_views, segments_by_rollout
from trainer_backend.errors import TrainerError, UpdateStopped
from trainer_backend.evaluation.metrics import (
    collection_metrics,
    evaluation_metrics,
    finished_trajectories,
    refuse_empty,
)
from trainer_backend.plugins import estimator
from trainer_backend.protocols import Progress
from trainer_backend.rundir.ledger import Consumed, append_consumed
from trainer_backend.rundir.rollout_files import Credit, write_rollouts
from trainer_backend.rundir.spool import Spool
from trainer_backend.running.collecting import collected
from trainer_backend.running.gathered import Gathered, gathered_metrics, inference_metrics
from trainer_backend.running.mixture import (
    refuse_other_sampler,
    refuse_silent_policy,
    refuse_unreadable_policy,
    rollout_metrics,
)
from trainer_backend.running.run import Run
from trainer_backend.running.saving import Saving
from trainer_backend.sampled_by import by_actor

__all__ = ["Run", "train", "work_left"]

# Beside an episode the learner values the state that a limit left it in. No rollout id holds a space.
_AFTER = " after"


async def train(run: Run, progress: Progress, stop: asyncio.Event) -> Progress:
    """Iterate until the job is done or `stop` is set; the state of the last finished iteration.

    A stop is heeded between stages and while rollouts are collected, never in the middle of an update,
    so what is saved is always the end of an iteration. That holds for errors of rollouts and updates too.
    """
    saving = Saving(run.job, run.directory, run.learner)
    await run.server.publish(progress.policy_version)
    saving.mark_best()  # a kill may have come between an evaluation and this
    while True:
        if saving.due(progress.iteration):
            await saving.save(progress)
        try:
            if saving.evaluation_due(progress):
                await _evaluate(run, saving, progress, stop)
            ends = progress.iteration >= run.job.training.iterations or stop.is_set()
            gathered = None if ends else await _gather(run, saving, progress, stop)
        except TrainerError:
            await saving.save(progress)
            raise
        if gathered is None:
            await saving.save(progress)
            return progress
        try:
            progress = await _learn(run, saving, progress, gathered)
        except UpdateStopped as error:
            if not error.steps_taken:  # else the weights are those of no iteration's end
                await saving.save(progress)
            raise


def work_left(run: Run, progress: Progress) -> bool:
    """Whether a resumed run would have something to do."""
    saving = Saving(run.job, run.directory, run.learner)
    return progress.iteration < run.job.training.iterations or saving.evaluation_due(progress)


async def _gather(run: Run, saving: Saving, progress: Progress, stop: asyncio.Event) -> Gathered | None:
    """Stops 2 to 10; None when it was stopped while it collected.

    What a round brought is stored before the task apps forget it and before another round is asked for.
    """
    started, iteration = time.monotonic(), progress.iteration + 1
    rounds: list[Collection] = []
    branched: list[Collection] = []
    measured = NOTHING
    collect_s, before = 0.0, run.server.totals()
    refilled, planner = 0, run.planner
    requests = planner.training(iteration)  # 2, 3
    wanted: list[RolloutRequest] = []
    spool = None
    if saving.is_saved(progress.iteration):  # else no start would have these weights again
        spool = run.spool(f"iteration_{iteration}", requests, progress.policy_version)
    while True:
        wanted += requests
        asked = time.monotonic()
        found = await _collect(
            run, requests, _stage("collect", iteration, len(rounds)), spool, stop
        )  # 4 to 6
        if found is None:
            return None
        new = planner.branches(found.rollouts)  # 3; none, but for an estimator that asks for them
        if new:  # what goes wrong with them loses no parent
            _store(run, f"iteration_{iteration}", joined([*rounds, found]), None, measured)
        beside = await _collect(run, new, _stage("branches", iteration, len(rounds)), spool, stop)  # 4 to 6
        if beside is None:
            return None
        collect_s += time.monotonic() - asked
        rounds.append(found)
        branched.append(beside)
        collection, branches = joined(rounds), joined(branched)
        credited, measured = await _credited(
            run, iteration, collection, branches, measured, asked=requests, found=found
        )  # 7 to 10
        await run.collector.ack(run.run_id, [*found.all, *beside.all])
        missing = len(credited.flat) - refilled
        if not missing or len(rounds) > run.job.training.refill_rounds:
            break
        requests = planner.refill(iteration, len(rounds), missing, refilled=refilled)
        refilled += missing
    trajectories = finished_trajectories(collection.rollouts, f"iteration_{iteration}")
    inferred = inference_metrics(before, run.server.totals())
    ended = time.monotonic()
    mixture = rollout_metrics(
        run.job, planner.history, iteration,
        asked=wanted, rollouts=collection.rollouts, credits=credited.credits,
    )  # fmt: skip
    return Gathered(
        collection, branches, trajectories, credited, inferred, refilled, started, collect_s, ended, mixture
    )


async def _credited(
    run: Run, iteration: int, collection: Collection, branches: Collection, known: Measured,
    *, asked: Sequence[RolloutRequest], found: Collection,
) -> tuple[Credited, Measured]:  # fmt: skip
    """Credit the rollouts and store them; stored they are also when they cannot be credited.

    `known` was measured of those of earlier rounds; with that of this one it is given back. `asked` are the
    requests of this round, and `found` what came of them.
    """
    name, measured = f"iteration_{iteration}", known

    def keep(credits: Sequence[Credit] | None) -> None:
        if estimator(run.job.algorithm.advantage).needs_branches:  # so also that none was played
            _store(run, f"branches_{iteration}", branches, None, measured)
        _store(run, name, collection, credits, measured)

    try:
        refuse_silent_policy(run.job, asked, found)  # first: of an iteration that is its own, it is the cause
        refuse_other_sampler(run.job, asked, found)
        refuse_unreadable_policy(run.job, found)
        refuse_empty(collection, name.replace("_", " "))
        measured = await _measured(run, collection, branches, known)  # 7, 8
        credited = credit(run.job, collection.rollouts, measured)  # 7, 9, 10
    except TrainerError:
        keep(None)  # what was wrong with them can be looked at
        raise
    keep(credited.credits)
    return credited, measured


async def _measured(run: Run, collection: Collection, branches: Collection, known: Measured) -> Measured:
    """Stop 8, where the estimator or the rewards of the job need it: of what is not `known`."""
    values, after, scored = dict(known.values), dict(known.after or {}), dict(known.scored)
    if estimator(run.job.algorithm.advantage).needs_values:
        new = [rollout for rollout in collection.rollouts if rollout.rollout_id not in values]
        episodes, views = segments_by_rollout(run.job, new), final_views(run.job, new)
        states = {f"{name}{_AFTER}": [view] for name, view in views.items()}
        scores = await asyncio.to_thread(run.learner.values, episodes | states)
        values |= {name: scores[name] for name in episodes}
        after |= {name: firsts(scores[f"{name}{_AFTER}"])[0] for name in views}
    if run.job.training.kl_reward_coef > 0:
        rollouts = (*collection.rollouts, *branches.rollouts)
        new = [rollout for rollout in rollouts if rollout.rollout_id not in scored]
        found = await asyncio.to_thread(run.learner.score, segments_by_rollout(run.job, new))
        lengths = {item.rollout_id: len(item.trajectory.steps) for item in new if item.trajectory is not None}
        scored |= {name: item.over(lengths[name]) for name, item in found.items()}
    return Measured(values, after, by_parent(branches.rollouts), scored)


async def _learn(run: Run, saving: Saving, progress: Progress, gathered: Gathered) -> Progress:
    """Stops 11 to 13: the update, the new weights served, what it consumed, the row of metrics."""
    iteration = progress.iteration + 1
    started = time.monotonic()
    run.reporter.stage(f"update {iteration}", 0, 1)
    update = await _updated(run, gathered, iteration)  # 8 (log-probs), 11
    updated = time.monotonic()
    steps = int(update["optim/steps"])
    own = by_actor(run.job, gathered.collection.rollouts)
    played = [rollout.trajectory for rollout in own if rollout.trajectory is not None]
    staleness = staleness_metrics(played, progress.policy_version)
    progress = replace(
        progress,
        iteration=iteration,
        policy_version=progress.policy_version + (steps > 0),
        updates=progress.updates + steps,
    )
    if steps:
        await run.server.publish(progress.policy_version)  # 12
    row = {  # 13
        "kind": "iteration",
        "iteration": iteration,
        **gathered_metrics(run.job, gathered, ended=time.monotonic()),
        **update,
        "policy/version": progress.policy_version,
        **staleness,
        "time/update_s": updated - started,
        "time/publish_s": time.monotonic() - updated,
        "time/checkpoint_s": saving.take_seconds(),
        "recovery/resumes": float(run.resumes),
    }
    consumed = tuple(episode.rollout_id for episode in gathered.credited.episodes)
    append_consumed(run.directory.path, Consumed(iteration, progress.policy_version, consumed))
    run.directory.append_metrics(row)
    run.reporter.metrics(row)
    return progress


async def _updated(run: Run, gathered: Gathered, iteration: int) -> dict[str, float]:
    """Metrics of the update. Where every group was flat and is skipped, there is none to make."""
    episodes = gathered.credited.episodes
    if not episodes:
        run.reporter.say(f"iteration {iteration}: every group is flat, so no step is taken")
        return {"optim/steps": 0.0, "optim/steps_skipped": 0.0}
    return await asyncio.to_thread(run.learner.update, episodes, iteration=iteration)


async def _evaluate(run: Run, saving: Saving, progress: Progress, stop: asyncio.Event) -> None:
    """Play the held-out worlds; this checkpoint, saved before, becomes the best if none was better."""
    started = time.monotonic()
    requests = run.planner.evaluation(str(progress.iteration))
    spool = run.spool(f"evaluation_{progress.iteration}", requests, progress.policy_version)
    collection = await _collect(run, requests, f"evaluate {progress.iteration}", spool, stop)
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
    spool.remove()
    saving.mark_best()


async def _collect(
    run: Run, requests: Sequence[RolloutRequest], name: str, spool: Spool | None, stop: asyncio.Event
) -> Collection | None:
    if not requests:
        return Collection(())

    def tell(done: int, total: int) -> None:
        run.reporter.stage(name, done, total)

    return await run.server.while_serving(collected(requests, run.collector, spool, tell, stop))


def _stage(what: str, iteration: int, refills: int) -> str:
    return f"{what} {iteration}" + (f", refill {refills}" if refills else "")


def _store(
    run: Run,
    name: str,
    collection: Collection,
    credits: Sequence[Credit] | None,
    measured: Measured = NOTHING,
) -> None:
    write_rollouts(run.directory.rollouts_file(name), collection.all, credits, measured.scored)
