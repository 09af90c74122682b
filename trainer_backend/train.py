"""A training run, read top to bottom. Numbers in comments are the stops of docs/route.md.

No torch here: the learner and the inference server are behind protocols.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from shared_schemas.rollouts import RolloutRequest
from trainer_backend.collect.collector import Collection, join_rounds
from trainer_backend.collect.metrics import (
    collection_metrics,
    evaluation_metrics,
    refuse_empty,
)
from trainer_backend.core.advantages.branch import by_parent
from trainer_backend.core.critic import firsts
from trainer_backend.core.statistics import staleness_metrics
from trainer_backend.credit.credit import NOTHING, Credited, Measured
from trainer_backend.errors import TrainerError, UpdateStopped
from trainer_backend.protocols import Progress
from trainer_backend.run.iteration_metrics import (
    IterationResult,
    IterationTimes,
    inference_metrics,
    refuse_round,
)
from trainer_backend.run.run import Run
from trainer_backend.rundir.rollout_files import Credit, write_rollouts
from trainer_backend.rundir.spool import LedgerEntry, append_to_ledger

__all__ = ["Run", "train", "work_left"]

# Beside an episode the learner values the state that a limit left it in. No rollout id holds a space.
_AFTER = " after"


async def train(run: Run, progress: Progress, stop: asyncio.Event) -> Progress:
    """Iterate until the job is done or `stop` is set; return the state of the last finished iteration.

    A stop is heeded between stages and while rollouts are collected, never in the middle of an update,
    so what is saved is always the end of an iteration. That holds for errors of rollouts and updates too.
    """
    saving = run.saving
    await run.server.publish(progress.policy_version)
    saving.mark_best()  # a kill may have come between an evaluation and this
    while True:
        if saving.due(progress.iteration):
            await saving.save(progress)
        try:
            if saving.evaluation_due(progress):
                await _evaluate(run, progress, stop)
            ends = progress.iteration >= saving.last_iteration or stop.is_set()
            result = None if ends else await _play(run, progress, stop)
        except TrainerError:
            await saving.save(progress)
            raise
        if result is None:
            await saving.save(progress)
            return progress
        try:
            progress = await _learn(run, progress, result)
        except UpdateStopped as error:
            if not error.steps_taken:  # else the weights are those of no iteration's end
                await saving.save(progress)
            raise


def work_left(run: Run, progress: Progress) -> bool:
    """Whether a resumed run would have something to do."""
    return progress.iteration < run.saving.last_iteration or run.saving.evaluation_due(progress)


class Iteration:
    """Stops 2 to 10 of an iteration, a round of rollouts at a time: collected, credited, stored.

    A round is stored before the task apps forget it and before another round is asked for.

    Args:
        progress: where the iteration begins.
        resumable: whether the weights of now are saved, so that a later start could use these rollouts.
    """

    def __init__(self, run: Run, progress: Progress, *, resumable: bool) -> None:
        self._run, self._started = run, time.monotonic()
        self.number = progress.iteration + 1
        self._name = f"iteration_{self.number}"
        self._totals, self._planner = run.server.totals(), run.current_planner()
        self._requests = self._planner.training(self.number)  # 2, 3
        self._all_requests: list[RolloutRequest] = []
        self._spool = run.spool(self._name, self._requests, progress.policy_version) if resumable else None
        self._rounds: list[Collection] = []
        self._branches: list[Collection] = []
        self._measured, self._credited = NOTHING, Credited([], [], {}, [])
        self._refilled, self._collect_s = 0, 0.0

    @property
    def is_complete(self) -> bool:
        """Whether it has a round, and asks for no other one in place of flat groups."""
        most = self._planner.table.refill_rounds
        return bool(self._rounds) and (not self._missing or len(self._rounds) > most)

    @property
    def _missing(self) -> int:
        return len(self._credited.flat) - self._refilled

    async def add_round(self, stop: asyncio.Event) -> bool:
        """Collect the next round, credit all rounds anew, and store them; False where a stop came first."""
        run, refills = self._run, len(self._rounds)
        if refills:
            missing = self._missing
            self._requests = self._planner.refill(self.number, refills, missing, refilled=self._refilled)
            self._refilled += missing
        self._all_requests += self._requests
        began, stage = time.monotonic(), _stage("collect", self.number, refills)
        collection = await run.collect(stage, self._requests, spool=self._spool, stop=stop)  # 4 to 6
        if collection is None:
            return False
        new = self._planner.branches(collection.rollouts)  # 3; none, but for an estimator that needs them
        if new:  # their parents are stored first, lest an error loses them
            self._store(self._name, join_rounds([*self._rounds, collection]))
        stage = _stage("branches", self.number, refills)
        branches = await run.collect(stage, new, spool=self._spool, stop=stop)  # 4 to 6
        if branches is None:
            return False
        self._collect_s += time.monotonic() - began
        self._rounds.append(collection)
        self._branches.append(branches)
        await self._credit_and_store(collection)  # 7 to 10
        await run.ack([*collection.all, *branches.all])
        return True

    def result(self) -> IterationResult:
        """All rounds together."""
        collection, credits = join_rounds(self._rounds), self._credited.credits
        inference = inference_metrics(self._totals, self._run.server.totals())
        times = IterationTimes(self._started, time.monotonic(), self._collect_s)
        schedule = self._planner.allocation.schedule
        alpha = None if schedule is None else schedule.alpha_at(self.number)
        metrics = self._run.metrics
        return IterationResult(
            collection=collection,
            branches=join_rounds(self._branches),
            credited=self._credited,
            times=times,
            inference=inference,
            mixture=metrics.by_policy(self._all_requests, collection.rollouts, credits, alpha=alpha),
            refilled=self._refilled,
        )

    async def _credit_and_store(self, newest: Collection) -> None:
        """Credit and store rollouts; those that cannot be credited are stored too, for inspection."""
        collection, branches = join_rounds(self._rounds), join_rounds(self._branches)
        credit = self._run.credit

        def store(credits: Sequence[Credit] | None) -> None:
            if credit.estimator.needs_branches:  # an empty file too: it says that there was none
                self._store(f"branches_{self.number}", branches)
            self._store(self._name, collection, credits)

        try:
            # First: where a fixed policy plays the whole iteration, it is why the collection is empty.
            refuse_round(credit.policies, self._requests, newest)
            refuse_empty(collection, self._name.replace("_", " "))
            self._measured = await self._measure(collection, branches)  # 7, 8
            self._credited = credit.credit(collection.rollouts, self._measured)  # 7, 9, 10
        except TrainerError:
            store(None)
            raise
        store(self._credited.credits)

    def _store(self, name: str, collection: Collection, credits: Sequence[Credit] | None = None) -> None:
        path = self._run.directory.rollouts_file(name)
        write_rollouts(path, collection.all, credits, self._measured.scored)

    async def _measure(self, collection: Collection, branches: Collection) -> Measured:
        """Stop 8 of the route: measure new rollouts, if the job's estimator or rewards need it."""
        earlier, credit, learner = self._measured, self._run.credit, self._run.learner
        values, after, scored = dict(earlier.values), dict(earlier.after or {}), dict(earlier.scored)
        if credit.estimator.needs_values:
            new = [rollout for rollout in collection.rollouts if rollout.rollout_id not in values]
            episodes, views = credit.segments(new), credit.final_views(new)
            states = {f"{name}{_AFTER}": [view] for name, view in views.items()}
            scores = await asyncio.to_thread(learner.values, episodes | states)
            values |= {name: scores[name] for name in episodes}
            after |= {name: firsts(scores[f"{name}{_AFTER}"])[0] for name in views}
        if credit.rewards.pays_kl:
            rollouts = (*collection.rollouts, *branches.rollouts)
            new = [rollout for rollout in rollouts if rollout.rollout_id not in scored]
            tokens = await asyncio.to_thread(learner.score, credit.segments(new))
            lengths = {
                item.rollout_id: len(item.trajectory.steps) for item in new if item.trajectory is not None
            }
            scored |= {name: item.over(lengths[name]) for name, item in tokens.items()}
        return Measured(values, after, by_parent(branches.rollouts), scored)


