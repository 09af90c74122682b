"""The parts of a running job, joined once at its start, and the collection of a stage's rollouts."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shared_schemas.rollouts import RolloutRequest
from trainer_backend.collect.collector import Collection, Collector, Progress
from trainer_backend.collect.plan import Inference, Planner
from trainer_backend.collect.sources import looks_back
from trainer_backend.collect.work import with_reused
from trainer_backend.core.mixture_history import past_of
from trainer_backend.credit.credit import CreditAssignment
from trainer_backend.data.dataset import DataSet
from trainer_backend.job.schema import JobConfig
from trainer_backend.protocols import InferenceServer, Learner, Reporter
from trainer_backend.run.checkpointing import Saving
from trainer_backend.run.stopping import until
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.spool import Spool


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a running job.

    Attributes:
        run_id: names this start of the run at the task apps (start.run_job).
        data: the rows of [data], where the job has that table.
        fixed: by name, where the fixed policies of the job are asked.
        resumes: how often the run was continued so far.
    """

    job: JobConfig
    directory: RunDirectory
    run_id: str
    collector: Collector
    learner: Learner
    server: InferenceServer
    reporter: Reporter
    data: DataSet | None = None
    fixed: Mapping[str, Inference] = field(default_factory=dict)
    resumes: int = 0

    @property
    def credit(self) -> CreditAssignment:
        """How its rollouts are credited."""
        return CreditAssignment.of(self.job)

    def saving(self) -> Saving:
        """Its checkpoints."""
        return Saving(self.job.training, self.job.evaluation, self.directory, self.learner)

    @property
    def planner(self) -> Planner:
        """As things are now: a schedule may look back on the iterations that are over."""
        fixed = [table.name for table in self.job.fixed_policies]
        past = (
            past_of(self.directory.metrics(), fixed)
            if looks_back(self.job.rollout_allocation_schedule)
            else ()
        )
        return Planner(
            self.job, self.run_id, self.server.inference, self.data, fixed=self.fixed, history=past
        )

    def spool(self, stage: str, requests: Sequence[RolloutRequest], policy_version: int) -> Spool:
        """What an earlier start has left of a stage that begins with these, and what comes of it now."""
        return Spool.open(
            self.directory.spool_file(stage), requests,
            policy_version=policy_version, gateway_url=self.server.inference.url, tell=self.reporter.say,
        )  # fmt: skip


async def collected(
    requests: Sequence[RolloutRequest],
    collector: Collector,
    spool: Spool | None,
    tell: Progress,
    stop: asyncio.Event,
) -> Collection | None:
    """Collect a plan's rollouts: the ones that an earlier start spooled, and the rest from the task apps.

    With a spool, a kill loses no finished rollout.

    Args:
        spool: of the stage; None: a later start could not use these rollouts.
        tell: how many rollouts have ended, and of how many.

    Returns:
        None when `stop` came first.
    """
    left = {} if spool is None else spool.rollouts_for(requests)
    rest = [request for request in requests if request.rollout_id not in left]

    def told(done: int, total: int) -> None:
        tell(done + len(left), total + len(left))

    keep = None if spool is None else spool.keep
    found = await until(stop, collector.collect(rest, told, keep))
    return None if found is None else with_reused(found, list(left.values()))
