"""`turnwise eval`: a policy plays the held-out worlds over HTTP; its figures with 95 % intervals."""

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from shared_schemas.rollouts import RolloutRequest
from trainer_backend.collect.collector import Collection, Collector
from trainer_backend.collect.plan import Planner
from trainer_backend.errors import JobError, RunDirectoryError
from trainer_backend.evaluation import refuse_empty
from trainer_backend.evaluation_result import Evaluated, evaluated
from trainer_backend.job import LoadedJob, load_job
from trainer_backend.job_schema import JobConfig
from trainer_backend.rundir.checkpoint_paths import best_checkpoint
from trainer_backend.services import task_apps

Tell = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A language model in a Hugging Face folder."""

    folder: Path


@dataclass(frozen=True, slots=True)
class Scripted:
    """A policy of the task app that asks no model, such as crafter_teacher or random."""

    policy_name: str
    config: Mapping[str, Any] = field(default_factory=dict)


def what_to_evaluate(
    folder: Path | None, job_path: Path | None, policy: Scripted | None, overrides: Sequence[str] = ()
) -> tuple[LoadedJob, Checkpoint | Scripted]:
    """From the arguments of the command to a job and who plays.

    Args:
        folder: a run (its best checkpoint plays), a checkpoint of a run, or a model folder.
        job_path: a job TOML; absent, that of the run.
        policy: plays instead of a model.
        overrides: `table.key=value` for the job.

    Raises:
        JobError: neither folder nor policy, or no job for them.
        RunDirectoryError: the run has no checkpoint yet.
    """
    if folder is None and policy is None:
        raise JobError("give a run or model folder, or --policy with the name of a scripted policy")
    run = _run_of(folder) if folder is not None else None
    if job_path is None and run is None:
        raise JobError(f"{folder or 'a policy'} is no run with a job of its own: give --job JOB.toml")
    loaded = load_job(job_path or (run or Path()) / "job.toml", overrides)
    if policy is not None:
        return loaded, policy
    assert folder is not None, "one of the two is given"
    if run is None or folder != run:
        return loaded, Checkpoint(folder)
    best = best_checkpoint(run / "checkpoints")
    if best is None:
        raise RunDirectoryError(f"{run} has no checkpoint yet")
    return loaded, Checkpoint(best)


def _run_of(folder: Path) -> Path | None:
    """The run that a folder is, or whose checkpoint it is."""
    candidates = (folder, folder.parent.parent)
    return next((path for path in candidates if (path / "run.json").exists()), None)


async def evaluate(job: JobConfig, policy: Checkpoint | Scripted, tell: Tell | None = None) -> Evaluated:
    """Play every held-out world of the job once, on its task apps.

    Sampling seeds are those of the job's own evaluations, so a checkpoint plays as it did in training.

    Args:
        job: environment, limits, worlds ([evaluation]) and services.
        policy: who plays.
        tell: is called with how many episodes have ended, and of how many.

    Raises:
        TrainerError: no such model, a task app that refuses, no episode finished.
    """
    with tempfile.TemporaryDirectory() as folder:
        async with task_apps(job, Path(folder) / "task_app.log") as clients:
            collector = Collector(
                clients,
                timeout_s=job.services.iteration_timeout_s,
                max_running=job.rollout.max_concurrent_rollouts,
            )
            if isinstance(policy, Scripted):
                config = {**_warmup_config(job, policy.policy_name), **policy.config}
                plan = Planner(job, _run_id(job)).evaluation(
                    "scripted", policy_name=policy.policy_name, policy_config=config
                )
                return evaluated(policy.policy_name, await _played(collector, plan, tell))
            return await _checkpoint(job, policy, collector, tell)


async def _checkpoint(
    job: JobConfig, policy: Checkpoint, collector: Collector, tell: Tell | None
) -> Evaluated:
    # torch is imported here alone: scripted policies are evaluated without it.
    from trainer_backend.learner.learner import LocalLearner
    from trainer_backend.serving import serving

    model = job.model.model_copy(update={"preset": None, "path": policy.folder})
    learner = await asyncio.to_thread(LocalLearner.fresh, job.model_copy(update={"model": model}), [])
    async with serving(job, learner) as server:
        await server.publish(0)
        plan = Planner(job, _run_id(job), server.inference).evaluation("checkpoint")
        return evaluated(str(policy.folder), await _played(collector, plan, tell))


async def _played(collector: Collector, plan: Sequence[RolloutRequest], tell: Tell | None) -> Collection:
    collection = await collector.collect(plan, tell)
    await collector.ack(plan[0].run_id, collection.all)
    refuse_empty(collection, "evaluation")
    return collection


def _run_id(job: JobConfig) -> str:
    return f"{job.job.name}.eval.{uuid4().hex[:12]}"


def _warmup_config(job: JobConfig, policy_name: str) -> Mapping[str, Any]:
    """The warm-up's teacher is evaluated as the job configures it."""
    if job.warmup is not None and job.warmup.policy_name == policy_name:
        return job.warmup.policy_config
    return {}
