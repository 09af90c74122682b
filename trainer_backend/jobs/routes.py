"""Routes for jobs, and for the service itself (health, info, metrics)."""

from typing import Annotated, Any, Literal

from fastapi import Header, Query, Request, Response
from pydantic import Field

from service_kit.observed import METRICS_CONTENT
from service_kit.release import version
from shared_schemas.base import Body
from trainer_backend.jobs.data_dir import forget_job
from trainer_backend.jobs.exposition import page
from trainer_backend.jobs.posted import Checked, PostedJob, check
from trainer_backend.jobs.router import Router
from trainer_backend.jobs.service import Service, find_job, get_service, job_view, refuse_foreign
from trainer_backend.jobs.states import Verb
from trainer_backend.jobs.submission import Submission, apply_verb, hash_body, resolution, submit
from trainer_backend.store import jobs
from trainer_backend.store.rows import JobState, JobView

router = Router(tags=["jobs"])

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        pattern=r"^[\x21-\x7e]+$",
        description="your name for this request: sent again, it is answered again and makes no second job",
    ),
]


class Created(JobView):
    """The posted job, with warnings about it."""

    warnings: tuple[str, ...] = ()


class Resolved(Body):
    """The reply to a dry run: the job's TOML with every default filled in, and warnings about the job."""

    toml: str
    warnings: tuple[str, ...]


class JobList(Body):
    """A page of jobs, newest first. Send `next_cursor` as `cursor` for the next page; null: there is none."""

    jobs: tuple[JobView, ...]
    next_cursor: str | None


class CreateQuery(Body):
    dry_run: bool = Field(default=False, description="check and resolve it only")


class ListQuery(Body):
    state: tuple[JobState, ...] = Field(default=(), description="only those; may be repeated")
    cursor: str | None = Field(default=None, max_length=20, description="`next_cursor` of the page before")
    limit: int = Field(default=50, ge=1, le=200)


class DeleteQuery(Body):
    files: bool = Field(default=False, description="delete its run directory too")


def job_body(*, as_json: bool) -> dict[str, Any]:
    """Return the OpenAPI description of a job as request body, for a route that parses the body itself."""
    text = {"schema": {"type": "string"}, "example": '[model]\npreset = "tiny-0.3m"\n'}
    content: dict[str, Any] = {"application/toml": text, "text/plain": text}
    if as_json:
        content["application/json"] = {"schema": PostedJob.model_json_schema()}
    return {"requestBody": {"required": True, "content": content}}


@router.post(
    "/jobs",
    status_code=201,
    response_model=Created,
    responses={200: {"model": Resolved | Created, "description": "A dry run, or the same request again"}},
    openapi_extra=job_body(as_json=True),
)
async def create_job(
    request: Request,
    response: Response,
    query: Annotated[CreateQuery, Query()],
    idempotency_key: IdempotencyKey = None,
) -> Any:
    """Post a job as TOML, or as JSON with its tables. The job is queued, then trained in its own process."""
    service = get_service(request)
    body, media_type = await request.body(), request.headers.get("content-type", "")
    submission = Submission(body, hash_body(body), media_type=media_type)
    if query.dry_run:
        resolved = await resolution(service, submission)
        answer = Resolved(toml=resolved.toml, warnings=resolved.warnings)
        return Response(answer.model_dump_json(), media_type="application/json")
    job, is_new, warnings = await submit(service, submission, idempotency_key)
    if not is_new:
        response.status_code = 200
        response.headers["Idempotency-Replayed"] = "true"
    response.headers["Location"] = f"/jobs/{job.id}"
    view = await service.line.ask(job_view, job)
    return Created(**dict(view), warnings=warnings)


@router.post("/jobs/check", openapi_extra=job_body(as_json=False))
async def check_job(request: Request) -> Checked:
    """List the errors and likely mistakes in a job's TOML, each with its line; nothing is stored."""
    service = get_service(request)
    return await service.checks.ask(check, await request.body(), service.settings.bounds)


@router.get("/jobs")
async def list_jobs(request: Request, query: Annotated[ListQuery, Query()]) -> JobList:
    """List jobs, newest first. Runs of `turnwise train` are included; their `origin` is cli."""
    service = get_service(request)
    page = await service.line.ask(
        jobs.find, service.store, states=query.state, cursor=query.cursor, limit=query.limit
    )
    views = await service.line.ask(lambda: tuple(map(job_view, page.items)))
    return JobList(jobs=views, next_cursor=page.cursor)


@router.get("/jobs/{job_id}")
async def show_job(request: Request, job_id: str) -> JobView:
    """Show one job by its id, by at least 6 leading characters of the id, or by a unique name."""
    service = get_service(request)
    return await service.line.ask(job_view, await find_job(service, job_id))


