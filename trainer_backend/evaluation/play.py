"""`turnwise eval`: lets a policy play a job's held-out worlds at task apps, over HTTP."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from service_kit.errors import ServiceError
from service_kit.logs import configure_logs_from
from shared_schemas.rollouts import RolloutRequest
from trainer_backend import job_parts
from trainer_backend.collect.batch import Batch, LossCheck
from trainer_backend.collect.dispatcher import Dispatcher
from trainer_backend.collect.endpoints import endpoint, sends_key_in_the_open, warmup_key
from trainer_backend.collect.plan import Inference, Planner, Players
from trainer_backend.errors import JobError
from trainer_backend.evaluation.result import EvaluationResult, evaluation_result
from trainer_backend.job.addresses import shown
from trainer_backend.job.environments import environment_names
from trainer_backend.job.load import LoadedJob, load_job
from trainer_backend.job.rollout_table import DataTable, WarmupTable
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.training_table import AlgorithmTable
from trainer_backend.plugins import ESTIMATORS
from trainer_backend.rundir.checkpoint_paths import find_run, model_in
from trainer_backend.rundir.data_record import find_differences
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.rollout_files import write_rollouts

Tell = Callable[[int, int], None]
# Typical length of a tool call in tokens. It holds for models whose tokenizer is not the job's.
_TOOL_CALL_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A language model in a Hugging Face folder."""

    folder: Path


@dataclass(frozen=True, slots=True)
class TaskAppPolicy:
    """A policy that the task app implements, such as crafter_teacher or random."""

    policy_name: str
    config: Mapping[str, Any] = field(default_factory=dict)


Player = Checkpoint | TaskAppPolicy | Inference
Play = Callable[[Sequence[RolloutRequest]], Coroutine[Any, Any, Batch]]


def player_of_flags(
    policy: str | None, model: str | None, inference_url: str | None, api_key_env: str | None
) -> TaskAppPolicy | Inference | None:
    """Return the player that the options of `turnwise eval` select.

    Return None without such options. The model that the command's argument names plays in this case.
    """
    if model is None and inference_url is None and api_key_env is None:
        return TaskAppPolicy(policy) if policy else None
    if policy is not None:
        raise JobError(
            f"--policy {policy} is played by the task app alone; leave out --model, --inference-url and "
            "--api-key-env, or --policy"
        )
    return endpoint(model, inference_url, api_key_env)


def what_to_evaluate(
    folder: Path | None,
    job_path: Path | None,
    player: TaskAppPolicy | Inference | None,
    overrides: Sequence[str] = (),
    job_to_play: Callable[[str, Sequence[str]], LoadedJob] | None = None,
) -> tuple[LoadedJob, Player]:
    """Convert the arguments of `turnwise eval` to a job and a player.

    Args:
        folder: a run (its best checkpoint plays), a checkpoint, a model folder, or an environment's name.
        job_path: a job TOML; None: the job of the run.
        player: plays instead of the folder's model; None: the folder's model plays.
        overrides: `table.key=value` for the job.
        job_to_play: makes a job from an environment's name; None: names are refused.
    """
    if folder is None and player is None:
        raise JobError(
            "give a run or model folder, or --policy with the name of a scripted policy, or --model with the "
            "--inference-url of its server"
        )
    run = find_run(folder) if folder is not None else None
    if job_to_play and folder and player and not job_path and _is_a_name(folder, run):
        return _with_advice(job_to_play(str(folder), overrides), player), player
    if job_path is None and run is None:
        raise JobError(f"{folder or 'a policy'} is no run with a job of its own: give --job JOB.toml")
    loaded = load_job(job_path or (run or Path()) / "job.toml", overrides, runs_plugins=False)
    if loaded.config.algorithm.advantage not in ESTIMATORS:  # an evaluation needs no estimator's plug-in
        config = loaded.config.model_copy(update={"algorithm": AlgorithmTable()})
        loaded = replace(loaded, config=config)
    if player is not None:
        if job_path is None and run == folder and str(folder) in environment_names():
            advice = f"{folder} is a run here, whose job is played, and not the environment of that name"
            loaded = replace(loaded, warnings=(*loaded.warnings, advice))
        return _with_advice(loaded, player), player
    assert folder is not None, "one of the two is given"
    return loaded, Checkpoint(model_in(folder))


def _is_a_name(folder: Path, run: Path | None) -> bool:
    """Return whether `folder` is to be read as an environment's name.

    The path must have one part. The folder must not exist, or be no run and have an environment's name.
    """
    if len(folder.parts) != 1:
        return False
    return not folder.exists() or (run != folder and str(folder) in environment_names())


def _with_advice(loaded: LoadedJob, player: TaskAppPolicy | Inference) -> LoadedJob:
    """Add warnings if a remote model plays with a low token limit, or gets its key unencrypted."""
    if isinstance(player, TaskAppPolicy):
        return loaded
    advice = []
    tokens = loaded.config.rollout.max_tokens
    if tokens < _TOOL_CALL_TOKENS:
        advice.append(
            f"rollout.max_tokens is {tokens}: enough for this job's own tokenizer perhaps, but others need "
            f"{_TOOL_CALL_TOKENS} and more for a tool call, and models that think, thousands"
        )
    if sends_key_in_the_open(player.url, has_key=player.key is not None):
        advice.append(f"the key goes to {shown(player.url)} unencrypted; prefer https")
    return replace(loaded, warnings=(*loaded.warnings, *advice))


