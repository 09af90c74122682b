"""Routes that pause, resume and cancel a job; each may be sent at any moment, and repeated."""

from fastapi import APIRouter, Request

from trainer_backend.jobs.service import Service, job_named, refuse_foreign, service_of
from trainer_backend.jobs.states import Verb, changes_for
from trainer_backend.jobs.views import JobView, job_view
from trainer_backend.store import jobs
from trainer_backend.store.rows import JobRow

router = APIRouter(tags=["jobs"])


@router.post("/jobs/{job_id}/pause")
async def pause(request: Request, job_id: str) -> JobView:
    """Let it save what is finished, and end; `pausing` until then. A queued job waits for `resume`."""
    return await _asked(service_of(request), "pause", job_id)


@router.post("/jobs/{job_id}/resume")
async def resume(request: Request, job_id: str) -> JobView:
    """Queue a paused, failed or cancelled job again; it goes on from its newest checkpoint."""
    return await _asked(service_of(request), "resume", job_id)


@router.post("/jobs/{job_id}/cancel")
async def cancel(request: Request, job_id: str) -> JobView:
    """End it for good, in order; `cancelling` until then. What it has trained stays."""
    return await _asked(service_of(request), "cancel", job_id)


async def _asked(service: Service, verb: Verb, job_id: str) -> JobView:
    job = await ask_for(service, verb, await job_named(service, job_id))
    return await service.ask(job_view, job)


async def ask_for(service: Service, verb: Verb, job: JobRow) -> JobRow:
    """Write a verb into a job's row and return the row; the supervisor then does it.

    Raises:
        JobConflict: it makes no sense in the job's state, or another service runs it.
        RunsNoJobs: this service only shows runs.
    """
    refuse_foreign(service, job)
    now = service.store.clock()
    changed = await service.ask(
        jobs.change, service.store, job.id, lambda found: changes_for(verb, found, now)
    )
    service.changed(job.id)
    return changed
