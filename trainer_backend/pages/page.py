"""What all pages share: the Dashboard object, templates, saved pages, and error pages."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse

from trainer_backend.errors import TrainerError
from trainer_backend.jobs.posted import Checked
from trainer_backend.pages import figures
from trainer_backend.pages.series import table
from trainer_backend.pages.stored import Frames
from trainer_backend.store.database import Store
from trainer_backend.store.rows import Job

Action = Literal["pause", "resume", "cancel"]


class Jobs(Protocol):
    """The operations with which pages check, start and control jobs. The jobs API implements them."""

    async def check(self, text: str) -> Checked: ...

    async def submit(self, text: str, form: str) -> Job:
        """Queue the job that `text` describes as TOML, and return it; raise TrainerError if it is refused.

        A repeated call with the same text and form id returns the job of the first call.
        """
        ...

    async def control(self, job_id: str, action: Action) -> Job:
        """Pause, resume or cancel a job; raise JobConflict if its state does not allow it."""
        ...


@dataclass(frozen=True, slots=True)
class Dashboard:
    store: Store
    jobs: Jobs | None  # None in a service that only shows runs
    clock: Callable[[], datetime]  # the date and time in UTC
    examples: tuple[tuple[str, str], ...] = ()  # (name, TOML) of the jobs with which the form can be filled
    frames: Frames = field(default_factory=Frames)


def get_dashboard(request: Request) -> Dashboard:
    dashboard = request.app.state.dashboard
    assert isinstance(dashboard, Dashboard)
    return dashboard


ROOT = Path(__file__).parent
STATIC = ROOT / "static"
# A page loads only our own files, so the text of a rollout can never become a script.
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


def page(template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """Render a template of the folder templates/. Every value is escaped for HTML."""
    return HTMLResponse(_render(template, values), status_code=status, headers=dict(HEADERS))


def list_page(template: str, **values: Any) -> HTMLResponse:
    """Render a page with a list, and let the address bar of the browser show `values["address"]`."""
    answer = page(template, **values)
    answer.headers["HX-Push-Url"] = values["address"]
    return answer


def takes_part(request: Request) -> bool:
    """Return whether a request needs only a part of the page, for example the list after a new filter."""
    return "HX-Request" in request.headers and "HX-History-Restore-Request" not in request.headers


def saved_page(template: str, drawn: Mapping[str, Any], **values: Any) -> bytes:
    """Render a template as one HTML file that needs no other file, no service and no network.

    The file contains the styles, the scripts and the chart values `drawn`, which `run_data.chart_data`
    returns. Its Content-Security-Policy lets no other script run.
    """
    style, uplot, drawing = _assets()
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; "
        f"script-src '{_digest(uplot)}' '{_digest(drawing)}'; base-uri 'none'; form-action 'none'"
    )
    # "<" is escaped, so that no text of a run can end the script element.
    chart_json = json.dumps(drawn, separators=(",", ":")).replace("<", "\\u003c")
    saved = {
        "policy": policy, "style": Markup(style), "uplot": Markup(uplot), "drawing": Markup(drawing),
        "charts": Markup(chart_json),
        "tables": {chart["key"]: (chart, table(chart)) for chart in drawn["charts"]},
    }  # fmt: skip
    return _render(template, {"saved": saved} | values)


def _render(template: str, values: Mapping[str, Any]) -> bytes:
    page = _environment().get_template(f"{template}.html.jinja")
    text = page.render({"here": "", "can_submit": False, "saved": None, **values})
    # A model may write a lone surrogate, which has no UTF-8 encoding.
    return text.encode("utf-8", "replace")


@cache
def _assets() -> tuple[str, str, str]:
    """Return the styles, the chart library uPlot, and our chart modules as texts for saved pages."""
    styles = [STATIC / "vendor/uplot/uPlot.min.css", STATIC / "turnwise.css"]
    uplot = (STATIC / "vendor/uplot/uPlot.iife.min.js").read_text(encoding="utf-8")
    modules = [(STATIC / name).read_text(encoding="utf-8") for name in ("curves.js", "charts.js")]
    # A saved page is one file, so its scripts cannot import modules.
    drawing = re.sub(r"(?m)^import .*\n", "", "".join(modules))
    return "\n".join(path.read_text(encoding="utf-8") for path in styles), uplot, drawing


def _digest(text: str) -> str:
    """Return the digest that names an inline script or style in a Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def version() -> str:
    """Return a digest of all static files."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for path in STATIC.rglob("*") if path.is_file()):
        digest.update(path.relative_to(STATIC).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def _environment() -> Environment:
    # select_autoescape would not escape templates whose names end in .jinja.
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FileSystemLoader(ROOT / "templates"),
    )
    environment.filters |= {
        # The digest in the address lets browsers cache static files for ever.
        "static": lambda name: f"/static/{version()}/{name}",
        "ago": figures.ago, "number": figures.number, "short": figures.short_id, "signed": figures.signed,
        "size": figures.size, "spaced": figures.spaced,
    }  # fmt: skip
    environment.globals["rollout_address"] = figures.rollout_address
    return environment


class PageRoute(APIRoute):
    """A route that answers a TrainerError or an invalid parameter with an error page and its status."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except TrainerError as error:
                return problem_page(request, error)
            except RequestValidationError as error:
                places = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
                return problem_page(request, BadAddress("; ".join(places)))

        return handled


def problem_page(request: Request, error: TrainerError) -> Response:
    return page(
        "problem",
        status=error.status,
        title=error.title,
        detail=error.detail if error.where is None else f"{error.where}: {error.detail}",
        hint=error.hint,
        **frame(request, ""),
    )


def frame(request: Request, here: str) -> dict[str, Any]:
    """Return the values that the frame of every page needs; `here` is the menu entry of the page."""
    return {"here": here, "can_submit": get_dashboard(request).jobs is not None}


def page_router() -> APIRouter:
    # The OpenAPI document omits pages, because it is for programs and pages are for people.
    return APIRouter(route_class=PageRoute, include_in_schema=False)


class BadAddress(TrainerError, code="address_invalid", status=400, title="Address cannot be read"):
    """An address with an invalid value, such as a malformed number."""


class UnknownTurn(TrainerError, code="turn_unknown", status=404, title="No such decision"):
    """An episode has no decision with the requested number."""


class ReadOnly(TrainerError, code="only_shows", status=403, title="This service begins no jobs"):
    """A service that only shows runs was asked to start or control a job."""