async def evaluate(
    job: JobConfig,
    player: Player,
    tell: Tell | None = None,
    *,
    run: Path | None = None,
    keep: Path | None = None,
    repeats: int = 1,
) -> EvaluationResult:
    """Play every held-out world of the job, on its task apps.

    Sampling seeds are those of the evaluations in training, so a checkpoint plays as it did in training.

    Args:
        job: environment, limits, worlds ([evaluation]) and services.
        player: the policy to evaluate.
        tell: receives the number of ended episodes, and the number of all episodes.
        run: directory of the evaluated run. Rows get the ids that this run uses, and the result's setting
            describes how the data changed since the run began.
        keep: Parquet file to write all episodes to, also failed ones.
        repeats: how often each world is played. A larger number keeps the seeds of the earlier repeats.
    """
    configure_logs_from()
    record = None
    if run is None:
        data = await asyncio.to_thread(job_parts.data, job)
    else:
        data, record = await asyncio.to_thread(job_parts.data_of_run, job, open_run(run))
    server = player if isinstance(player, Inference) else None
    with task_app_log() as log:
        async with job_parts.task_apps(job, log, server, data=data) as apps:
            dispatcher = job_parts.dispatcher(job, apps)
            planner_for = partial(
                job_parts.planner, job, f"{job.job.name}.eval.{uuid4().hex[:12]}", data=data
            )
            play = partial(_play, dispatcher, tell)
            if isinstance(player, Checkpoint):
                batch = await job_parts.by_checkpoint(
                    job, player.folder,
                    lambda server: play(planner_for(server).evaluation("checkpoint", repeats=repeats)),
                )  # fmt: skip
            else:
                batch = await play(_plan(player, planner_for, job.warmup, repeats))
        if keep is not None:
            write_rollouts(keep, batch.all)
        LossCheck(log).refuse(batch, "evaluation")
    setting = _setting(planner_for().players, player, job.data)
    places = {}
    if data is not None and job.data is not None:
        places = {row.id: row.where for row in data.evaluation}
        if record is not None and (
            found := "; ".join(filter(None, find_differences(record, job.data, data)))
        ):
            setting["since the run began"] = found
    return evaluation_result(_name(player), batch, setting, row_places=places)


@contextmanager
def task_app_log() -> Iterator[Path]:
    """Yield the path of a task app's log file. Delete the file at the end unless it explains an error."""
    folder = Path(tempfile.mkdtemp(prefix="turnwise-eval-"))
    log, is_kept = folder / "task_app.log", False
    try:
        yield log
    except ServiceError as error:
        # A user's mistake (below 500) needs no log, since the message explains it.
        is_kept = error.status >= 500 and log.exists()
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder)


def _plan(
    player: TaskAppPolicy | Inference,
    planner_for: Callable[..., Planner],
    warmup: WarmupTable | None,
    repeats: int,
) -> list[RolloutRequest]:
    """Plan the episodes of an evaluation.

    `planner_for(server)` returns a planner for a policy that asks the model server `server`.
    """
    if isinstance(player, TaskAppPolicy):
        teacher, config = _teacher(warmup, player.policy_name)
        return planner_for(teacher).evaluation(
            "scripted", policy_name=player.policy_name, policy_config={**config, **player.config},
            repeats=repeats,
        )  # fmt: skip
    planner = planner_for(player)
    # Only Turnwise's gateways send token ids, and an evaluation does not need them.
    plain = {"ask_token_ids": False, **planner.players.rollout.policy_config}
    return planner.evaluation("model", policy_config=plain, repeats=repeats)


async def _play(dispatcher: Dispatcher, tell: Tell | None, plan: Sequence[RolloutRequest]) -> Batch:
    batch = await dispatcher.collect(plan, tell)
    await dispatcher.ack(plan[0].run_id, batch.all)
    return batch


def _teacher(warmup: WarmupTable | None, policy_name: str) -> tuple[Inference | None, Mapping[str, Any]]:
    """Return the teacher's model server and config; (None, {}) if `policy_name` is not the job's teacher."""
    if warmup is None or warmup.policy_name != policy_name:
        return None, {}
    config = warmup.policy_config
    url, model = config.get("inference_url"), config.get("model")
    server = Inference(url, str(model), warmup_key(warmup)) if isinstance(url, str) else None
    return server, config


def _name(player: Player) -> str:
    if isinstance(player, Inference):
        return f"{player.model} at {shown(player.url)}"
    return player.policy_name if isinstance(player, TaskAppPolicy) else str(player.folder)


def _setting(players: Players, player: Player, data: DataTable | None) -> dict[str, Any]:
    """Return the settings that influence the figures, by the names that are shown to the user."""
    rollout = players.rollout
    setting: dict[str, Any] = {
        "environment": f"{rollout.env_name} {rollout.env_config or ''}".strip(),
        "decisions at most": players.max_decisions,
    }
    if data is not None:
        setting["held-out rows"] = data.held_out
    if isinstance(player, TaskAppPolicy):
        return setting
    setting |= {
        "temperature": players.held_out.evaluation_temperature(players.rollout),
        "tokens a decision at most": rollout.max_tokens,
        **({"truncation": rollout.truncation} if rollout.is_truncated else {}),
    }
    return setting | ({"policy settings": rollout.policy_config} if rollout.policy_config else {})
