"""Makes a learner and its config from a job. This module imports torch, which `job_parts.py` must not do."""

from trainer_backend.job.addresses import http_parts
from trainer_backend.job.schema import JobConfig
from trainer_backend.learner.behaviour import build_objectives
from trainer_backend.learner.config import LearnerConfig
from trainer_backend.learner.factory import LocalFactory
from trainer_backend.learner.ranks import ALONE, Ranks
from trainer_backend.plugins import estimator


def learner_config(job: JobConfig) -> LearnerConfig:
    samplings = [(table, job.rollout.choose_sampling(table)) for table in job.fixed_policies]
    # Count the gateways and vLLM servers that share the learner's machine. Ray places them separately.
    launcher = "local" if job.cluster is None else job.cluster.launcher
    hosts_gateways = launcher == "local" or (
        launcher == "external" and http_parts(job.learner.url).hostname in ("127.0.0.1", "::1", "localhost")
    )
    hosts_servers = launcher == "local" and job.inference.engine == "vllm" and not job.inference.urls
    gateways = job.services.gateways if hosts_gateways else 0
    engines = gateways if job.inference.engine == "local" else 0
    is_shared = any(not table.is_remote for table in job.fixed_policies)
    fixed_copies = gateways if is_shared else 0
    # A gateway's process holds its copies of fixed policies, and also its engine unless `own_process` is set.
    others = engines + fixed_copies if job.inference.own_process else max(engines, fixed_copies)
    return LearnerConfig(
        model=job.model,
        lora=job.lora,
        warmup=job.warmup,
        inference=job.inference,
        engines=engines,
        processes=1 if job.cluster is None else 1 + others,
        training=job.training,
        objectives=build_objectives(job.training, job.algorithm, samplings),
        value_level=estimator(job.algorithm.advantage).needs_values,
        planned_tokens=job.planned_tokens,
        seed=job.job.seed,
        fixed_copies=fixed_copies,
        ranks=job.learner,
        servers=job.inference.replicas if hosts_servers else 0,
    )


def local_learners(job: JobConfig, ranks: Ranks = ALONE) -> LocalFactory:
    """Return the factory that creates a job's learner in this process.

    Args:
        ranks: the processes among which the learner is divided; by default, this process alone.
    """
    return LocalFactory(learner_config(job), job.fixed_policies, ranks)
