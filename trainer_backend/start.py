"""Starts a run from its job: services, model, warm-up and inference. `train.train` then iterates."""

import asyncio
import gc
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from service_kit.logs import configure_logs_from
from trainer_backend import job_parts
from trainer_backend.collect.apps import TaskApps
from trainer_backend.collect.client import Show, TaskAppClient
from trainer_backend.collect.client import State as AppState
from trainer_backend.collect.plan import Planner
from trainer_backend.collect.task_apps import describe
from trainer_backend.collect.trial import describe_environment, try_job
from trainer_backend.errors import LearnerLost
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.training_table import AlgorithmTable, TrainingTable
from trainer_backend.parts import LearnerFactory, Progress, Reporter
from trainer_backend.processes.launching import Launcher
from trainer_backend.processes.vllm_servers import check_servers
from trainer_backend.run.beginning import Beginning, ModelSetup, Stopped
from trainer_backend.run.checkpointing import Saving
from trainer_backend.run.curriculum import Curriculum
from trainer_backend.run.fixed_setup import FixedSetup
from trainer_backend.run.reporters import RecordingReporter
from trainer_backend.run.stopping import Stop, stop_on_signals, until
from trainer_backend.rundir.checkpoint_paths import STARTED_FROM, latest_checkpoint, newest_folder
from trainer_backend.rundir.data_record import accept_rows, record_rows
from trainer_backend.rundir.digests import refuse_damaged
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.lock import run_lock
from trainer_backend.train import Run, train, work_left

_WITH_TORCH = "trainer_backend.learner.factory"


class Ended(NamedTuple):
    """How a run ended."""

    progress: Progress
    """The progress after the last finished iteration, which is saved in a checkpoint."""
    stopped: str
    """The name of the signal that stopped the run; empty if no work is left."""


async def run_job(
    job: JobConfig,
    directory: RunDirectory,
    reporter: Reporter,
    *,
    resume: bool,
    accept_data: bool = False,
) -> Ended:
    """Start the processes of a run, train, and end the processes, also after an error or Ctrl-C.

    Args:
        resume: continue from the newest checkpoint of `directory`.
        accept_data: use the current rows of [data], even if they changed since the run began.

    Raises:
        DataError: rows changed since the run began, and `accept_data` is false.
        Stopped: a signal stopped this start of the run before its first iteration.
    """
    with (
        run_lock(directory.path),
        RecordingReporter.opened(directory, reporter) as recording,
        stop_on_signals(recording.say, recording.log) as stop,
    ):
        configure_logs_from()
        recording.say(f"run directory: {directory.path}")
        most = job.learner.max_restarts
        try:
            async with job_parts.launcher(job, directory.run_id, recording.say) as launcher:

                async def start(resume: bool) -> Ended:
                    async with AsyncExitStack() as stack:
                        learner = learner_factory(job, directory, recording, launcher)
                        learners = await until(stop, stack.enter_async_context(learner))
                        if learners is None:
                            raise Stopped("before the learner was there; nothing new to save")
                        return await _run(
                            job, directory, recording, learners, launcher, stop,
                            resume=resume, accept_data=accept_data,
                        )  # fmt: skip

                ended = await restart_on_loss(start, recording, stop, most=most, resume=resume)
        except Stopped as stopped:
            reason = f"stopped by {stop.by} {stopped}"
            recording.end("stopped", detail=reason)
            raise Stopped(reason) from stopped
        recording.say(f"{ended.progress.iteration} iterations done; saved in {directory.checkpoints}")
        recording.end("stopped" if ended.stopped else "ended")
        return ended


async def restart_on_loss(
    start: Callable[[bool], Awaitable[Ended]],
    reporter: RecordingReporter,
    stop: asyncio.Event,
    *,
    most: int,
    resume: bool,
) -> Ended:
    """Start a run, and restart it from its newest checkpoint whenever the learner's process is lost.

    Args:
        start: runs the job to its end; its argument is whether to resume from the newest checkpoint.
        most: the largest number of restarts. After these, LearnerLost is raised.
        resume: whether the first start resumes.
    """
    for restarts in count():
        try:
            return await start(resume or restarts > 0)
        except LearnerLost as lost:
            if restarts == most or stop.is_set():
                raise
            reporter.say(f"{lost}; the run goes on from its newest checkpoint ({restarts + 1} of {most})")
            reporter.starts_again()
    raise AssertionError("the numbers do not end")


