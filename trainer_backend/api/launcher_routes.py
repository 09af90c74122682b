"""/rl: jobs in the shape that existing launchers send, and what they ask about them."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from shared_schemas.base import OpenBody
from trainer_backend.api.finding import job_named
from trainer_backend.api.jobs_routes import CreateQuery, IdempotencyKey, Resolved
from trainer_backend.api.launcher import translated
from trainer_backend.api.posted import document_of
from trainer_backend.api.service import Service, service_of
from trainer_backend.api.submitting import Submission, digest_of, resolution, submit
from trainer_backend.api.task_app_trial import Verified, Verify, tried, verified
from trainer_backend.api.views import JobView, job_view
from trainer_backend.store.rows import JobRow

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
