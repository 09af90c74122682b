"""A training run, read top to bottom. Numbers in comments are the stops of docs/route.md.

No torch here: the learner and the inference server are behind protocols.
"""

import asyncio
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from service_kit.tasks import end_tasks
from shared_schemas.rollouts import Rollout, RolloutRequest
from trainer_backend.collect.batch import Batch
from trainer_backend.collect.metrics import batch_metrics, evaluation_metrics
from trainer_backend.collect.plan import digest_tasks, retried
from trainer_backend.core.advantages.branch import by_parent
from trainer_backend.core.critic import firsts
from trainer_backend.core.statistics import staleness_metrics
from trainer_backend.credit.credit import NOTHING, Credited, Measured
from trainer_backend.errors import (
    CreditError,
    LearnerLost,
    SamplerMismatch,
    TrainerError,
    UpdateStopped,
    rejected_rollouts,
)
from trainer_backend.evaluation.best import TASKS_DIGEST
from trainer_backend.parts import Progress
from trainer_backend.run.curriculum import without_past
from trainer_backend.run.forks import plan_forks
from trainer_backend.run.iteration_metrics import (
    IterationResult,
    Moment,
    has_signal,
    iteration_metrics,
    loses_calls,
    metrics_by_policy,
    moment,
    nothing_to_learn,
    refuse_round,
    steps_too_far,
    warn_of_far_steps,
    warn_of_lost_calls,
)
from trainer_backend.run.run import Run
from trainer_backend.run.stopping import until
from trainer_backend.run.timeline import Span
from trainer_backend.rundir.rollout_files import Credit, write_rollouts
from trainer_backend.rundir.spool import LedgerEntry, append_rejected, append_to_ledger, plan_id

__all__ = ["Run", "train", "work_left"]

# Suffix of an episode's id for the state in which a limit ended it, which the learner values too. No rollout
# id contains a space.
_AFTER = " after"
# The names of stages in a report of losses.
_NAMES = {
    "collect": "iteration",
    "again": "rejected rollouts of iteration",
    "branches": "branches of iteration",
}


async def train(
    run: Run, progress: Progress, stop: asyncio.Event, served: Callable[[], None] = lambda: None
) -> Progress:
    """Iterate until the job is done or `stop` is set; return the state of the last finished iteration.

    A stop takes effect between stages, while rollouts are collected and while weights are published, but not
    during an update. So the saved state is always the end of an iteration, also after errors of rollouts and
    updates.

    Args:
        served: is called once the policy and the fixed ones are served.
    """
    saving, ahead = run.saving, Ahead(run, stop)
    await until(stop, run.server.publish(progress.policy_version))
    if not stop.is_set():
        served()
    saving.mark_best()  # the process may have been killed between an evaluation and this
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
                if not isinstance(error, LearnerLost):  # its weights are lost too
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
            gc.collect()  # nothing else searches old objects while batches grow (garbage.py)
    finally:
        await ahead.end()
        if (failure := await saving.end()) is not None:
            run.reporter.say(f"the last checkpoint is not written: {failure}")


def work_left(run: Run, progress: Progress) -> bool:
    """Whether a resumed run would have anything to do."""
    return progress.iteration < run.saving.last_iteration or run.saving.evaluation_due(progress)


class Ahead:
    """The iterations whose rollouts are requested: the next one, and up to `max_staleness` beyond it.

    Iteration k may begin once the weights that iteration k - max_staleness starts with are served. Then none
    of its tokens is older than these at its update, whatever is published meanwhile. Iterations are learned
    from in order, each from exactly its plan.

    Source: DESIGN.md section 8.
    """

    def __init__(self, run: Run, stop: asyncio.Event) -> None:
        self.run, self.stop = run, stop
        self.last_row = Moment(0.0, {})  # of the last finished iteration
        self._iterations: dict[int, Iteration] = {}

    def begin_early(self, progress: Progress) -> None:
        """Begin the iterations that may be collected while the learner works; none with `max_staleness` 0."""
        staleness, following = self.run.planner.table.max_staleness, progress.iteration + 1
        if staleness and not self.stop.is_set():
            last = min(following + staleness, self.run.saving.last_iteration)
            for number in range(following, last + 1):
                self._begin(number, progress)

    def take(self, progress: Progress) -> "Iteration":
        """Return the next iteration, and begin it unless it has begun."""
        self._begin(progress.iteration + 1, progress)
        return self._iterations.pop(progress.iteration + 1)

    async def end(self) -> None:
        """Cancel the iterations that will not be learned from."""
        iterations, self._iterations = self._iterations, {}
        for iteration in iterations.values():
            await iteration.cancel()

    def _begin(self, number: int, progress: Progress) -> None:
        if number not in self._iterations:
            self._iterations[number] = Iteration(self.run, number, progress, self.stop)


