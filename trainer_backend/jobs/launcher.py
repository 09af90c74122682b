"""The routes under /rl, which accept jobs in the form of other backends' launchers and translate their keys.

A request's body has synth-ai's form: `{job_type, compute, data: {endpoint_base_url, config, model}, tags}`.
Keys that have no meaning here are ignored, and the reply lists them.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Annotated, Any, Literal

from fastapi import Query, Request, Response
from pydantic import Field

from shared_schemas.base import OpenBody
from shared_schemas.rewards import CONSISTENT_STRATEGIES
from trainer_backend.errors import JobError
from trainer_backend.job.foreign_keys import NEW_NAMES
from trainer_backend.job.tables import HUB_NAME
from trainer_backend.jobs.posted import copy_table, parse_document, refuse_unwritable
from trainer_backend.jobs.router import Router
from trainer_backend.jobs.routes import CreateQuery, IdempotencyKey, Resolved
from trainer_backend.jobs.service import find_job, get_service, job_view
from trainer_backend.jobs.submission import Submission, hash_body, resolution, submit
from trainer_backend.jobs.task_app_trial import Verified, Verify, try_at_task_apps, verify
from trainer_backend.store.rows import JobView

# Published keys of other backends, by table. They are ignored, and the reply lists them.
NOT_READ = {
    "algorithm": ("type", "method", "variety"),
    "services": ("judge_url",),
    "model": ("trainer_mode", "label"),
    "rollout": ("batches_per_step", "ops"),
    "training": (
        "batch_size", "max_turns", "gradient_accumulation_steps", "max_accumulated_minibatch",
        "log_interval", "weight_sync_interval", "weight_sync", "async_semaphore_max",
    ),
}  # fmt: skip
# Published keys for the model and its origin.
_MODEL_NAMES = ("base", "source")
_OURS = ("preset", "path", "name")


def translate(
    config: dict[str, Any], *, task_url: str | None, model: str | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Translate the tables of a launcher's TOML into ours; return them and a sentence for each ignored key.

    `task_url` is `data.endpoint_base_url`. It replaces the TOML's URL, because the launcher has verified it.
    `model` is `data.model` or `data.base_model`.
    """
    refuse_unwritable(config)
    tables: dict[str, Any] = deepcopy(config)
    if tables.pop("type", "rl") != "rl":
        raise JobError(f"type is {config['type']!r:.80}; jobs for 'rl' alone are taken here")
    for published, ours in NEW_NAMES.items():
        _move(tables, published, ours)
    _refuse_other_strategies(tables)
    warnings = tuple(_leave_out(tables))
    _name_model(tables, model)
    _count_iterations(tables)
    if task_url is not None:
        tables["services"] = {**copy_table(tables, "services"), "task_url": task_url}
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
    if _pop(tables, "rollout.env_config.difficulty") is not None:
        yield "rollout.env_config.difficulty is not read; worlds differ by their seed alone"


def _move(tables: dict[str, Any], published: str, ours: str) -> None:
    """Rename a published key to ours. If both keys are present, their values must be equal."""
    value = _pop(tables, published)
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


def _pop(tables: dict[str, Any], dotted: str) -> Any:
    """Remove a dotted key and return its value, or None if the key is absent."""
    *parents, key = dotted.split(".")
    home: Any = tables
    for name in parents:
        home = home.get(name) if isinstance(home, dict) else None
    return home.pop(key, None) if isinstance(home, dict) else None


def _refuse_other_strategies(tables: dict[str, Any]) -> None:
    for place in ("training.step_rewards_strategy", "rollout.env_config.step_rewards.strategy"):
        strategy = _pop(tables, place)
        if strategy is not None and not (isinstance(strategy, str) and strategy in CONSISTENT_STRATEGIES):
            raise JobError(
                f"{place} is {strategy!r:.80}, and the trainer pays each unlocked achievement the same; "
                f"known: {', '.join(sorted(CONSISTENT_STRATEGIES))}",
                hint="A reward function of the operator can weigh achievements (docs/plugins.md).",
            )
    settings = copy_table(copy_table(tables, "rollout"), "env_config")
    if settings.get("step_rewards") == {}:  # all of its keys were moved
        _pop(tables, "rollout.env_config.step_rewards")


