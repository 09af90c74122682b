"""POST /rl/jobs: jobs in the shape that existing launchers send."""

from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from shared_schemas.base import OpenBody
from trainer_backend.api.jobs_routes import Created, IdempotencyKey
from trainer_backend.api.launcher import translated
from trainer_backend.api.posted import document_of
from trainer_backend.api.service import service_of
from trainer_backend.api.submitting import Submission, digest_of, submit
from trainer_backend.api.views import job_view

router = APIRouter(tags=["launchers"])


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


class LauncherReply(Created):
    """A job as POST /jobs answers it, with the names that launchers read."""

    job_id: str
    status: str


@router.post("/api/rl/jobs", status_code=201, include_in_schema=False)
@router.post("/rl/jobs", status_code=201, responses={200: {"model": LauncherReply}})
async def create_rl_job(
    request: Request, response: Response, body: LauncherJob, idempotency_key: IdempotencyKey = None
) -> LauncherReply:
    """Post a job as a launcher does. Keys of other backends are not read, and the reply names them."""
    service = service_of(request)
    config = body.data.config
    tables, warnings = translated(
        document_of(config) if isinstance(config, str) else config,
        task_url=body.data.endpoint_base_url,
        model=body.data.model or body.data.base_model,
    )
    sent = Submission(tables, digest_of(await request.body()), body.tags)
    job, made, found = await submit(service, sent, idempotency_key)
    if not made:
        response.status_code = 200
        response.headers["Idempotency-Replayed"] = "true"
    view = await service.ask(job_view, job)
    told = [f"{name} is not read" for name in sorted(body.model_extra or ())]
    told += ["compute is for other backends and is not read"] if body.compute else []
    all_warnings = (*told, *warnings, *found)
    return LauncherReply(**dict(view), warnings=all_warnings, job_id=job.id, status=job.state)
