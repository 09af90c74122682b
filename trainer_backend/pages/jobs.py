"""Pages that change jobs: the form of a new job, and pause, resume and cancel."""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Annotated

from fastapi import Form, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from trainer_backend.errors import TrainerError
from trainer_backend.jobs.posted import Checked, Finding
from trainer_backend.pages.facts import to_begin_from
from trainer_backend.pages.page import (
    Action,
    Dashboard,
    Jobs,
    ReadOnly,
    frame,
    get_dashboard,
    page,
    page_router,
    takes_part,
)
from trainer_backend.pages.run import run_frame
from trainer_backend.store import jobs

router = page_router()

_MOST_CHARS = 1_000_000
Toml = Annotated[str, Form(max_length=_MOST_CHARS)]
# Each form has its own id, so a second click on its button starts no second job.
FormId = Annotated[str, Form(max_length=32, pattern="^[0-9a-f]*$")]


@router.get("/new", response_class=HTMLResponse)
def new(request: Request, like: str = "") -> Response:
    """Show the form of a new job, filled with the example or the earlier job that `like` names."""
    dashboard = get_dashboard(request)
    _desk(dashboard)
    examples = dict(dashboard.examples)
    if not like or like in examples:
        text = examples.get(like) or next(iter(examples.values()), "")
        return _show_form(request, text, like=like)
    job = jobs.get(dashboard.store, like)
    return _show_form(request, to_begin_from(job), like=like, start=[(like, f"the job {job.name}")])


@router.post("/new/check", response_class=HTMLResponse)
async def check(request: Request, toml: Toml = "") -> Response:
    """Check the form's text, which may be incomplete, and show what is wrong with it."""
    findings = await _desk(get_dashboard(request)).check(_lines(toml))
    return page("findings", findings=findings)


@router.post("/new", response_class=HTMLResponse)
async def submit(request: Request, toml: Toml = "", form: FormId = "") -> Response:
    """Queue the job and redirect to its page. If it is refused, show the form again with the error."""
    dashboard = get_dashboard(request)
    try:
        job = await _desk(dashboard).submit(_lines(toml), form)
    except TrainerError as error:
        if isinstance(error, ReadOnly):
            raise
        refused = Checked(ok=False, findings=(Finding(severity="error", text=str(error), line=None),))
        return _show_form(request, toml, findings=refused, status=error.status)
    return RedirectResponse(f"/runs/{job.id}", status_code=303)


@router.post("/runs/{job_id}/{action}", response_class=HTMLResponse)
async def control(request: Request, job_id: str, action: Action) -> Response:
    """Pause, resume or cancel a job, and show the head of its page with the new state."""
    await _desk(get_dashboard(request)).control(job_id, action)
    if not takes_part(request):
        return RedirectResponse(f"/runs/{job_id}", status_code=303)
    return page("head", **await asyncio.to_thread(run_frame, request, job_id, ""))


def _desk(dashboard: Dashboard) -> Jobs:
    if dashboard.jobs is None:
        raise ReadOnly("this service shows runs and begins none; start `turnwise trainer` for jobs")
    return dashboard.jobs


def _show_form(
    request: Request,
    toml: str,
    *,
    like: str = "",
    start: Sequence[tuple[str, str]] = (),
    findings: Checked | None = None,
    status: int = 200,
) -> Response:
    starts = [*start, *((name, name) for name, _ in get_dashboard(request).examples)]
    return page(
        "new", status=status, toml=toml, starts=starts, like=like, form_id=secrets.token_hex(8),
        findings=findings, **frame(request, "new"),
    )  # fmt: skip


def _lines(toml: str) -> str:
    """Convert the CR LF line ends, which browsers send, to LF."""
    return toml.replace("\r\n", "\n")
