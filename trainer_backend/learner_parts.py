"""Makes a learner and its config from a job. Imports torch, and not job_parts.py."""

from trainer_backend.job.addresses import http_parts
from trainer_backend.job.schema import JobConfig
from trainer_backend.learner.behaviour import build_objectives
from trainer_backend.learner.config import LearnerConfig
from trainer_backend.learner.factory import LocalFactory
from trainer_backend.learner.ranks import ALONE, Ranks
from trainer_backend.plugins import estimator


def learner_config(job: JobConfig) -> LearnerConfig:
    samplings = [(table, job.rollout.choose_sampling(table)) for table in job.fixed_policies]
    gateways = job.services.gateways if _shares_machine_with_gateways(job) else 0
    engines = gateways if job.inference.engine == "local" else 0
    is_shared = any(not table.is_remote for table in job.fixed_policies)
    fixed_copies = gateways if is_shared else 0
    # A gateway's copies of fixed policies share its process with the engine unless that has its own process.
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
        servers=_servers_on_this_machine(job),
    )


def _servers_on_this_machine(job: JobConfig) -> int:
    """Count the vLLM servers that the run starts on the learner's machine; Ray gives each its own place."""
    starts_them = job.inference.engine == "vllm" and not job.inference.urls
    is_here = job.cluster is None or job.cluster.launcher == "local"
    return job.inference.replicas if starts_them and is_here else 0


def _shares_machine_with_gateways(job: JobConfig) -> bool:
    """Whether the learner is on the machine of the gateways and of their engines."""
    if job.cluster is None or job.cluster.launcher == "local":
        return True
    if job.cluster.launcher == "ray":  # each has its own place
        return False
    return http_parts(job.learner.url).hostname in ("127.0.0.1", "::1", "localhost")


def local_learners(job: JobConfig, ranks: Ranks = ALONE) -> LocalFactory:
    """Return the factory of a job's learner in this process.

    Args:
        ranks: the processes that share the learner.
    """
    return LocalFactory(learner_config(job), job.fixed_policies, ranks)