@asynccontextmanager
async def learner_factory(
    job: JobConfig, directory: RunDirectory, reporter: Reporter, launcher: Launcher
) -> AsyncIterator[LearnerFactory]:
    """Yield the factory of the run's learner. With [cluster], the learner runs in a process of its own."""
    if job.cluster is None:
        # Import torch only here, because with [cluster] only the learner's process needs it.
        collects, is_first = gc.isenabled(), _WITH_TORCH not in sys.modules
        gc.disable()  # garbage collection would take a sixth of the import's time
        try:
            from trainer_backend import learner_parts

            learners = learner_parts.local_learners(job)
        finally:
            if is_first:
                gc.freeze()  # else the collection after each iteration spends 0.2 s on imported objects
            if collects:
                gc.enable()
        yield learners
        return
    async with job_parts.learner_process(job, directory, reporter, launcher) as process:
        yield process


async def _run(
    job: JobConfig,
    directory: RunDirectory,
    reporter: RecordingReporter,
    learners: LearnerFactory,
    launcher: Launcher,
    stop: Stop,
    *,
    resume: bool,
    accept_data: bool,
) -> Ended:
    # First refuse rows, a checkpoint and fixed policies that cannot be used.
    data, record = await asyncio.to_thread(job_parts.data_of_run, job, directory)
    data = accept_rows(record, job.data, data, accept_changes=accept_data)
    if resume:
        await asyncio.to_thread(_refuse_damage, job, directory.checkpoints)
    checkpoint = latest_checkpoint(directory.checkpoints)
    fixed_setup = await asyncio.to_thread(_load_fixed_setup, job, learners, checkpoint)
    # A new id for each start: task apps refuse an earlier start's rollout ids with other request bodies.
    run_id = f"{directory.run_id}.{secrets.token_hex(4)}"
    # Reserve the port first, so that a port in use is found before the minutes of a warm-up.
    with job_parts.gateways(job, fixed_setup, directory, reporter.say, launcher) as gateways:
        planner = job_parts.planner(job, run_id, gateways.inference, data)
        async with job_parts.task_apps(job, directory.task_app_log, data=data, tell=reporter.say) as apps:
            apps.watch(report_task_app(reporter))
            dispatcher = job_parts.dispatcher(job, apps)
            if reporter.left_behind:
                await dispatcher.abort(reporter.left_behind)
            reporter.runs_as(run_id)
            servers = await until(stop, _checked_servers(job)) or []
            switches, notes = describe_switches(job.training, job.algorithm), data.notes if data else ()
            for line in (describe(apps), switches, *servers, *notes):
                reporter.say(line)
            reseedable = await _try(job, planner, apps, stop, from_scratch=checkpoint is None)
            beginning = Beginning(
                directory, planner, _set_up_models(job, learners, fixed_setup),
                dispatcher=dispatcher, reporter=reporter, stop=stop,
            )  # fmt: skip
            models = await beginning.load(resume=resume)
            replace_job = _replaced_job(job, directory)
            if models.checkpoint is None:
                await asyncio.to_thread(record_rows, directory, record, data, 0)  # `begin` plays
            learner, progress = await beginning.begin(models)
            reporter.goes_on_from(progress.iteration)
            async with gateways.serving(learner, models.fixed) as actor:
                actor.watch(reporter)
                reporter.say(f"gateway: {', '.join(actor.inference.urls)} serves {actor.inference.model}")
                run = Run(
                    planner, job_parts.credit(job), dispatcher, actor,
                    Saving(job.training, job.evaluation, directory, learner),
                    reporter, reporter.resumes, reseedable=reseedable,
                    curriculum=_curriculum(planner, apps, directory, reporter, reseedable=reseedable),
                )  # fmt: skip
                # Record changed rows only now, so that a start which fails accepts no change.
                if models.checkpoint is not None and work_left(run, progress):
                    await asyncio.to_thread(record_rows, directory, record, data, progress.iteration)
                progress = await train(run, progress, stop, served=replace_job)
                for line in await actor.verify():
                    reporter.say(line)
            return Ended(progress, stop.by if work_left(run, progress) else "")


