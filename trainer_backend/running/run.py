"""What a run works with, joined once at its start."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainer_backend.collect.collector import Collector
from trainer_backend.collect.plan import Inference, Planner
from trainer_backend.collect.samplers import looks_back
from trainer_backend.core.mixture_history import past_of
from trainer_backend.data.dataset import DataSet
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.protocols import InferenceServer, Learner, Reporter
from trainer_backend.rundir.layout import RunDirectory


@dataclass(frozen=True, slots=True)
class Run:
    """What a run works with.

    Attributes:
        run_id: names this start of the run at the task apps (start.run_job).
        data: the rows of [data], where the job has that table.
        fixed: by name, where the fixed policies of the job are asked.
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

    @property
    def planner(self) -> Planner:
        """As things are now: a schedule may look back on the iterations that are over."""
        fixed = [table.name for table in self.job.fixed_policies]
        past = past_of(self.directory.metrics(), fixed) if looks_back(self.job) else ()
        return Planner(
            self.job, self.run_id, self.server.inference, self.data, fixed=self.fixed, history=past
        )