def _name_model(tables: dict[str, Any], model: str | None) -> None:
    table = copy_table(tables, "model")
    names = [str(table.pop(key)) for key in _MODEL_NAMES if table.get(key) is not None]
    names += [model] if model is not None else []
    if len(set(names)) > 1:
        raise JobError(f"the launcher names two models, {names[0]!r} and {names[1]!r}: give one")
    if names and not any(key in table for key in _OURS):
        table["name" if HUB_NAME.fullmatch(names[0]) else "path"] = names[0]
    tables["model"] = table


def _count_iterations(tables: dict[str, Any]) -> None:
    """Set training.iterations to num_epochs * iterations_per_epoch."""
    table = copy_table(tables, "training")
    epochs, each = table.pop("num_epochs", None), table.pop("iterations_per_epoch", None)
    if epochs is None and each is None:
        return
    factors = [1 if value is None else value for value in (epochs, each)]
    if not all(isinstance(value, int) for value in factors):
        raise JobError("training.num_epochs and training.iterations_per_epoch are whole numbers")
    table.setdefault("iterations", factors[0] * factors[1])
    tables["training"] = table


router = Router(tags=["launchers"])


class LauncherData(OpenBody):
    """A launcher's job; `config` is the whole TOML, as tables or as text."""

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
    """A job as in GET /jobs/{job_id}, with the field names of launchers."""

    job_id: str
    status: str


class LauncherReply(LauncherView):
    """The posted job, with warnings about it."""

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
    """Post a job in the form of another backend's launcher. The reply lists the keys that are ignored.

    The job's task apps check the job first. If one of them refuses it, the reply is an error with the reason.
    """
    service = get_service(request)
    config = body.data.config
    tables, not_read = translate(
        await service.checks.ask(parse_document, config) if isinstance(config, str) else config,
        task_url=body.data.endpoint_base_url,
        model=body.data.model or body.data.base_model,
    )
    warnings = (*(f"{name} is not read" for name in sorted(body.model_extra or ())),)
    if body.compute:
        warnings += ("compute is for other backends and is not read",)
    warnings += not_read
    submission = Submission(tables, hash_body(await request.body()), body.tags)
    if query.dry_run:
        resolved = await resolution(service, submission)
        warnings = (*warnings, *resolved.warnings, *await try_at_task_apps(resolved.toml))
        answer = Resolved(toml=resolved.toml, warnings=warnings)
        return Response(answer.model_dump_json(), media_type="application/json")
    job, is_new, doubts = await submit(service, submission, idempotency_key, try_at_task_apps)
    if not is_new:
        response.status_code = 200
        response.headers["Idempotency-Replayed"] = "true"
    view, all_told = await service.line.ask(job_view, job), (*warnings, *doubts)
    return LauncherReply(**dict(view), job_id=job.id, status=job.state, warnings=all_told)


@router.get("/api/rl/jobs/{job_id}", include_in_schema=False)
@router.get("/rl/jobs/{job_id}")
async def show_rl_job(request: Request, job_id: str) -> LauncherView:
    """Show one job as in GET /jobs/{job_id}, with the field names of launchers."""
    service = get_service(request)
    view = await service.line.ask(job_view, await find_job(service, job_id))
    return LauncherView(**dict(view), job_id=view.id, status=view.state)


@router.post("/api/rl/verify_task_app", include_in_schema=False)
@router.post("/rl/verify_task_app")
async def verify_task_app(request: Request, body: Verify) -> Verified:
    """Check that a task app answers this service and accepts its key. The task app must be an allowed one."""
    return await verify(body.endpoint_base_url, get_service(request).settings)