async def _play(run: Run, progress: Progress, stop: asyncio.Event) -> IterationResult | None:
    """Stops 2 to 10; None where a stop came first."""
    iteration = Iteration(run, progress, resumable=run.saving.is_saved(progress.iteration))
    while not iteration.is_complete:
        if not await iteration.add_round(stop):
            return None
    return iteration.result()


async def _learn(run: Run, progress: Progress, result: IterationResult) -> Progress:
    """Stops 11 to 13: update, serve the new weights, write down the consumed rollouts and the metrics."""
    iteration = progress.iteration + 1
    started = time.monotonic()
    run.reporter.stage(f"update {iteration}", 0, 1)
    update = await _update(run, result, iteration)  # 8 (log-probs), 11
    updated = time.monotonic()
    steps = int(update["optim/steps"])
    own = run.credit.policies.by_actor(result.collection.rollouts)
    played = [rollout.trajectory for rollout in own if rollout.trajectory is not None]
    staleness = staleness_metrics(played, progress.policy_version)
    progress = replace(
        progress,
        iteration=iteration,
        policy_version=progress.policy_version + (steps > 0),
        updates=progress.updates + steps,
    )
    unserved = await _publish(run, progress) if steps else None  # 12
    row = {  # 13
        "kind": "iteration",
        "iteration": iteration,
        **run.metrics.row(result, ended=time.monotonic()),
        **update,
        "policy/version": progress.policy_version,
        **staleness,
        "time/update_s": updated - started,
        "time/publish_s": time.monotonic() - updated,
        "time/checkpoint_s": run.saving.take_seconds(),
        "recovery/resumes": float(run.resumes),
    }
    consumed = tuple(episode.rollout_id for episode in result.credited.episodes)
    append_to_ledger(run.directory.path, LedgerEntry(iteration, progress.policy_version, consumed))
    run.record(row)
    if unserved is not None:  # the update is done, and a resumed run begins with this publish
        await run.saving.save(progress)
        raise unserved
    return progress


