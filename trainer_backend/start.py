"""From a job to a run that trains: services, model, warm-up, inference. `train.train` does the rest."""

import asyncio
import time
from collections.abc import Sequence

from shared_schemas.rollouts import RolloutRequest
from shared_schemas.trajectory import Trajectory
from trainer_backend.collect.collector import Collector
from trainer_backend.collect.plan import Planner
from trainer_backend.evaluation import collection_metrics, evaluation_metrics, finished_trajectories
from trainer_backend.job_schema import JobConfig
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.protocols import Progress, Reporter
from trainer_backend.rundir.checkpoint_paths import latest_checkpoint
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_files import read_rollouts, write_rollouts
from trainer_backend.services import task_apps
from trainer_backend.serving import serving
from trainer_backend.stopping import stop_on_signals, until
from trainer_backend.train import Run, train

# Episodes of random play that a preset's tokenizer is trained on when the job has no warm-up.
_PROMPT_EPISODES = 64


class Stopped(Exception):
    """Somebody asked to stop before there was anything to save."""


async def run_job(job: JobConfig, directory: RunDirectory, reporter: Reporter, *, resume: bool) -> Progress:
    """Start everything, train, and end everything again, also after an error or Ctrl-C.

    Raises:
        TrainerError: with a sentence for the user.
        Stopped: a stop was asked for before the first checkpoint.
    """
    with stop_on_signals() as stop:
        async with task_apps(job, directory.path / "task_app.log") as clients:
            collector = Collector(clients, timeout_s=job.services.iteration_timeout_s)
            reporter.say(f"task app{'s' if len(clients) > 1 else ''}: {', '.join(c.url for c in clients)}")
            reporter.say(echo_of_switches(job))
            beginning = _Beginning(job, directory, collector, reporter, stop)
            learner, progress = await (beginning.resumed() if resume else beginning.fresh())
            async with serving(job, learner) as server:
                reporter.say(f"gateway: {server.inference.url} serves {server.inference.model}")
                run = Run(job, directory, collector, learner, server, reporter)
                return await train(run, progress, stop)


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


class _Beginning:
    """The policy that RL starts from: a checkpoint's, or a fresh one after its warm-up."""

    def __init__(
        self,
        job: JobConfig,
        directory: RunDirectory,
        collector: Collector,
        reporter: Reporter,
        stop: asyncio.Event,
    ) -> None:
        self._job, self._directory, self._collector = job, directory, collector
        self._reporter, self._stop = reporter, stop
        self._planner = Planner(job, directory.run_id)

    async def resumed(self) -> tuple[LocalLearner, Progress]:
        """The newest checkpoint; a run that was stopped before its first one begins anew."""
        checkpoint = latest_checkpoint(self._directory.checkpoints)
        if checkpoint is None:
            self._reporter.say("no checkpoint yet: the run begins anew")
            return await self.fresh()
        learner, progress = LocalLearner.resumed(self._job, checkpoint)
        self._directory.forget_metrics_after(progress.iteration)
        self._reporter.say(f"resumed from {checkpoint}")
        return learner, progress

    async def fresh(self) -> tuple[LocalLearner, Progress]:
        """Rollouts to begin with, the model that the job names, and its warm-up."""
        self._directory.forget_metrics_after(-1)
        if self._job.warmup is None:
            needs_prompts = self._job.model.preset is not None
            prompts = await self._played(
                "prompts", self._planner.prompts(_PROMPT_EPISODES) if needs_prompts else []
            )
            return LocalLearner.fresh(self._job, prompts), Progress()
        episodes = await self._played("warmup", self._planner.warmup())
        learner = LocalLearner.fresh(self._job, episodes)
        started = time.monotonic()
        work = asyncio.to_thread(learner.warm_up, episodes, self._reporter)
        metrics = await until(self._stop, work)
        if metrics is None:
            raise Stopped("stopped in the warm-up; nothing to save yet")
        # Minutes of work: on disk before anything else can fail.
        folder = self._directory.checkpoints / "iteration_0"
        await asyncio.to_thread(learner.save, folder, Progress())
        row = {"kind": "warmup", "iteration": 0, **metrics, "time/warmup_s": time.monotonic() - started}
        self._directory.append_metrics(row)
        self._reporter.say(
            f"warm-up: {metrics['warmup/examples']:.0f} decisions of {self._job.warmup.policy_name}, "
            f"loss {metrics['warmup/loss']:.3f} nats a token, {row['time/warmup_s']:.0f} s"
        )
        return learner, Progress()

    async def _played(self, name: str, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        """Finished episodes of a plan; those of an interrupted start are on disk and used again."""
        path = self._directory.rollouts_file(name)
        if not requests:
            return []
        if path.exists():
            return finished_trajectories(read_rollouts(path), name)
        started = time.monotonic()

        def tell(done: int, total: int) -> None:
            self._reporter.stage(f"collect {name}", done, total)

        collection = await until(self._stop, self._collector.collect(requests, tell))
        if collection is None:
            raise Stopped(f"stopped while collecting {name}; nothing to save yet")
        write_rollouts(path, (*collection.rollouts, *collection.failed))
        await self._collector.ack(self._directory.run_id, (*collection.rollouts, *collection.failed))
        row = {
            "kind": name,
            "iteration": 0,
            **evaluation_metrics(collection.rollouts),
            **collection_metrics(collection),
            "time/collect_s": time.monotonic() - started,
        }
        self._directory.append_metrics(row)
        self._reporter.say(
            f"{name}: {row['eval/episodes']} episodes with {row['eval/unique_achievements']:.2f} unique "
            f"achievements on average, {row['time/collect_s']:.0f} s"
        )
        return finished_trajectories(collection.rollouts, name)
