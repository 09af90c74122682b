"""Routes that pause, resume and cancel a job. Each request may be repeated."""

from fastapi import APIRouter, Request

from trainer_backend.jobs.service import Service, find_job, refuse_foreign, service_of
from trainer_backend.jobs.states import Verb, changes_for
from trainer_backend.jobs.views import JobView, job_view
from trainer_backend.store import jobs
from trainer_backend.store.rows import JobRow

router = APIRouter(tags=["jobs"])


@router.post("/jobs/{job_id}/pause")
async def pause_job(request: Request, job_id: str) -> JobView:
    """Save finished work and end the process; the job is `pausing` until then.

    A queued job waits for `resume`.
    """
    return await _apply(service_of(request), "pause", job_id)


@router.post("/jobs/{job_id}/resume")
async def resume_job(request: Request, job_id: str) -> JobView:
    """Queue a paused, failed or cancelled job again; it continues from its newest checkpoint."""
    return await _apply(service_of(request), "resume", job_id)


@router.post("/jobs/{job_id}/cancel")
async def cancel_job(request: Request, job_id: str) -> JobView:
    """End a job for good; it is `cancelling` until its process has saved. Its results stay."""
    return await _apply(service_of(request), "cancel", job_id)


async def _apply(service: Service, verb: Verb, job_id: str) -> JobView:
    job = await apply_verb(service, verb, await find_job(service, job_id))
    return await service.ask(job_view, job)


async def apply_verb(service: Service, verb: Verb, job: JobRow) -> JobRow:
    """Write a verb into a job's row and return the row; the supervisor acts on it."""
    refuse_foreign(service, job)
    now = service.store.clock()
    row = await service.ask(
        jobs.change, service.store, job.id, lambda current: changes_for(verb, current, now)
    )
    service.changed(job.id)
    return row
