"""Puts a run together from its job: services, model, warm-up, inference. `train.train` does the rest."""

import asyncio
import secrets
from pathlib import Path
from typing import NamedTuple

from service_kit.logs import configure_logs_from
from trainer_backend.collect.collector import Collector
from trainer_backend.collect.plan import Planner
from trainer_backend.collect.task_apps import describe, task_apps
from trainer_backend.collect.trial import try_job
from trainer_backend.credit.credit import CreditAssignment
from trainer_backend.data.dataset import data_of
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.training_table import AlgorithmTable, TrainingTable
from trainer_backend.learner.config import LearnerConfig
from trainer_backend.learner.device import place
from trainer_backend.protocols import Progress, Reporter
from trainer_backend.run.beginning import Beginning, FixedSetup, Stopped
from trainer_backend.run.checkpointing import Saving
from trainer_backend.run.gateways import actor_gateways
from trainer_backend.run.preflight import checked_folders
from trainer_backend.run.replicas import check_servers
from trainer_backend.run.reporters import RecordingReporter
from trainer_backend.run.stopping import stop_on_signals, until
from trainer_backend.rundir.checkpoint_paths import latest_checkpoint, newest_folder
from trainer_backend.rundir.digests import refuse_damaged
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.lock import run_lock
from trainer_backend.train import Run, train, work_left


class Ended(NamedTuple):
    """How a run ended.

    Attributes:
        progress: the last finished iteration, which is saved.
        stopped: somebody asked to stop, and a resumed run has something left to do.
    """

    progress: Progress
    stopped: bool


async def run_job(job: JobConfig, directory: RunDirectory, reporter: Reporter, *, resume: bool) -> Ended:
    """Start everything, train, and end everything again, also after an error or Ctrl-C.

    Raises:
        Stopped: a stop came before the first checkpoint.
    """
    with run_lock(directory.path), RecordingReporter.opened(directory, reporter) as recording:
        try:
            ended = await _run(job, directory, recording, resume=resume)
        except Stopped as stopped:
            recording.end("stopped", detail=str(stopped))
            raise
        recording.end("stopped" if ended.stopped else "ended")
        return ended


async def _run(
    job: JobConfig, directory: RunDirectory, reporter: RecordingReporter, *, resume: bool
) -> Ended:
    configure_logs_from()
    # Before anything is started: a GPU that is not there, a row that cannot be used, a damaged checkpoint, a
    # fixed policy that does not fit the actor.
    place(job.model.device)
    data = await asyncio.to_thread(data_of, job)
    if resume:
        needs_start = job.lora is not None or job.training.needs_reference
        await asyncio.to_thread(_refuse_damage, directory.checkpoints, needs_start=needs_start)
    checkpoint = latest_checkpoint(directory.checkpoints)
    folders = await asyncio.to_thread(checked_folders, job.fixed_policies, job.model, checkpoint)
    # Of this start alone: what an earlier one left at a task app names a gateway that is gone, and the same
    # ids with another body would be refused. Seeds do not depend on it.
    run_id = f"{directory.run_id}.{secrets.token_hex(4)}"
    # The port first: a taken one must not cost the minutes of a warm-up.
    with stop_on_signals(reporter.say) as stop, actor_gateways(job, directory, reporter.say) as gateways:
        planner = Planner.of(job, run_id, gateways.inference, data)
        async with task_apps(job, directory.task_app_log, data=data, tell=reporter.say) as apps:
            collector = Collector(
                apps,
                timeout_s=job.services.iteration_timeout_s,
                max_running=job.rollout.max_concurrent_rollouts,
            )
            if reporter.left_behind:
                await collector.abort(reporter.left_behind)
            reporter.runs_as(run_id)
            lines = [describe(apps), echo_of_switches(job.training, job.algorithm)]
            lines += await until(stop, check_servers(job.inference)) or []
            for line in (*lines, *(data.notes if data is not None else ())):
                reporter.say(line)
            preset = job.model.preset is not None
            await until(stop, try_job(planner, apps, from_scratch=checkpoint is None, preset=preset))
            if stop.is_set():
                raise Stopped("stopped before anything was played; nothing new to save")
            schedule = job.rollout_allocation_schedule
            fixed_setup = FixedSetup(job.fixed_policies, folders, job.inference, schedule)
            beginning = Beginning(
                directory, planner, LearnerConfig.of(job), fixed_setup,
                collector=collector, reporter=reporter, stop=stop,
            )  # fmt: skip
            models = await beginning.load(resume=resume)
            # The next resume, the report and eval read it. Not sooner: a job that was refused must not stay.
            directory.replace_job(job)
            learner, progress, fixed = await beginning.begin(models)
            reporter.goes_on_from(progress.iteration)
            saving = Saving(job.training, job.evaluation, directory, learner)
            async with gateways.serving(learner, fixed.policies) as actor:
                urls = ", ".join(actor.inference.urls)
                reporter.say(f"gateway: {urls} serves {actor.inference.model}")
                run = Run(
                    planner, CreditAssignment.of(job), collector, actor,
                    saving=saving, reporter=reporter, resumes=reporter.resumes,
                )  # fmt: skip
                progress = await train(run, progress, stop)
            for line in await asyncio.to_thread(fixed.verify):
                reporter.say(line)
            return Ended(progress, stop.is_set() and work_left(run, progress))


def _refuse_damage(checkpoints: Path, *, needs_start: bool) -> None:
    """Refuse a damaged newest checkpoint, and where it is needed a damaged one that RL started from."""
    newest = newest_folder(checkpoints)
    if newest is None:
        return
    refuse_damaged(newest)
    started_from = checkpoints / "iteration_0"
    if newest != started_from and needs_start:
        refuse_damaged(started_from)


def echo_of_switches(table: TrainingTable, algorithm: AlgorithmTable) -> str:
    """Reward mode and flags in one line, as source 1 asks for at start."""
    return (
        f"step_rewards_enabled={str(table.step_rewards_enabled).lower()} "
        f"step_rewards_mode={table.step_rewards_mode} event_rewards_kind={table.event_rewards_kind} "
        f"step_rewards_beta={table.step_rewards_beta:g} "
        f"step_rewards_indicator_lambda={table.step_rewards_indicator_lambda:g} "
        f"advantage={algorithm.advantage} gamma={algorithm.gamma:g}"
    )
