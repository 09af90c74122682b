"""From a job to a run that trains: services, model, warm-up, inference. `train.train` does the rest."""

import asyncio
import secrets
from pathlib import Path
from typing import NamedTuple

from pydantic import SecretStr

from service_kit.logs import configure_logs_from
from trainer_backend.collect.collector import Collector
from trainer_backend.collect.plan import Inference, Planner
from trainer_backend.collect.task_apps import task_apps, told_of
from trainer_backend.collect.trial import try_job
from trainer_backend.core.policies import ACTOR, model_of
from trainer_backend.data.dataset import data_of
from trainer_backend.job.schema import JobConfig
from trainer_backend.learner.device import place
from trainer_backend.protocols import Progress, Reporter
from trainer_backend.run.beginning import Beginning, Stopped
from trainer_backend.run.fixed_policies import fixed_inferences
from trainer_backend.run.policy_server import gateway_listener, serving
from trainer_backend.run.preflight import checked_folders
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
        RunDirectoryError: somebody else trains in this directory.
        TrainerError: with a sentence for the user.
        Stopped: a stop was asked for before the first checkpoint.
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
    place(job.model.device)  # a GPU that is not there is told before anything is started
    data = await asyncio.to_thread(data_of, job)  # and so is a row that cannot be used
    if resume:
        await asyncio.to_thread(_refuse_damage, job, directory.checkpoints)
    checkpoint = latest_checkpoint(directory.checkpoints)
    folders = await asyncio.to_thread(checked_folders, job, checkpoint)  # and a fixed policy
    # Of this start alone: what an earlier one left at a task app names a gateway that is gone, and the same
    # ids with another body would be refused. Seeds do not depend on it.
    run_id = f"{directory.run_id}.{secrets.token_hex(4)}"
    # The port first: a taken one must not cost the minutes of a warm-up.
    with stop_on_signals(reporter.say) as stop, gateway_listener(job.services) as listener:
        async with task_apps(job, directory.task_app_log, data=data, tell=reporter.say) as apps:
            collector = Collector(
                apps,
                timeout_s=job.services.iteration_timeout_s,
                max_running=job.rollout.max_concurrent_rollouts,
            )
            if reporter.left_behind:
                await collector.abort(reporter.left_behind)
            reporter.runs_as(run_id)
            reporter.say(told_of(apps))
            reporter.say(echo_of_switches(job))
            for line in data.told if data is not None else ():
                reporter.say(line)
            # Nobody asks the gateway yet, and the key that it will want does not exist yet.
            asked = Inference(
                listener.url, model_of(job.job.name, ACTOR), SecretStr(""), job.inference.max_model_len
            )
            planner = Planner(job, run_id, asked, data, fixed_inferences(job, asked))
            await until(stop, try_job(planner, apps, from_scratch=checkpoint is None))
            if stop.is_set():
                raise Stopped("stopped before anything was played; nothing new to save")
            beginning = Beginning(directory, planner, folders, collector, reporter, stop)
            learner, progress, fixed = await (beginning.resumed() if resume else beginning.fresh())
            reporter.goes_on_from(progress.iteration)
            async with serving(job, learner, listener, fixed=fixed.policies) as server:
                reporter.say(f"gateway: {server.inference.url} serves {server.inference.model}")
                others = fixed_inferences(job, server.inference)
                run = Run(
                    job, directory, run_id, collector, learner, server, reporter, data,
                    fixed=others, resumes=reporter.resumes,
                )  # fmt: skip
                progress = await train(run, progress, stop)
            for line in await asyncio.to_thread(fixed.compared):
                reporter.say(line)
            return Ended(progress, stop.is_set() and work_left(run, progress))


def _refuse_damage(job: JobConfig, checkpoints: Path) -> None:
    """
    Raises:
        CheckpointError: the newest checkpoint is damaged, or the one that RL started from where it is needed.
    """
    newest = newest_folder(checkpoints)
    if newest is None:
        return
    refuse_damaged(newest)
    started_from = checkpoints / "iteration_0"
    if newest != started_from and (job.lora is not None or job.training.needs_reference):
        refuse_damaged(started_from)


def echo_of_switches(job: JobConfig) -> str:
    """Reward mode and flags in one line, as source 1 asks for at start."""
    table = job.training
    return (
        f"step_rewards_enabled={str(table.step_rewards_enabled).lower()} "
        f"step_rewards_mode={table.step_rewards_mode} event_rewards_kind={table.event_rewards_kind} "
        f"step_rewards_beta={table.step_rewards_beta:g} "
        f"step_rewards_indicator_lambda={table.step_rewards_indicator_lambda:g} "
        f"advantage={job.algorithm.advantage} gamma={job.algorithm.gamma:g}"
    )