async def _publish(run: Run, progress: Progress) -> TrainerError | None:
    """Have the new weights served; return the error where nobody serves them."""
    try:
        await run.server.publish(progress.policy_version)
    except TrainerError as error:
        return error
    return None


async def _update(run: Run, result: IterationResult, iteration: int) -> dict[str, float]:
    """Update the policy and return its metrics; if all groups are flat and skipped, there is no update."""
    episodes = result.credited.episodes
    if not episodes:
        run.reporter.say(f"iteration {iteration}: every group is flat, so no step is taken")
        return {"optim/steps": 0.0, "optim/steps_skipped": 0.0}
    return await asyncio.to_thread(run.learner.update, episodes, iteration=iteration)


async def _evaluate(run: Run, progress: Progress, stop: asyncio.Event) -> None:
    """Play the held-out worlds, and mark the checkpoint as the best if no earlier one scored higher."""
    started = time.monotonic()
    requests = run.planner.evaluation(str(progress.iteration))
    name = f"evaluation_{progress.iteration}"
    spool = run.spool(name, requests, progress.policy_version)
    collection = await run.collect(f"evaluate {progress.iteration}", requests, spool=spool, stop=stop)
    if collection is None:
        return
    write_rollouts(run.directory.rollouts_file(name), collection.all)
    refuse_empty(collection, f"evaluation after iteration {progress.iteration}")
    await run.ack(collection.all)
    row = {
        "kind": "evaluation",
        "iteration": progress.iteration,
        **evaluation_metrics(collection.rollouts),
        **collection_metrics(collection),
        "time/evaluate_s": time.monotonic() - started,
    }
    run.record(row)
    spool.remove()
    run.saving.mark_best()


def _stage(what: str, iteration: int, refills: int) -> str:
    return f"{what} {iteration}" + (f", refill {refills}" if refills else "")
