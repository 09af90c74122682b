"""Holds the parts of a running job, and collects the rollouts of a stage."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shared_schemas.rollouts import RolloutRequest
from trainer_backend.collect.batch import Batch, LossCheck
from trainer_backend.collect.dispatcher import Dispatcher
from trainer_backend.collect.dispatcher import Progress as Tell
from trainer_backend.collect.plan import Planner
from trainer_backend.credit.credit import CreditAssignment
from trainer_backend.parts import InferenceServer, Learner, Progress, Reporter
from trainer_backend.run.checkpointing import Saving
from trainer_backend.run.curriculum import Curriculum
from trainer_backend.run.row_lines import Pace, word_evaluation, word_iteration
from trainer_backend.run.stopping import until
from trainer_backend.run.timeline import Timeline
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.spool import Spool


@dataclass(frozen=True, slots=True)
class Run:
    planner: Planner
    credit: CreditAssignment
    dispatcher: Dispatcher
    server: InferenceServer
    saving: Saving
    """Saves checkpoints; also holds the learner and the run directory."""
    reporter: Reporter
    resumes: int = 0
    """How often the run was continued so far."""
    timeline: Timeline = field(default_factory=Timeline)
    pace: Pace = field(default_factory=Pace)
    curriculum: Curriculum | None = None
    """None if no episode begins at a snapshot of an earlier one."""
    reseedable: bool = False
    """Whether the environment can draw other random numbers after a snapshot; False if never needed."""

    @property
    def learner(self) -> Learner:
        return self.saving.learner

    @property
    def directory(self) -> RunDirectory:
        return self.saving.directory

    @property
    def losses(self) -> LossCheck:
        most, directory = self.planner.table.max_lost_share, self.directory
        return LossCheck(directory.task_app_log, most, self.reporter.say, directory.append_last_stage)

    def planner_of_iteration(self, number: int) -> Planner:
        """Return the planner of an iteration. Its schedule and snapshots may depend on earlier iterations."""
        planner, allocation = self.planner, self.planner.allocation
        if allocation.looks_back:
            planner = replace(planner, allocation=allocation.after(self.directory.metrics()))
        if self.curriculum is not None:
            planner = replace(planner, starts=self.curriculum.starts(number))
        return planner

    def spool(self, stage: str, requests: Sequence[RolloutRequest], versions: range) -> Spool:
        """Open the spool of a stage, with rollouts that answered these requests in an earlier start.

        New rollouts are written once the pending checkpoint is on disk: before that, no later start could use
        them.
        """
        spool = Spool.open(
            self.directory.spool_file(stage), requests,
            versions=versions, gateway_urls=self.server.inference.urls, tell=self.reporter.say,
        )  # fmt: skip
        spool.hold()
        self.saving.once_written(spool.release)
        return spool

    def iteration_spool(
        self, number: int, requests: Sequence[RolloutRequest], progress: Progress
    ) -> Spool | None:
        """Open the spool of an iteration that begins now; None if no later start could use its rollouts.

        A later start can use the rollouts only if there is a checkpoint of the weights that sampled them. If
        `max_staleness` is above 0, it may still be saved while the iteration waits for its update.
        """
        staleness, newest = self.planner.table.max_staleness, progress.policy_version
        if not staleness and not self.saving.will_be_saved(progress.iteration):
            return None
        # Each iteration between `progress` and this one adds at most one version.
        waits = number - 1 - progress.iteration
        return self.spool(
            f"iteration_{number}", requests, range(newest - max(staleness - waits, 0), newest + 1)
        )

    async def collect(
        self,
        name: str,
        requests: Sequence[RolloutRequest],
        *,
        spool: Spool | None,
        stop: asyncio.Event,
        shown: Callable[[], bool] = lambda: True,
    ) -> Batch | None:
        """Collect the rollouts of a stage; None if a stop came first.

        Args:
            shown: returns whether to report progress now, because the run waits for this stage.
        """
        if not requests:
            return Batch(())

        def tell(done: int, total: int) -> None:
            if shown():
                self.reporter.stage(name, done, total)

        rollouts = collected(
            requests, self.dispatcher, spool=spool, tell=tell, stop=stop, resume=self.server.resume
        )
        return await self.server.while_serving(rollouts)

    async def settled(self) -> None:
        """Wait until no background save reads the learner's weights; see `Saving`."""
        with self.timeline.working("learn"):
            await self.saving.settled()

    def record(self, row: dict[str, Any]) -> None:
        """Append the row of an iteration or an evaluation to the metrics, and report it."""
        self.directory.append_metrics(row)
        if row["kind"] == "evaluation":
            line = word_evaluation(row)
        else:
            self.pace.finish(row["iteration"], self.saving.last_iteration)
            line = word_iteration(row, self.pace)
        self.reporter.metrics(row, line)


async def collected(
    requests: Sequence[RolloutRequest],
    dispatcher: Dispatcher,
    *,
    spool: Spool | None,
    tell: Tell,
    stop: asyncio.Event,
    resume: Callable[[], Awaitable[None]] | None = None,
) -> Batch | None:
    """Collect the rollouts for these requests: reuse those in the spool, and request the rest.

    Args:
        spool: stores finished rollouts, so that they survive a kill; None if no later start could use them.
        tell: called with the number of ended rollouts and the total.
        resume: makes the policy available for sampling; None if it already is.

    Returns:
        The rollouts; None if `stop` came first.
    """
    reused = {} if spool is None else spool.rollouts_for(requests)
    rest = [request for request in requests if request.rollout_id not in reused]
    count, keep = len(reused), None if spool is None else spool.keep

    async def collect() -> Batch:
        if resume is not None and rest:
            await resume()
        return await dispatcher.collect(rest, lambda done, total: tell(done + count, total + count), keep)

    batch = await until(stop, collect())
    if batch is None:
        return None
    earlier = tuple(reused.values())
    return Batch(earlier, reused=frozenset(item.rollout_id for item in earlier)).merge(batch)