class Iteration:
    """Stops 2 to 10 of an iteration: it collects, credits and stores one round of rollouts at a time.

    A round is stored before the task apps delete it and before the next round is requested. The first round
    is requested at once; later ones, and branches, when `add_round` is called.

    Args:
        progress: of the run when the iteration begins.
    """

    def __init__(self, run: Run, number: int, progress: Progress, stop: asyncio.Event) -> None:
        self._run, self._stop, self.number = run, stop, number
        self._name = f"iteration_{number}"
        self._planner = run.planner_of_iteration(number)
        self._requests = self._planner.training(number)  # 2, 3
        self._all_requests: list[RolloutRequest] = []
        self._spool = run.iteration_spool(number, self._requests, progress)
        self._rounds: list[Batch] = []
        self._branches: list[Batch] = []
        self._measured, self._credited = NOTHING, Credited([], [], {}, [])
        self._refilled = 0
        self._start = Moment(0.0, {})
        self._collect_spans: list[Span] = []
        self._credit_spans: list[Span] = []
        self._is_awaited = False
        # Rollouts that are planned once more because credit or update rejected them.
        self._again: list[RolloutRequest] = []
        self._forks: dict[str, RolloutRequest] = {}  # by plan id: trained rollouts that start at a fork
        self._forks_again: list[RolloutRequest] = []
        self._unforked: list[Rollout] = []
        self._has_rejected = False
        self._first: asyncio.Task[Batch | None] | None = asyncio.ensure_future(self._first_round())

    @property
    def is_complete(self) -> bool:
        """Whether it has a round and needs no other one in place of flat groups or rejected rollouts."""
        most = self._planner.table.refill_rounds
        again = self._again or self._forks_again
        return bool(self._rounds) and not again and (not self._missing or len(self._rounds) > most)

    @property
    def _missing(self) -> int:
        return len(self._credited.flat) - self._refilled

    async def add_round(self) -> bool:
        """Collect the next round, credit all rounds, and store them; return False if a stop came first."""
        run, self._is_awaited = self._run, True
        is_again = bool(self._again or self._forks_again)
        batch = await run.saving.while_written(self._next_round())  # 4 to 6
        await run.settled()  # before the learner is called, and before anything of this iteration is stored
        if batch is None:
            return False
        if is_again:
            self._rounds[-1] = self._rounds[-1].merge(batch)
        else:
            self._rounds.append(batch)
        branches = Batch(())
        try:
            found = await self._play_on(batch)  # 3 to 6
            if found is None:
                return False
            self._branches.append(branches := found)
            await self._release()
            with run.timeline.working("learn") as span:
                self._credit_spans.append(span)
                await self._credit_and_store()  # 7 to 10
        except CreditError as error:
            if not self.reject(error):
                raise
        await run.dispatcher.ack(self._planner.run_id, [*batch.all, *branches.all])
        return True

    async def _release(self) -> None:
        """Free the server's memory for the learner unless later iterations are being collected."""
        if not self._planner.table.max_staleness:
            await self._run.server.release()

    async def _play_on(self, batch: Batch) -> Batch | None:
        """Collect rollouts that start at decisions of a round; return None if a stop came first.

        They measure these decisions or are trained. Their parents are stored first, so that an error does not
        lose them.
        """
        requests = self._planner.branches(batch.rollouts)  # none unless the estimator needs them
        if requests or self._planner.fork_rule is not None:
            self._store(self._name, Batch.join(self._rounds))
        if self._planner.fork_rule is not None:
            self._unforked += batch.rollouts
            forks = await until(self._stop, self._plan_forks())
            if forks is None:
                return None
            requests, self._forks_again = [*forks, *self._forks_again], []
        return await self._collect("branches", requests)

    async def _plan_forks(self) -> list[RolloutRequest]:
        """Plan the trained rollouts that start at forks of new ones; first measure what the rule reads."""
        rule = self._planner.fork_rule
        if rule is not None and rule.needs_values:
            await self._release()
            with self._run.timeline.working("learn"):
                self._measured = await self._measure(Batch.join(self._rounds), Batch.join(self._branches))
        with self._run.timeline.working("collect") as span:
            forks = await plan_forks(self._run, self._planner, self._unforked, self._measured)
        self._collect_spans.append(span)
        self._unforked = []
        self._forks |= {plan_id(request.rollout_id): request for request in forks}
        return forks

    def reject(self, error: TrainerError, *, goes_on: bool = True) -> bool:
        """Set aside the rollouts that credit or update rejects; return whether they are planned once more.

        They leave the spool, so that a resumed run requests them again too.

        Args:
            goes_on: whether the run can learn from other rollouts after this error.
        """
        run, name = self._run, f"iteration_{self.number}"
        ids: dict[str, TrainerError] = {}
        if isinstance(error, CreditError):
            both = [*self._rounds, *(self._branches if self._planner.fork_rule else ())]
            ids |= run.credit.find_rejected(Batch.join(both).rollouts, self._measured)
        ids |= dict.fromkeys(rejected_rollouts(error), error)
        parts = (*self._rounds, *self._branches)
        if self._planner.fork_rule is not None:  # forks of a rollout are set aside with it
            after = ((item, item.trajectory) for part in self._branches for item in part.rollouts)
            ids |= {
                item.rollout_id: ids[episode.parent_rollout_id]
                for item, episode in after
                if episode is not None and episode.parent_rollout_id in ids
            }
        rollouts = [item for part in parts for item in part.rollouts if item.rollout_id in ids]
        if not rollouts:
            return False
        path = run.directory.rejected_file(name)
        for item in rollouts:
            append_rejected(path, item, str(ids[item.rollout_id]))
        if self._spool is not None:
            self._spool.reject(rollouts)
        self._rounds = [part.without(ids) for part in self._rounds]
        self._branches = [part.without(ids) for part in self._branches]
        self._unforked = [rollout for rollout in self._unforked if rollout.rollout_id not in ids]
        # A branch cannot be planned without its parent, nor a parent without its branches.
        plans_again = goes_on and not self._has_rejected and not run.credit.estimator.needs_branches
        run.reporter.say(
            f"iteration {self.number}: {len(rollouts)} rollouts cannot be learned from and are set aside in "
            f"{path.name}; they are planned once more {'now' if plans_again else 'by a resumed run'}: {error}"
        )
        if plans_again:
            self._has_rejected = True
            planned = {plan_id(request.rollout_id): request for request in self._all_requests}
            self._again, self._forks_again = (
                [
                    retried(requests[name].model_copy(update={"attempt": item.attempt}))
                    for item in rollouts
                    if (name := plan_id(item.rollout_id)) in requests
                    # A parent that is played again gets new forks.
                    and requests[name].start.parent_rollout_id not in ids
                ]
                for requests in (planned, self._forks)
            )
        return plans_again

    async def cancel(self) -> None:
        """Cancel its first round; nothing reads its errors."""
        if self._first is not None:
            await end_tasks(self._first)

    def result(self) -> IterationResult:
        """Join all rounds."""
        batch, credits = Batch.join(self._rounds), self._credited.credits
        schedule = self._planner.allocation.schedule
        alpha = None if schedule is None else schedule.alpha_at(self.number)
        policies, requests = self._run.credit.policies, self._all_requests
        return IterationResult(
            batch=batch,
            branches=Batch.join(self._branches),
            credited=self._credited,
            start=self._start,
            collect_spans=self._collect_spans,
            credit_spans=self._credit_spans,
            mixture=metrics_by_policy(policies, requests, batch.rollouts, credits, alpha=alpha),
            refilled=self._refilled,
            requests=self._all_requests,
        )

    async def _next_round(self) -> Batch | None:
        """Wait for the first round, or request another one in place of flat groups."""
        if self._first is not None:
            first, self._first = self._first, None
            return await first
        if self._again:
            again, self._again = self._again, []
            return await self._collect("again", again)
        missing = self._missing
        self._requests = self._planner.refill(
            self.number, len(self._rounds), missing, refilled=self._refilled
        )
        self._refilled += missing
        return await self._collect("collect", self._requests)

    async def _first_round(self) -> Batch | None:
        self._start = await moment(self._run.server)
        return await self._collect("collect", self._requests)

    async def _collect(self, what: str, requests: Sequence[RolloutRequest]) -> Batch | None:
        if not requests:
            return Batch(())
        if what == "collect":
            self._all_requests += requests
        # Branches belong to the last round.
        refills = 0 if what == "again" else len(self._rounds) - (what == "branches")
        stage = _stage(what, self.number, refills)
        with self._run.timeline.working("collect") as span:
            batch = await self._run.collect(
                stage, requests, spool=self._spool, stop=self._stop, shown=lambda: self._is_awaited
            )
        self._collect_spans.append(span)
        if batch is not None and what != "branches":  # whose outcomes are compared with their parents'
            batch = replace(batch, rollouts=tuple(map(without_past, batch.rollouts)))
        if batch is not None:
            self._run.losses.report(batch, _stage(_NAMES[what], self.number, refills))
        return batch

    async def _credit_and_store(self) -> None:
        """Credit and store rollouts, also those that cannot be credited, for inspection."""
        batch, branches = Batch.join(self._rounds), Batch.join(self._branches)
        run, credit = self._run, self._run.credit

        def store(credited: Credited | None) -> None:
            if credit.has_branches:  # even if there are none: an empty file says so
                of_forks = {} if credited is None else credited.fork_credits
                credits = [of_forks[item.rollout_id] for item in branches.rollouts] if of_forks else None
                self._store(f"branches_{self.number}", branches, credits)
            self._store(self._name, batch, None if credited is None else credited.credits)

        try:
            # First: if a fixed policy plays the whole iteration, that explains an empty batch.
            refuse_round(credit.policies, self._all_requests, self._rounds[-1])
            run.losses.refuse(batch, f"iteration {self.number}", self.number)
            if branches.all:
                run.losses.refuse(branches, f"branches of iteration {self.number}", self.number)
            self._measured = await self._measure(batch, branches)  # 7, 8
            self._credited = credit.credit(batch.rollouts, self._measured)  # 7, 9, 10
        except TrainerError:
            store(None)
            raise
        store(self._credited)

    def _store(self, name: str, batch: Batch, credits: Sequence[Credit] | None = None) -> None:
        path = self._run.directory.rollouts_file(name)
        write_rollouts(path, batch.all, credits, self._measured.scored)

    async def _measure(self, batch: Batch, branches: Batch) -> Measured:
        """Stop 8 of the route: measure new rollouts, if the job's estimator or rewards need it."""
        earlier, credit, learner = self._measured, self._run.credit, self._run.learner
        values, after, scored = dict(earlier.values), dict(earlier.after or {}), dict(earlier.scored)
        if credit.estimator.needs_values:
            trained = (*batch.rollouts, *(branches.rollouts if credit.algorithm.train_branches else ()))
            new = [rollout for rollout in trained if rollout.rollout_id not in values]
            episodes, views = credit.segments(new), credit.final_views(new)
            states = {f"{name}{_AFTER}": [view] for name, view in views.items()}
            scores = await asyncio.to_thread(learner.values, episodes | states)
            values |= {name: scores[name] for name in episodes}
            after |= {name: firsts(scores[f"{name}{_AFTER}"])[0] for name in views}
        if credit.rewards.pays_kl:
            rollouts = (*batch.rollouts, *branches.rollouts)
            new = [rollout for rollout in rollouts if rollout.rollout_id not in scored]
            tokens = await asyncio.to_thread(learner.score, credit.segments(new))
            lengths = {
                item.rollout_id: len(item.trajectory.steps) for item in new if item.trajectory is not None
            }
            scored |= {name: item.over(lengths[name]) for name, item in tokens.items()}
        return Measured(values, after, by_parent(branches.rollouts), scored)