async def _try(job: JobConfig, planner: Planner, apps: TaskApps, stop: Stop, *, from_scratch: bool) -> bool:
    """Check the job at the task apps; return whether snapshots of its environment are reseeded.

    A curriculum and some fork rules need copies of a snapshot that draw different random numbers. For them,
    snapshots are reseeded if the environment supports it.
    """
    preset = job.model.preset is not None
    await until(stop, try_job(planner, apps, from_scratch=from_scratch, preset=preset))
    if stop.is_set():
        raise Stopped("before anything was played; nothing new to save")
    rule = planner.fork_rule
    if planner.curriculum is None and (rule is None or not rule.reads_samples):
        return False
    return (await describe_environment(planner, apps))[1].reseedable


def _curriculum(
    planner: Planner, apps: TaskApps, directory: RunDirectory, reporter: Reporter, *, reseedable: bool
) -> Curriculum | None:
    if planner.curriculum is None:
        return None
    return Curriculum(planner.curriculum, planner, apps, directory, tell=reporter.say, reseedable=reseedable)


def _load_fixed_setup(job: JobConfig, learners: LearnerFactory, checkpoint: Path | None) -> FixedSetup:
    """Return the settings of the fixed policies. Raises an error if a policy does not fit the actor."""
    return FixedSetup(job.fixed_policies, learners.fixed_folders(checkpoint), job.rollout_allocation_schedule)


def _set_up_models(job: JobConfig, learners: LearnerFactory, fixed: FixedSetup) -> ModelSetup:
    here = fixed if job.cluster is None else FixedSetup(folders=fixed.folders)
    return ModelSetup(job.model, job.inference, learners, here, job.rollout)


def _replaced_job(job: JobConfig, directory: RunDirectory) -> Callable[[], None]:
    """Store the job in the run directory, and return a function that stores it again.

    With [cluster] and fixed policies, gateways may still refuse a policy, so the job is not stored at once.
    The caller calls the returned function when all policies are served.
    """
    replace_job = partial(directory.replace_job, job)
    if job.cluster is None or not job.fixed_policies:
        replace_job()
    return replace_job


async def _checked_servers(job: JobConfig) -> list[str]:
    """Check the job's vLLM servers, and return one line of text per server."""
    on_nodes = job.cluster is not None and job.cluster.launcher == "ray" and not job.inference.urls
    if job.inference.engine == "local" or on_nodes:  # the nodes, not this machine, must have vLLM
        return []
    return await check_servers(job.inference, broadcasts=job.weights_by_broadcast)


def _refuse_damage(job: JobConfig, checkpoints: Path) -> None:
    """Raise an error if the newest checkpoint is damaged, or iteration_0 (start of RL) where it is needed."""
    newest = newest_folder(checkpoints)
    if newest is None:
        return
    refuse_damaged(newest)
    started_from = checkpoints / STARTED_FROM
    needs_start = job.lora is not None or job.training.needs_reference
    if newest != started_from and needs_start:
        refuse_damaged(started_from)


def report_task_app(reporter: Reporter) -> Show:
    """Return a callback that reports a task app as a process of the run."""

    def show(app: TaskAppClient, state: AppState) -> None:
        word, host = app.fault or "", urlsplit(app.url).netloc
        reporter.process(app.label, role="task app", state=state, word=word, host=host)

    return show


def describe_switches(table: TrainingTable, algorithm: AlgorithmTable) -> str:
    """Describe the job's reward mode in one line, which "Source 1" in docs/sources.md requires at start."""
    return (
        f"step_rewards_enabled={str(table.step_rewards_enabled).lower()} "
        f"step_rewards_mode={table.step_rewards_mode} event_rewards_kind={table.event_rewards_kind} "
        f"step_rewards_beta={table.step_rewards_beta:g} "
        f"step_rewards_indicator_lambda={table.step_rewards_indicator_lambda:g} "
        f"advantage={algorithm.advantage} gamma={algorithm.gamma:g}"
    )
