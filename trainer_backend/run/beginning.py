"""What RL starts from: a checkpoint's policy, or a fresh one after its first rollouts and its warm-up."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shared_schemas.rollouts import Rollout, RolloutRequest
from shared_schemas.trajectory import Trajectory
from trainer_backend.collect.collector import Collection, Collector
from trainer_backend.collect.endpoints import warmup_key
from trainer_backend.collect.metrics import (
    collection_metrics,
    evaluation_metrics,
    finished_trajectories,
    outcome_name,
    refuse_empty,
)
from trainer_backend.collect.plan import Planner
from trainer_backend.learner.capacity import less_memory, memory_plan, refuse_too_large
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.value_head import told_on_resume
from trainer_backend.protocols import Progress, Reporter
from trainer_backend.run.fixed_policies import (
    FixedPolicies,
    begin_record,
    continue_record,
    fixed_models,
    joined_policies,
)
from trainer_backend.run.preflight import tokenizer_in
from trainer_backend.run.run import collected
from trainer_backend.run.stopping import until, until_on_thread
from trainer_backend.rundir.checkpoint_paths import latest_checkpoint
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_files import stored_rollouts, write_rollouts
from trainer_backend.rundir.spool import Spool

# Episodes of random play that a preset's tokenizer is trained on when the job has no warm-up.
_PROMPT_EPISODES = 64
# Kinds of metrics rows, and the file under rollouts/ that holds their episodes.
_FILES = {"teacher": "warmup", "prompts": "prompts"}


class Stopped(Exception):
    """Somebody asked to stop before there was anything to save."""


class Begun(NamedTuple):
    """What training goes on with."""

    learner: LocalLearner
    progress: Progress
    fixed: FixedPolicies


class Beginning:
    """The policy that RL starts from: a checkpoint's, or a fresh one after its warm-up.

    Args:
        folders: of the fixed policies that are served from here.
    """

    def __init__(
        self,
        directory: RunDirectory,
        planner: Planner,
        folders: Mapping[str, Path],
        collector: Collector,
        reporter: Reporter,
        stop: asyncio.Event,
    ) -> None:
        self._job, self._run_id = planner.job, planner.run_id
        self._directory, self._planner, self._folders = directory, planner, folders
        self._collector, self._reporter, self._stop = collector, reporter, stop

    async def resumed(self) -> Begun:
        """The newest checkpoint; a run that was stopped before its first one begins anew."""
        checkpoint = latest_checkpoint(self._directory.checkpoints)
        if checkpoint is None:
            self._reporter.say("no checkpoint yet: the run begins anew")
            return await self.fresh()
        await self._plan_memory(checkpoint)
        learner, progress = await asyncio.to_thread(LocalLearner.resumed, self._job, checkpoint)
        fixed = await self._fixed(learner)
        for line in continue_record(self._directory, fixed_models(self._job.fixed_policies, fixed)):
            self._reporter.say(line)
        # The next resume, the report and eval read it, so it is what the run goes on with; and not sooner: a
        # job that was refused must not stay.
        self._directory.replace_job(self._job)
        self._directory.go_back_to(progress.iteration, self._reporter.say)
        self._reporter.say(f"resumed from {checkpoint}")
        for told in (
            self._directory.missing_rows(progress.iteration),
            told_on_resume(self._job.algorithm.advantage, checkpoint),
        ):
            if told is not None:
                self._reporter.say(told)
        return Begun(learner, progress, fixed)

    async def fresh(self) -> Begun:
        """Rollouts to begin with, the model that the job names, and its warm-up."""
        self._directory.go_back_to(-1, self._reporter.say)
        await self._plan_memory(None)
        # What is wrong with a named model, or a fixed one, shows when it is loaded: before minutes of
        # rollouts, not after. A preset waits for the prompts that its tokenizer is trained on, if it needs
        # them.
        learner = await self._learner([]) if self._job.model.preset is None or self._folders else None
        fixed = FixedPolicies() if learner is None else await self._fixed(learner)
        begin_record(self._directory, fixed_models(self._job.fixed_policies, fixed))
        self._directory.replace_job(self._job)
        if self._job.warmup is None:
            plan = self._planner.prompts(_PROMPT_EPISODES) if learner is None else []
            prompts = await self._played("prompts", plan)
            return Begun(learner or await self._learner(prompts), Progress(), fixed)
        episodes = await self._played("teacher", self._planner.warmup(warmup_key(self._job.warmup)))
        learner = learner or await self._learner(episodes)
        await self._warm_up(learner, episodes)
        return Begun(learner, Progress(), fixed)

    async def _fixed(self, learner: LocalLearner) -> FixedPolicies:
        joining = joined_policies(self._job, self._folders, learner, self._reporter)
        found = await until(self._stop, joining)
        if found is None:
            raise Stopped("stopped before anything was played; nothing new to save")
        return found

    async def _plan_memory(self, checkpoint: Path | None) -> None:
        """Tell what the run will need; one that cannot fit ends here, before the weights are read."""
        folders = list(self._folders.values())
        plan = await asyncio.to_thread(memory_plan, self._job, checkpoint, fixed=folders)
        self._reporter.say(str(plan))
        refuse_too_large(plan, hint=less_memory(self._job))

    async def _learner(self, prompts: Sequence[Trajectory]) -> LocalLearner:
        self._reporter.say(f"model: {self._job.model.source}")
        shared = next(iter(self._folders.values()), None)
        tokenizer = None if shared is None else tokenizer_in(shared, self._job.model)
        return await asyncio.to_thread(LocalLearner.fresh, self._job, prompts, tokenizer)

    async def _warm_up(self, learner: LocalLearner, episodes: Sequence[Trajectory]) -> None:
        started = time.monotonic()

        def work(check: Callable[[], None]) -> dict[str, float]:
            def tell(done: int, total: int) -> None:
                check()
                self._reporter.stage("warm-up", done, total)

            return learner.warm_up(episodes, tell)

        metrics = await until_on_thread(self._stop, work)
        if metrics is None:
            raise Stopped("stopped in the warm-up; nothing to save yet")
        row = {"kind": "warmup", "iteration": 0, **metrics, "time/warmup_s": time.monotonic() - started}
        self._directory.append_metrics(row)
        # Minutes of work: on disk before anything else can fail. After its row, which would else be lost with
        # a kill between the two: without a checkpoint all of it is done again, rows too.
        await asyncio.to_thread(learner.save, self._directory.checkpoints / "iteration_0", Progress())
        self._reporter.say(
            f"warm-up: {metrics['warmup/examples']:.0f} decisions of the teacher, "
            f"loss {metrics['warmup/loss']:.3f} nats a token, {row['time/warmup_s']:.0f} s"
        )

    async def _played(self, kind: str, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        """Return a plan's finished episodes and their row; an interrupted start's episodes are reused."""
        if not requests:
            return []
        path = self._directory.rollouts_file(_FILES[kind])
        stored = stored_rollouts(path, self._reporter.say)
        started = time.monotonic()
        if any(rollout.trajectory is not None for rollout in stored):
            collection, time_taken, told = _collection_of(stored), {}, "as stored before"
        else:
            collection = await self._collected(kind, path, requests)
            time_taken = {"time/collect_s": time.monotonic() - started}
            told = f"{time_taken['time/collect_s']:.0f} s"
        row = {
            "kind": kind,
            "iteration": 0,
            **evaluation_metrics(collection.rollouts),
            **collection_metrics(collection),
            **time_taken,
        }
        self._directory.append_metrics(row)
        self._reporter.say(
            f"{kind}: {row['eval/episodes']} episodes with {row['eval/outcome_reward']:.2f} "
            f"{outcome_name(row)} on average, {told}"
        )
        return finished_trajectories(collection.rollouts, kind)

    async def _collected(self, kind: str, path: Path, requests: Sequence[RolloutRequest]) -> Collection:
        """Collect, store, and only then look whether anything was finished."""

        def tell(done: int, total: int) -> None:
            self._reporter.stage(f"collect {kind}", done, total)

        spool = Spool.open(
            self._directory.spool_file(_FILES[kind]), requests,
            policy_version=0, gateway_url=None, tell=self._reporter.say,
        )  # fmt: skip
        collection = await collected(requests, self._collector, spool, tell, self._stop)
        if collection is None:
            raise Stopped(f"stopped while collecting ({kind}); a resumed run goes on from there")
        write_rollouts(path, collection.all)
        spool.remove()
        refuse_empty(collection, kind)
        await self._collector.ack(self._run_id, collection.all)
        return collection


def _collection_of(stored: Sequence[Rollout]) -> Collection:
    """A stored stage as it was collected; failures that a second attempt made good are not stored."""
    failed = tuple(rollout for rollout in stored if rollout.trajectory is None)
    codes = Counter(rollout.failure.code for rollout in failed if rollout.failure is not None)
    return Collection(tuple(item for item in stored if item.trajectory is not None), failed, codes)