async def _play(iteration: Iteration) -> IterationResult | None:
    """Stops 2 to 10; None where a stop came first."""
    while not iteration.is_complete:
        if not await iteration.add_round():
            return None
    return iteration.result()


async def _learn_or_reject(
    ahead: Ahead, progress: Progress, iteration: Iteration, result: IterationResult
) -> Progress | None:
    """As `_learn`, but replace rollouts that the update rejects; return None at a stop."""
    run = ahead.run
    try:
        return await _learn(ahead, progress, result)
    except (CreditError, UpdateStopped) as error:
        is_whole = not getattr(error, "steps_taken", 0)  # else the weights lie within an iteration
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
    """Stops 11 to 13: update, serve the new weights, record the consumed rollouts and the metrics."""
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
    # Iterations that are collected at the same time each report what happened since the previous row.
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
    _warn_if_nothing_is_learned(run, row)
    if error is not None:  # the update is done, and a resumed run begins by publishing it
        await _save_last(run, progress)
        raise error
    return progress


async def _keep_starts(run: Run, iteration: int, result: IterationResult) -> dict[str, float]:
    """Keep the snapshots that later iterations may start at, if the job has [curriculum]."""
    if run.curriculum is None:
        return {}
    return await run.curriculum.keep(iteration, result.requests, result.batch.rollouts)


