"""The tables and objects that a learner reads of a job."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from trainer_backend.core.critic import ValueLevel
from trainer_backend.core.objective import Objective
from trainer_backend.job.addresses import http_parts
from trainer_backend.job.rollout_table import WarmupTable
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import InferenceTable, LearnerTable, ModelTable
from trainer_backend.job.training_table import LoraTable, TrainingTable
from trainer_backend.learner.behaviour import objectives_of
from trainer_backend.plugins import estimator


@dataclass(frozen=True, slots=True)
class UpdateConfig:
    """How an iteration updates the policy.

    Attributes:
        objectives: by policy, for its samples; the actor's comes first.
        value_level: where a critic's values are read; None without a critic.
        planned_tokens: `training.aggregation = "constant"` divides by them.
        seed: of the job.
    """

    training: TrainingTable
    objectives: Mapping[str, Objective]
    value_level: ValueLevel | None
    planned_tokens: int
    seed: int

    @property
    def has_own_critic(self) -> bool:
        """Whether the critic has layers of its own."""
        return self.value_level is not None and self.training.critic == "own"


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """What a learner trains, on which device, and how.

    Attributes:
        lora: None: all weights are trained.
        warmup: None: there is no warm-up.
        inference: the limits of each engine that samples.
        engines: how many share the device; 0: other servers sample, or other machines.
        processes: how many use the device, the learner's among them.
        fixed_copies: how many processes of this machine serve the fixed policies with a local model too.
        ranks: [learner].
    """

    model: ModelTable
    lora: LoraTable | None
    warmup: WarmupTable | None
    inference: InferenceTable
    engines: int
    processes: int
    update: UpdateConfig
    fixed_copies: int
    ranks: LearnerTable

    @classmethod
    def of(cls, job: JobConfig) -> Self:
        samplings = [(table, job.rollout.sampling_of(table)) for table in job.fixed_policies]
        update = UpdateConfig(
            training=job.training,
            objectives=objectives_of(job.training, job.algorithm, samplings),
            value_level=estimator(job.algorithm.advantage).needs_values,
            planned_tokens=job.planned_tokens,
            seed=job.job.seed,
        )
        gateways = job.services.gateways if _is_beside_gateways(job) else 0
        engines = gateways if job.inference.engine == "local" else 0
        is_shared = any(not table.is_remote for table in job.fixed_policies)
        fixed_copies = gateways if is_shared else 0
        # A gateway's own copies of fixed policies are in its process, beside an engine or apart from it.
        beside = engines + fixed_copies if job.inference.own_process else max(engines, fixed_copies)
        return cls(
            model=job.model,
            lora=job.lora,
            warmup=job.warmup,
            inference=job.inference,
            engines=engines,
            processes=1 if job.cluster is None else 1 + beside,
            update=update,
            fixed_copies=fixed_copies,
            ranks=job.learner,
        )

    @property
    def training(self) -> TrainingTable:
        return self.update.training

    @property
    def seed(self) -> int:
        return self.update.seed


def _is_beside_gateways(job: JobConfig) -> bool:
    """Whether the learner is on the machine of the gateways, and of the engines in them."""
    if job.cluster is None or job.cluster.launcher == "local":
        return True
    if job.cluster.launcher == "ray":  # a place of their own for each
        return False
    return http_parts(job.learner.url).hostname in ("127.0.0.1", "::1", "localhost")
