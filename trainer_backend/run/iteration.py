"""Collects and credits the rollouts of one iteration of a run, up to its update.

Numbers in comments are the stops of docs/route.md. This module does not import torch.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from service_kit.tasks import end_tasks
from shared_schemas.rollouts import Rollout, RolloutRequest
from trainer_backend.collect.batch import Batch
from trainer_backend.collect.plan import retried
from trainer_backend.core.advantages.branch import by_parent
from trainer_backend.core.critic import firsts
from trainer_backend.credit.credit import NOTHING, Credited, Measured
from trainer_backend.errors import CreditError, TrainerError, rejected_rollouts
from trainer_backend.parts import Progress
from trainer_backend.run.curriculum import without_past
from trainer_backend.run.forks import plan_forks
from trainer_backend.run.iteration_metrics import IterationResult, Moment, metrics_by_policy, moment
from trainer_backend.run.round_checks import refuse_round
from trainer_backend.run.run import Run
from trainer_backend.run.stopping import until
from trainer_backend.run.timeline import Span
from trainer_backend.rundir.rollout_files import Credit, write_rollouts
from trainer_backend.rundir.spool import append_rejected, plan_id

# The learner also computes the value of the state in which a limit ended an episode. It does so under the
# episode's id with this suffix; no rollout id contains a space.
_AFTER = " after"
# Names of the stages in reports of lost rollouts.
_NAMES = {
    "collect": "iteration",
    "again": "rejected rollouts of iteration",
    "branches": "branches of iteration",
}


class Iteration:
    """Collects, credits and stores an iteration's rollouts, one round at a time (stops 2 to 10 of the route).

    A round is a set of rollouts that are requested together. Each round is stored before task apps delete its
    rollouts and before the next round is requested. The constructor requests the first round; `add_round`
    requests branches and later rounds.

    Args:
        progress: the run's progress when the iteration begins.
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
        # Requests of rollouts that are planned once more because credit or update rejected them.
        self._again: list[RolloutRequest] = []
        self._forks: dict[str, RolloutRequest] = {}  # by plan id: training rollouts that start at a fork
        self._forks_again: list[RolloutRequest] = []
        self._unforked: list[Rollout] = []
        self._has_rejected = False
        self._first: asyncio.Task[Batch | None] | None = asyncio.ensure_future(self._first_round())

    @property
    def is_complete(self) -> bool:
        """Whether a round has been collected, and no flat group or rejected rollout is left to replace."""
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
        """Free the memory that server and learner share, unless later iterations are collected already."""
        if not self._planner.table.max_staleness:
            await self._run.server.release()

    async def _play_on(self, batch: Batch) -> Batch | None:
        """Collect branches: rollouts that start at decisions of a round. Return None if a stop came first.

        The branches measure the decisions or, as forks, are trained on. The round is stored first, so that
        an error does not lose it.
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
        """Plan rollouts for training that start at decisions of the newly collected rollouts.

        If the fork rule reads the critic's values, compute them first.
        """
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
        """Remove the rollouts that caused the error; return whether this run requests them once more.

        The rollouts are written to the file of rejected rollouts. They are deleted from the spool, so a
        resumed run requests them again.

        Args:
            goes_on: whether the run can continue with other rollouts after this error.
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
        """Cancel the first round and ignore its errors."""
        if self._first is not None:
            await end_tasks(self._first)

    def result(self) -> IterationResult:
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
        """Collect the first round, or rollouts that replace rejected rollouts or flat groups."""
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
        if batch is not None and what != "branches":  # a branch is compared with its whole parent
            batch = replace(batch, rollouts=tuple(map(without_past, batch.rollouts)))
        if batch is not None:
            self._run.losses.report(batch, _stage(_NAMES[what], self.number, refills))
        return batch

    async def _credit_and_store(self) -> None:
        """Credit and store all rollouts. If credit fails, store them without it, for users to inspect."""
        batch, branches = Batch.join(self._rounds), Batch.join(self._branches)
        run, credit = self._run, self._run.credit

        def store(credited: Credited | None) -> None:
            if credit.has_branches:  # also for zero branches: the empty file shows that
                of_forks = {} if credited is None else credited.fork_credits
                credits = [of_forks[item.rollout_id] for item in branches.rollouts] if of_forks else None
                self._store(f"branches_{self.number}", branches, credits)
            self._store(self._name, batch, None if credited is None else credited.credits)

        try:
            # First: if a fixed policy plays the whole iteration and fails, the batch is empty.
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
        """Compute those values and token log-probs of new rollouts that credit needs (stop 8)."""
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


def _stage(what: str, iteration: int, refills: int) -> str:
    return f"{what} {iteration}" + (f", refill {refills}" if refills else "")