def _warn_if_nothing_is_learned(run: Run, row: Mapping[str, Any]) -> None:
    compares_siblings = run.credit.estimator.compares_siblings
    is_well = has_signal(row, compares_siblings=compares_siblings) and not loses_calls(row)
    if is_well and not steps_too_far(row):
        return  # without reading the file of all rows
    rows = [earlier for earlier in run.directory.metrics() if earlier["kind"] == "iteration"]
    unlearned = nothing_to_learn(rows, compares_siblings=compares_siblings)
    for warning in filter(None, (unlearned, warn_of_lost_calls(rows), warn_of_far_steps(rows))):
        run.reporter.say(warning)


def _staleness(run: Run, progress: Progress, result: IterationResult) -> dict[str, float]:
    """Measure how old the iteration's tokens are; SamplerMismatch if one is older than `max_staleness`."""
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
    """Publish the new weights unless a stop comes first; return the error if no server loads them."""
    try:
        await until(ahead.stop, ahead.run.server.publish(progress.policy_version))
    except TrainerError as error:
        if isinstance(error, LearnerLost):
            raise
        return error
    return None


async def _update(run: Run, result: IterationResult, progress: Progress) -> dict[str, float]:
    """Update the policy and return its metrics; report it if it takes no step."""
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
    """Save, and wait until everything is written."""
    await run.saving.save(progress)
    await run.settled()


async def _evaluate(run: Run, progress: Progress, stop: asyncio.Event) -> None:
    """Play the held-out worlds, and mark the checkpoint as the best if no earlier one scored higher."""
    started = time.monotonic()
    requests = run.planner.evaluation(str(progress.iteration))
    name = f"evaluation_{progress.iteration}"
    spool = run.spool(name, requests, range(progress.policy_version, progress.policy_version + 1))
    with run.timeline.working("collect") as span:
        collecting = run.collect(f"evaluate {progress.iteration}", requests, spool=spool, stop=stop)
        batch = await run.saving.while_written(collecting)
    await run.settled()  # a row of an evaluation comes after its checkpoint
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


def _stage(what: str, iteration: int, refills: int) -> str:
    return f"{what} {iteration}" + (f", refill {refills}" if refills else "")
