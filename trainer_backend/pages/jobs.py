"""Pages that change something: the form of a new job, and what is asked of one that there is."""

import asyncio
import secrets
from typing import Annotated, Any

from fastapi import Form, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from trainer_backend.errors import TrainerError
from trainer_backend.pages.facts import to_begin_from
from trainer_backend.pages.page import (
    Action,
    Checked,
    Dashboard,
    Finding,
    Jobs,
    OnlyShows,
    dashboard_of,
    frame,
    page,
    page_router,
)
from trainer_backend.pages.run import names_of, run_frame
from trainer_backend.store import jobs
from trainer_backend.store.database import UnknownJob

router = page_router()

_MOST_CHARS = 1_000_000
Toml = Annotated[str, Form(max_length=_MOST_CHARS)]
# Made with each form, and sent with it: a second click on its button begins no second job.
FormId = Annotated[str, Form(max_length=32, pattern="^[0-9a-f]*$")]


@router.get("/new", response_class=HTMLResponse)
def new(request: Request, like: str = "") -> Response:
    """The form, with a job to begin from."""
    dashboard = dashboard_of(request)
    _desk(dashboard)
    examples = dict(dashboard.examples)
    text = examples.get(like) or next(iter(examples.values()), "")
    if like and like not in examples:
        text = to_begin_from(jobs.get(dashboard.store, like))
    return page("new", toml=text, **_form(request, dashboard, like))


@router.post("/new/check", response_class=HTMLResponse)
async def check(request: Request, toml: Toml = "") -> Response:
    """What is wrong with the text so far."""
    checked = await _desk(dashboard_of(request)).check(_lines(toml))
    return page("findings", checked=checked)


@router.post("/new", response_class=HTMLResponse)
async def submit(request: Request, toml: Toml = "", form: FormId = "") -> Response:
    """Begin the job, and show it; or the form again, with what is wrong."""
    dashboard = dashboard_of(request)
    try:
        job = await _desk(dashboard).submit(_lines(toml), form)
    except TrainerError as error:
        if isinstance(error, OnlyShows):
            raise
        again = _form(request, dashboard, "") | {"checked": Checked((Finding(str(error)),))}
        return page("new", status=error.status, toml=toml, **again)
    return RedirectResponse(f"/runs/{job.id}", status_code=303)


@router.post("/runs/{job_id}/{action}", response_class=HTMLResponse)
async def control(request: Request, job_id: str, action: Action) -> Response:
    """Pause, resume or cancel; the head of the page as it is then."""
    await _desk(dashboard_of(request)).control(job_id, action)
    if request.headers.get("HX-Request") != "true":
        return RedirectResponse(f"/runs/{job_id}", status_code=303)
    return page("head", **await asyncio.to_thread(run_frame, request, job_id, ""))


def _desk(dashboard: Dashboard) -> Jobs:
    if dashboard.jobs is None:
        raise OnlyShows("this service shows runs and begins none; start `turnwise trainer` for jobs")
    return dashboard.jobs


def _form(request: Request, dashboard: Dashboard, like: str) -> dict[str, Any]:
    starts = [(name, name) for name, _ in dashboard.examples]
    if like and like not in dict(dashboard.examples):
        try:
            (name,) = names_of([jobs.get(dashboard.store, like)])
            starts.insert(0, (like, f"the job {name}"))
        except UnknownJob:
            pass
    return {
        "starts": starts,
        "like": like,
        "form_id": secrets.token_hex(8),
        "checked": None,
        **frame(request, "new"),
    }


def _lines(toml: str) -> str:
    """A form sends its line ends as CR LF."""
    return toml.replace("\r\n", "\n")
