"""Jobs in the shape that existing launchers send: the routes under /rl, and the translation into our keys.

A published key that means something here becomes our key; the reply names the other keys, which are not read.

The shape is that of synth-ai: `{job_type, compute, data: {endpoint_base_url, config, model}, tags}`.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from shared_schemas.base import OpenBody
from trainer_backend.errors import JobError
from trainer_backend.job.tables import HUB_NAME
from trainer_backend.jobs.posted import document_of, refuse_unwritable
from trainer_backend.jobs.routes import CreateQuery, IdempotencyKey, Resolved
from trainer_backend.jobs.service import Service, job_named, service_of
from trainer_backend.jobs.submitting import Submission, digest_of, resolution, submit
from trainer_backend.jobs.task_app_trial import Verified, Verify, tried, verified
from trainer_backend.jobs.views import JobView, job_view
from trainer_backend.store.rows import JobRow

# Published keys that only other backends know, by table. They are left out, and the reply says so.
NOT_READ = {
    "algorithm": ("type", "method", "variety"),
    "services": ("judge_url",),
    "model": ("trainer_mode", "label"),
    "rollout": ("batches_per_step", "ops"),
    "training": (
        "batch_size",
        "max_turns",
        "gradient_accumulation_steps",
        "max_accumulated_minibatch",
        "log_interval",
        "weight_sync_interval",
        "weight_sync",
        "async_semaphore_max",
    ),
}
# Published names of keys that have another name, or another table, here.
MOVED = {
    "training.lora": "lora",
    "lora.r": "lora.rank",
    **{
        f"rollout.policy_config.{key}": f"rollout.{key}"
        for key in ("temperature", "top_p", "top_k", "max_tokens")
    },
    "rollout.env_config.step_rewards.enabled": "training.step_rewards_enabled",
    "rollout.env_config.step_rewards.mode": "training.step_rewards_mode",
    "rollout.env_config.step_rewards.kind": "training.event_rewards_kind",
    "rollout.env_config.step_rewards.indicator_lambda": "training.step_rewards_indicator_lambda",
    "rollout.env_config.step_rewards.step_beta": "training.step_rewards_beta",
}
# How a decision is paid, where a launcher says it: what the trainer does anyway.
STRATEGIES = frozenset({"consistent", "simple", "consistent_stepwise", "decision_consistent"})
# Published names of the model, and of what it was trained from.
_MODEL_NAMES = ("base", "source")
_OURS = ("preset", "path", "name")


def translated(
    config: dict[str, Any], *, task_url: str | None, model: str | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """
    Args:
        config: the tables of the launcher's TOML.
        task_url: `data.endpoint_base_url`; it counts, as the launcher has tried it.
        model: `data.model` or `data.base_model`.

    Returns:
        The tables of a job of ours, and a sentence for each key that was not read.

    Raises:
        JobError: two models are named, epochs are no numbers, it is no job for RL, a key is given in two
            places with different values, or decisions are to be paid in another way than here.
    """
    refuse_unwritable(config)
    tables: dict[str, Any] = deepcopy(config)
    if tables.pop("type", "rl") != "rl":
        raise JobError(f"type is {config['type']!r:.80}; jobs for 'rl' alone are taken here")
    for published, ours in MOVED.items():
        _move(tables, published, ours)
    _refuse_other_strategies(tables)
    warnings = tuple(_leave_out(tables))
    _name_model(tables, model)
    _count_iterations(tables)
    if task_url is not None:
        tables["services"] = {**_table(tables, "services"), "task_url": task_url}
    return tables, warnings


def _leave_out(tables: dict[str, Any]) -> Iterator[str]:
    for name, keys in NOT_READ.items():
        table = tables.get(name)
        if not isinstance(table, dict):
            continue
        for key in keys:
            if key in table:
                del table[key]
                yield f"{name}.{key} is for other backends and is not read"
    if _taken(tables, "rollout.env_config.difficulty") is not None:
        yield "rollout.env_config.difficulty is not read; worlds differ by their seed alone"


def _move(tables: dict[str, Any], published: str, ours: str) -> None:
    """Put a key where ours is; given there too, both must say the same."""
    value = _taken(tables, published)
    if value is None:
        return
    *parents, key = ours.split(".")
    home = tables
    for name in parents:
        home = home.setdefault(name, {})
        if not isinstance(home, dict):
            raise JobError(f"{name} is {home!r:.80}, but it is a table")
    if home.setdefault(key, value) != value:
        raise JobError(f"{published} is {value!r:.80}, but {ours} is {home[key]!r:.80}: give one of them")


def _taken(tables: dict[str, Any], dotted: str) -> Any:
    """The value of a key, which is taken out; None where it is not given."""
    *parents, key = dotted.split(".")
    home: Any = tables
    for name in parents:
        home = home.get(name) if isinstance(home, dict) else None
    return home.pop(key, None) if isinstance(home, dict) else None


def _refuse_other_strategies(tables: dict[str, Any]) -> None:
    for place in ("training.step_rewards_strategy", "rollout.env_config.step_rewards.strategy"):
        strategy = _taken(tables, place)
        if strategy is not None and not (isinstance(strategy, str) and strategy in STRATEGIES):
            raise JobError(
                f"{place} is {strategy!r:.80}, and the trainer pays each unlocked achievement the same; "
                f"known: {', '.join(sorted(STRATEGIES))}",
                hint="A reward function of the operator can weigh achievements (docs/plugins.md).",
            )
    settings = _table(_table(tables, "rollout"), "env_config")
    if settings.get("step_rewards") == {}:  # all of it is moved
        _taken(tables, "rollout.env_config.step_rewards")


def _name_model(tables: dict[str, Any], model: str | None) -> None:
    table = _table(tables, "model")
    named = [str(table.pop(key)) for key in _MODEL_NAMES if table.get(key) is not None]
    named += [model] if model is not None else []
    if len(set(named)) > 1:
        raise JobError(f"the launcher names two models, {named[0]!r} and {named[1]!r}: give one")
    if named and not any(key in table for key in _OURS):
        table["name" if HUB_NAME.fullmatch(named[0]) else "path"] = named[0]
    tables["model"] = table


def _count_iterations(tables: dict[str, Any]) -> None:
    """num_epochs * iterations_per_epoch is what training.iterations counts."""
    table = _table(tables, "training")
    epochs, each = table.pop("num_epochs", None), table.pop("iterations_per_epoch", None)
    if epochs is None and each is None:
        return
    factors = [1 if value is None else value for value in (epochs, each)]
    if not all(isinstance(value, int) for value in factors):
        raise JobError("training.num_epochs and training.iterations_per_epoch are whole numbers")
    table.setdefault("iterations", factors[0] * factors[1])
    tables["training"] = table


def _table(tables: dict[str, Any], name: str) -> dict[str, Any]:
    found = tables.get(name, {})
    if not isinstance(found, dict):
        raise JobError(f"{name} is {found!r:.80}, but it is a table")
    return dict(found)


router = APIRouter(tags=["launchers"])

_JSON = "application/json"


class LauncherData(OpenBody):
    """`config` is the whole TOML, as tables or as text."""

    config: dict[str, Any] | str
    endpoint_base_url: str | None = Field(default=None, description="the task app; services.task_url")
    model: str | None = Field(default=None, description="the model to train, or")
    base_model: str | None = Field(default=None, description="the one to begin from")


class LauncherJob(OpenBody):
    job_type: Literal["rl"]
    data: LauncherData
    compute: dict[str, Any] | None = Field(default=None, description="for other backends; not read")
    tags: dict[str, str | int | float | bool] = Field(default_factory=dict)


class LauncherView(JobView):
    """A job as GET /jobs/{job_id} tells of it, with the names that launchers read."""

    job_id: str
    status: str


class LauncherReply(LauncherView):
    """The same of a new job, and what may still be wrong with it."""

    warnings: tuple[str, ...] = ()


@router.post("/api/rl/jobs", status_code=201, include_in_schema=False)
@router.post(
    "/rl/jobs",
    status_code=201,
    response_model=LauncherReply,
    responses={200: {"model": Resolved | LauncherReply}},
)
async def create_rl_job(
    request: Request,
    response: Response,
    body: LauncherJob,
    query: Annotated[CreateQuery, Query()],
    idempotency_key: IdempotencyKey = None,
) -> Any:
    """Post a job as a launcher does. Keys of other backends are not read, and the reply names them.

    The job's task apps are asked first: what they would refuse is refused here.
    """
    service = service_of(request)
    config = body.data.config
    tables, not_read = translated(
        document_of(config) if isinstance(config, str) else config,
        task_url=body.data.endpoint_base_url,
        model=body.data.model or body.data.base_model,
    )
    warnings = (*_not_read(body), *not_read)
    sent = Submission(tables, digest_of(await request.body()), body.tags)
    if query.dry_run:
        found = await resolution(service, sent)
        warnings = (*warnings, *found.warnings, *await tried(found.toml))
        return Response(Resolved(toml=found.toml, warnings=warnings).model_dump_json(), media_type=_JSON)
    job, made, doubts = await submit(service, sent, idempotency_key, tried)
    if not made:
        response.status_code = 200
        response.headers["Idempotency-Replayed"] = "true"
    return LauncherReply(**await _view(service, job), warnings=(*warnings, *doubts))


@router.get("/api/rl/jobs/{job_id}", include_in_schema=False)
@router.get("/rl/jobs/{job_id}")
async def show_rl_job(request: Request, job_id: str) -> LauncherView:
    """One job, as GET /jobs/{job_id} finds it."""
    service = service_of(request)
    return LauncherView(**await _view(service, await job_named(service, job_id)))


@router.post("/api/rl/verify_task_app", include_in_schema=False)
@router.post("/rl/verify_task_app")
async def verify_task_app(request: Request, body: Verify) -> Verified:
    """Whether a task app answers this service and takes its key. Only those that jobs may name are asked."""
    return await verified(body.endpoint_base_url, service_of(request).settings.bounds)


async def _view(service: Service, job: JobRow) -> dict[str, Any]:
    view = await service.ask(job_view, job)
    return {**dict(view), "job_id": job.id, "status": job.state}


def _not_read(body: LauncherJob) -> Iterator[str]:
    """What stands beside `data`."""
    for name in sorted(body.model_extra or ()):
        yield f"{name} is not read"
    if body.compute:
        yield "compute is for other backends and is not read"