@router.get(
    "/jobs/{job_id}/config",
    response_class=Response,
    responses={200: {"content": {"application/toml": {"schema": {"type": "string"}}}}},
)
async def show_job_config(request: Request, job_id: str) -> Response:
    """Return the job's TOML with every default filled in; it can be posted again."""
    job = await find_job(get_service(request), job_id)
    return Response(job.config, media_type="application/toml")


@router.delete("/jobs/{job_id}", status_code=204, response_class=Response)
async def delete_job(request: Request, job_id: str, query: Annotated[DeleteQuery, Query()]) -> None:
    """Delete an ended or paused job of this service. The run directory stays unless `files` is set."""
    service = get_service(request)
    job = await find_job(service, job_id)
    refuse_foreign(service, job)
    try:
        await service.line.ask(forget_job, service.store, service.data, job, files=query.files)
    finally:  # even if the request timed out: the deletion may have started
        service.sweeper.wake()
    service.changed(job.id)


@router.post("/jobs/{job_id}/pause")
async def pause_job(request: Request, job_id: str) -> JobView:
    """Pause a job until `resume`. A queued job becomes `paused` at once.

    A running job is `pausing` until its process has saved the finished work and ended.
    """
    return await _apply(get_service(request), "pause", job_id)


@router.post("/jobs/{job_id}/resume")
async def resume_job(request: Request, job_id: str) -> JobView:
    """Queue a paused, failed or cancelled job again; it continues from its newest checkpoint."""
    return await _apply(get_service(request), "resume", job_id)


@router.post("/jobs/{job_id}/cancel")
async def cancel_job(request: Request, job_id: str) -> JobView:
    """Cancel a job. It is `cancelling` until its process has saved; `resume` can continue it later."""
    return await _apply(get_service(request), "cancel", job_id)


async def _apply(service: Service, verb: Verb, job_id: str) -> JobView:
    job = await apply_verb(service, verb, await find_job(service, job_id))
    return await service.line.ask(job_view, job)


info_router = Router(tags=["service"])

SERVICE = "turnwise-trainer"


class Health(Body):
    """The service is running. `store` is `away` while the database does not answer; jobs run without it."""

    status: Literal["ok"] = "ok"
    service: str = SERVICE
    store: Literal["up", "away"]


@info_router.get("/health")
async def show_health(request: Request) -> Health:
    """Report that the service is running. This request needs no key."""
    return Health(store="up" if get_service(request).watcher.store_up else "away")


class ServiceInfo(Body):
    name: str
    version: str
    home: str


class Limits(Body):
    max_jobs: int
    restarts: int
    stop_grace_s: float
    max_body_bytes: int
    max_streams: int


class PostedJobs(Body):
    """The folders, addresses, key variables and models that the operator lets posted jobs name."""

    roots: tuple[str, ...]
    task_urls: tuple[str, ...]
    inference_hosts: tuple[str, ...]
    key_variables: tuple[str, ...]
    models: tuple[str, ...]
    gateway_host: str | None


class Info(Body):
    """A description of the service. `runs_jobs` is false if the service only shows runs (--no-jobs)."""

    service: ServiceInfo
    store: str
    data_dir: str
    runs_jobs: bool
    limits: Limits
    posted_jobs: PostedJobs


@info_router.get("/info")
async def show_info(request: Request) -> Info:
    """Describe the service and what posted jobs may name."""
    service = get_service(request)
    settings = service.settings
    return Info(
        service=ServiceInfo(name=SERVICE, version=version(), home=service.data.home),
        store=service.store.shown,
        data_dir=str(service.data.path),
        runs_jobs=service.supervisor is not None,
        limits=Limits(
            **{name: getattr(settings, name) for name in Limits.model_fields}
            | {"max_jobs": settings.max_jobs if settings.jobs else 0}
        ),
        posted_jobs=PostedJobs(
            roots=(*map(str, settings.roots), str(settings.data_dir)),
            task_urls=tuple(sorted(settings.task_urls)),
            inference_hosts=tuple(sorted(settings.inference_hosts)),
            key_variables=tuple(sorted(settings.key_variables)),
            models=settings.models,
            gateway_host=settings.gateway_host,
        ),
    )


@info_router.get("/metrics", response_class=Response, responses={200: {"content": METRICS_CONTENT}})
async def show_metrics(request: Request) -> Response:
    """Return counts of the service and last metrics of running and recently ended jobs, for Prometheus."""
    service = get_service(request)
    accept = request.headers.get("accept", "")
    return await service.line.ask(page, service, version=request.app.version, accept=accept)
