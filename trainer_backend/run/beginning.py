"""Prepares the policy that RL starts from: loads a checkpoint, or makes a new policy and warms it up."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from shared_schemas.rollouts import RolloutRequest
from shared_schemas.trajectory import Trajectory
from trainer_backend import job_parts
from trainer_backend.collect.batch import NOTABLE_SHARE, Batch, LossCheck
from trainer_backend.collect.dispatcher import Dispatcher
from trainer_backend.collect.endpoints import warmup_key
from trainer_backend.collect.first_prompts import FirstPrompts
from trainer_backend.collect.losses import NAMES_BEFORE_RL
from trainer_backend.collect.metrics import (
    batch_metrics,
    evaluation_metrics,
    finished_trajectories,
    outcome_name,
)
from trainer_backend.collect.plan import Planner
from trainer_backend.collect.sources import Rows
from trainer_backend.errors import RunDirectoryError
from trainer_backend.job.rollout_table import RolloutTable
from trainer_backend.job.tables import InferenceTable, ModelTable
from trainer_backend.parts import Learner, LearnerFactory, Progress, Reporter
from trainer_backend.plugins import estimator
from trainer_backend.run.fixed_setup import FixedSetup
from trainer_backend.run.run import collected
from trainer_backend.run.stopping import Tell, until, until_on_thread
from trainer_backend.rundir.checkpoint_paths import (
    CRITIC_FILE,
    STARTED_FROM,
    TRAINING_FOLDER,
    VALUE_HEAD_FILE,
    latest_checkpoint,
)
from trainer_backend.rundir.fixed_record import FixedModel, begin_record, continue_record
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_files import read_rollouts, rollout_ids, write_rollouts
from trainer_backend.rundir.spool import (
    Part,
    Spool,
    add_stored,
    copy_others_aside,
    find_missing,
    name_requests,
    plan_id,
    rename_aside,
    set_aside,
)

if TYPE_CHECKING:  # imports torch, which an orchestrator that serves no policy does not need
    from trainer_backend.run.fixed_policies import FixedPolicies

Result = TypeVar("Result")
# Episodes of random play that a preset's tokenizer is trained on when the job has no warm-up.
_PROMPT_EPISODES = 64
# Kind of a metrics row before RL -> name of the file under rollouts/ that contains its episodes.
_FILES = {"teacher": "warmup", "prompts": "prompts"}


class Stopped(Exception):
    """Raised if a signal stops the run before anything is saved. `run_job` prefixes "stopped by SIGNAL"."""


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """The parts of a job from which the models of its run are made."""

    table: ModelTable
    inference: InferenceTable
    learners: LearnerFactory
    fixed: FixedSetup
    """With [cluster], only `folders` is set: the gateways load the fixed policies, this process does not."""
    rollout: RolloutTable


def can_finish(answer_tokens: float, rollout: RolloutTable) -> bool:
    """Return whether `rollout.max_tokens` is enough for an answer of this many tokens.

    `answer_tokens` counts the stop token, but the stop token needs no place in `max_tokens`. If tool calls
    are forced, the prompt contains the first token of the call, so this token needs no place either.
    """
    return answer_tokens - 1 - rollout.forces_call <= rollout.max_tokens


class Models(NamedTuple):
    """The models that a run has loaded before it continues or begins."""

    learner: Learner | None
    """None for a preset whose tokenizer must first be trained on prompts that `Beginning.begin` collects."""
    fixed: "FixedPolicies | None"
    """None if this process serves no fixed policies."""
    progress: Progress
    checkpoint: Path | None = None
    """The checkpoint from which the run continues; None if the run starts from the beginning."""


class Beginning:
    """Prepares the policy that RL starts from: a checkpoint's policy, or a new one after its warm-up.

    Call `load` first, which raises an error if the job cannot run, and then `begin`.
    """

    def __init__(
        self,
        directory: RunDirectory,
        planner: Planner,
        setup: ModelSetup,
        *,
        dispatcher: Dispatcher,
        reporter: Reporter,
        stop: asyncio.Event,
    ) -> None:
        self._directory, self._planner, self._setup = directory, planner, setup
        self._dispatcher, self._reporter, self._stop = dispatcher, reporter, stop

    async def load(self, *, resume: bool) -> Models:
        """Load the newest checkpoint if `resume` is true, otherwise the models that the job names.

        If `resume` finds no checkpoint, the run starts over.
        """
        checkpoint = latest_checkpoint(self._directory.checkpoints) if resume else None
        if resume and checkpoint is None:
            self._reporter.say("no checkpoint yet: the run starts over")
        if checkpoint is None:
            return await self._load_fresh()
        await self._plan_memory(checkpoint)
        learner, progress = await asyncio.to_thread(self._setup.learners.resumed, checkpoint)
        fixed = await self._load_fixed(learner)
        self._say_all(continue_record(self._directory, _list_models(fixed)))
        await self._measure_rows(learner)
        return Models(learner, fixed, progress, checkpoint)

    async def begin(self, models: Models) -> tuple[Learner, Progress]:
        """Return the learner and the progress from which RL continues.

        Without a checkpoint, first play the episodes for the tokenizer or the warm-up, and run the warm-up.
        """
        learner, _, progress, checkpoint = models
        if checkpoint is not None:
            assert learner is not None, "a checkpoint was loaded"
            self._continue_from(checkpoint, progress)
            return learner, progress
        teacher = self._planner.teacher
        if teacher is None:
            plan = self._planner.prompts(_PROMPT_EPISODES) if learner is None else []
            prompts = await self._play("prompts", plan)
            learner = learner or await self._learner(prompts)
            self._leave_spools("teacher", *([] if plan else ["prompts"]))
            return learner, progress
        episodes = await self._play("teacher", self._planner.warmup(warmup_key(teacher)))
        learner = learner or await self._learner(episodes)
        await self._warm_up(learner, episodes)
        return learner, progress

    async def _load_fresh(self) -> Models:
        # First, because later steps replace the metrics and the job that describe the last start's rollouts.
        self._say_all([await asyncio.to_thread(self._keep_stored)])
        self._directory.go_back_to(-1, self._reporter.say)
        await self._plan_memory(None)
        # A model with weights is loaded before minutes of rollouts, so that a mistake in it shows at once. A
        # preset without fixed policies waits for the prompts that its tokenizer is trained on.
        waits = self._setup.table.preset is not None and not self._setup.fixed.folders
        learner = None if waits else await self._learner([])
        fixed = None if learner is None else await self._load_fixed(learner)
        begin_record(self._directory, _list_models(fixed))
        return Models(learner, fixed, Progress())

    def _keep_stored(self) -> str | None:
        """Save rollouts that earlier starts played before RL, because this start replaces their file.

        If the spool lacks rollouts of the Parquet file, they are copied to the spool. If it is unknown which
        requests these rollouts answer, the Parquet file is renamed and nothing is copied. Returns a sentence
        for the user; None if nothing was done.
        """
        kind = "prompts" if self._planner.teacher is None else "teacher"
        path, spool = self._directory.rollouts_file(_FILES[kind]), self._directory.spool_file(_FILES[kind])
        if not (path.exists() or spool.exists()):
            return None
        job = self._directory.job()
        source = self._planner.source
        data = source.data if isinstance(source, Rows) else None
        requests = []  # the earlier plan is unknown if only one of the two jobs has data
        if (job.data is None) == (data is None):
            planner = job_parts.planner(job, self._planner.run_id, data=data)
            requests = planner.warmup() if kind == "teacher" else planner.prompts(_PROMPT_EPISODES)
        parts = name_requests(spool, requests, ())
        if _names_all(parts, path):
            return None
        # The stored job tells which requests were answered only if it is of the start that wrote the metrics
        # row. It is, except with a cluster: a start drops the old row before it replaces the job. With data,
        # its rows may have changed. A start that played nothing wrote a metrics row without a time.
        is_known = (job.data, job.cluster) == (None, None) and any(
            row["kind"] == kind and "time/collect_s" in row for row in self._directory.metrics()
        )
        return _spool_stored(path, spool, parts, requests if is_known else [])

    def _continue_from(self, checkpoint: Path, progress: Progress) -> None:
        version = progress.policy_version if self._planner.table.max_staleness else None
        self._directory.go_back_to(progress.iteration, self._reporter.say, policy_version=version)
        self._leave_spools(*_FILES)
        self._reporter.say(f"resumed from {checkpoint}")
        advantage, critic = self._planner.algorithm.advantage, self._planner.table.critic
        missing = self._directory.missing_rows(progress.iteration)
        self._say_all([missing, told_on_resume(advantage, checkpoint, critic=critic)])

    def _leave_spools(self, *kinds: str) -> None:
        """Rename the spools of these stages before RL, because this start does not play the stages."""
        for kind in kinds:
            spool = self._directory.spool_file(_FILES[kind])
            if spool.exists():
                set_aside(spool, self._reporter.say, why="for a stage that this start does not play")

    async def _load_fixed(self, learner: Learner) -> "FixedPolicies | None":
        setup = self._setup
        if not setup.fixed.tables:
            return None
        from trainer_backend.learner.learner import LocalLearner

        assert isinstance(learner, LocalLearner), "with [cluster] the gateways load them"
        loading = setup.fixed.load(learner.facts(), setup.inference, self._reporter.say)
        fixed = await until(self._stop, loading)
        if fixed is None:
            raise Stopped("before anything was played; nothing new to save")
        return fixed

    async def _plan_memory(self, checkpoint: Path | None) -> None:
        """Report the memory that the run will need; raise an error if it cannot fit. Reads no weights."""
        folders = list(self._setup.fixed.folders.values())
        lines = (await asyncio.to_thread(self._setup.learners.plan_memory, checkpoint, folders)).splitlines()
        for plan in lines[:1]:
            self._reporter.say(plan)
        for slow in lines[1:]:
            self._reporter.note(slow)

    async def _learner(self, prompts: Sequence[Trajectory]) -> Learner:
        only = ", which samples only the words of its tool" if self._setup.table.only_tool_words else ""
        self._reporter.say(f"model: {self._setup.table.source}{only}")
        folder = next(iter(self._setup.fixed.folders.values()), None)
        learner = await asyncio.to_thread(self._setup.learners.fresh, prompts, folder)
        await self._measure_rows(learner)
        return learner

    async def _measure_rows(self, learner: Learner) -> None:
        """Report data-set rows whose prompts are too long. Raise DataError if no row of a split fits."""
        prompts = FirstPrompts.of(self._planner)
        if prompts is None:
            return
        lines = await self._on_thread("measure rows", partial(prompts.report, learner.find_long))
        if lines is None:
            raise Stopped("while the rows were measured; nothing new to save")
        self._say_all(lines)

    async def _on_thread(self, stage: str, work: Callable[[Tell], Result]) -> Result | None:
        """Run `work` on a thread, report its progress and return its result; None if a stop came first."""
        return await until_on_thread(self._stop, partial(self._reporter.stage, stage), work)

    def _say_all(self, lines: Iterable[str | None]) -> None:
        for line in filter(None, lines):
            self._reporter.say(line)

    async def _warm_up(self, learner: Learner, episodes: Sequence[Trajectory]) -> None:
        started = time.monotonic()
        metrics = await self._on_thread("warm-up", partial(learner.warm_up, episodes))
        if metrics is None:
            raise Stopped("in the warm-up; nothing to save yet")
        row = {"kind": "warmup", "iteration": 0, **metrics, "time/warmup_s": time.monotonic() - started}
        self._directory.append_metrics(row)
        # The warm-up took minutes, so it is saved before anything else can fail. The row is written first:
        # after a kill between the two, the warm-up and its row are repeated. A checkpoint written before its
        # row would never get one.
        await asyncio.to_thread(learner.save, self._directory.checkpoints / STARTED_FROM, Progress())
        spool = self._directory.spool_file(_FILES["teacher"])
        await asyncio.to_thread(copy_others_aside, spool, episodes, self._reporter.say)
        self._leave_spools("prompts")
        self._directory.remove_spools(0)
        self._reporter.say(
            f"warm-up: {metrics['warmup/examples']:.0f} decisions of the teacher, "
            f"loss {metrics['warmup/loss']:.3f} nats a token, {row['time/warmup_s']:.0f} s"
        )
        longest, rollout = metrics["warmup/answer_tokens_max"], self._setup.rollout
        if not can_finish(longest, rollout):
            self._reporter.say(
                f"warm-up: the teacher's longest answer has {longest:.0f} tokens, and rollout.max_tokens "
                f"({rollout.max_tokens}) cuts the policy's own short: a cut answer calls no tool"
            )

    async def _play(self, kind: str, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        """Play the requests, reusing rollouts of an interrupted run, and return the finished episodes."""
        if not requests:
            return []
        started = time.monotonic()
        batch = await self._collect(kind, requests)
        duration_s = time.monotonic() - started
        row = {
            "kind": kind,
            "iteration": 0,
            **evaluation_metrics(batch.rollouts),
            **batch_metrics(batch),
            "time/collect_s": duration_s,
        }
        self._directory.append_metrics(row)
        losses = batch.losses
        total = f" of {losses.total}" if losses.lost else ""
        self._reporter.say(
            f"{kind}: {row['eval/episodes']}{total} episodes with {row['eval/outcome_reward']:.2f} "
            f"{outcome_name(row)} on average, {duration_s:.0f} s"
        )
        if kind == "teacher" and losses.share >= NOTABLE_SHARE:
            self._reporter.say(
                f"the warm-up imitates {losses.total - losses.lost} of the {losses.total} games that were "
                f"planned: {losses.share:.0%} are missing"
            )
        return finished_trajectories(batch.rollouts, kind)

    async def _collect(self, kind: str, requests: Sequence[RolloutRequest]) -> Batch:
        """Collect and store the rollouts for these requests. Then end the run if too many of them were lost.

        The spool stays until RL's first policy is saved. Until then a new start plays only the rollouts that
        the spool lacks: lost ones, and those that a changed job adds.
        """
        tell = partial(self._reporter.stage, f"collect {kind}")
        spool = Spool.open(
            self._directory.spool_file(_FILES[kind]), requests,
            versions=range(1), gateway_urls=(), tell=self._reporter.say,
        )  # fmt: skip
        batch = await collected(requests, self._dispatcher, spool=spool, tell=tell, stop=self._stop)
        if batch is None:
            raise Stopped(f"while collecting ({kind}); a resumed run goes on from there")
        spool.flush()  # before the Parquet file, which marks the stage as complete and replaces an older file
        write_rollouts(self._directory.rollouts_file(_FILES[kind]), batch.all)
        most, log = self._planner.table.max_lost_share, self._directory.task_app_log
        losses = LossCheck(log, most, self._reporter.say, self._directory.append_last_stage)
        losses.report(batch, NAMES_BEFORE_RL[kind])
        losses.refuse(batch, NAMES_BEFORE_RL[kind], 0)
        await self._dispatcher.ack(self._planner.run_id, batch.all)
        return batch


def _names_all(parts: Sequence[Part], path: Path) -> bool:
    """Return whether a single part of the spool contains all rollouts of the Parquet file `path`.

    Only ids are compared, because parsing 300 MB of rollouts takes half a minute.
    """
    held = [{plan_id(one.rollout_id) for one in part.rollouts} for part in parts]
    try:
        ids = {plan_id(rollout_id) for rollout_id in rollout_ids(path)}
    except (FileNotFoundError, RunDirectoryError):
        return False
    return any(ids <= names for names in held)


def _spool_stored(
    path: Path, spool: Path, parts: Sequence[Part], requests: Sequence[RolloutRequest]
) -> str | None:
    """Append to the spool those rollouts of the Parquet file `path` that the spool lacks.

    If `requests` do not match or the file is damaged, rename it. Returns a sentence for the user, or None.

    Args:
        parts: the parts of the spool.
        requests: the requests that the stored rollouts answer; empty if unknown.
    """
    try:
        missing = find_missing(parts, read_rollouts(path))
    except FileNotFoundError:
        return None
    except RunDirectoryError as error:
        return _set_aside(path, str(error))
    if not missing:
        return None
    seeds = {plan_id(request.rollout_id): request.start.seed for request in requests}
    if any(
        (None if one.trajectory is None else one.trajectory.seed) != seeds.get(plan_id(one.rollout_id))
        for one in missing
    ):
        why = (
            f"{spool.name} lacks {len(missing)} of its rollouts, and which requests they answer is not known"
        )
        return _set_aside(path, why)
    add_stored(spool, requests, missing)
    return f"{len(missing)} rollouts of {path.name} are in {spool.name} now"


def _set_aside(path: Path, why: str) -> str:
    return f"{path.name} is left as {rename_aside(path).name}, and what it holds is asked for again: {why}"


def _list_models(fixed: "FixedPolicies | None") -> Mapping[str, FixedModel]:
    return {} if fixed is None else fixed.models


def told_on_resume(advantage: str, checkpoint: Path, *, critic: str = "head") -> str | None:
    """Describe how the checkpoint's critic differs from the one that the job needs; None if it does not."""
    if checkpoint.name == STARTED_FROM:  # before RL, so no critic has learned yet
        return None
    needed = estimator(advantage).needs_values
    there, has_own = (
        (checkpoint / TRAINING_FOLDER / name).exists() for name in (VALUE_HEAD_FILE, CRITIC_FILE)
    )
    fresh = "a fresh one begins, all values 0"
    if needed and critic == "own" and not has_own:
        missing = f"{checkpoint.name} has no critic with layers of its own"
        return f"{missing}, which training.critic = 'own' needs: {fresh}"
    if needed and critic == "head" and has_own:
        left = f"the critic of {checkpoint.name} has layers of its own and is left behind"
        return f"{left}: training.critic = 'head' reads the policy's; {fresh}"
    name = f"algorithm.advantage = {advantage!r}"
    if needed and not there:
        return f"{checkpoint.name} has no value head, which {name} needs: {fresh}"
    if there and not needed:
        return f"the value head of {checkpoint.name} is left behind: {name} needs none"
    return None
