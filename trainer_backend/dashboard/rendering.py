"""From templates to responses and saved files: all is escaped, and a page runs and loads nothing but ours."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse

from trainer_backend.dashboard import figures
from trainer_backend.dashboard.series import Chart, table

ROOT = Path(__file__).parent
STATIC = ROOT / "static"
# No inline script, no inline style, nothing from elsewhere: a rollout's text is only ever text.
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
    """A template of templates/, filled in; all that stands in `values` is escaped."""
    return HTMLResponse(_render(template, values), status_code=status, headers=dict(HEADERS))


def saved_page(template: str, charts: Sequence[Chart], **values: Any) -> bytes:
    """The same template as one HTML file that needs no other file, no service and no network.

    Styles, scripts and the values of `charts` stand in it, and its policy allows these scripts alone.
    """
    style, uplot, drawing = _assets()
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; "
        f"script-src '{_digest(uplot)}' '{_digest(drawing)}'; base-uri 'none'; form-action 'none'"
    )
    # No text of a run can end the element that it stands in.
    told = json.dumps([chart.as_json() for chart in charts], separators=(",", ":")).replace("<", "\\u003c")
    saved = {
        "policy": policy, "style": Markup(style), "uplot": Markup(uplot), "drawing": Markup(drawing),
        "charts": Markup(told), "tables": {chart.panel.key: (chart, table(chart)) for chart in charts},
    }  # fmt: skip
    return _render(template, {"saved": saved} | values)


def _render(template: str, values: Mapping[str, Any]) -> bytes:
    page = _environment().get_template(f"{template}.html.jinja")
    text = page.render({"here": "", "can_submit": False, "saved": None, **values})
    # Half a surrogate pair, which a model may well write, has no UTF-8.
    return text.encode("utf-8", "replace")


@cache
def _assets() -> tuple[str, str, str]:
    """The styles, uPlot and our own drawing, as they are embedded."""
    styles = [STATIC / "vendor/uplot/uPlot.min.css", STATIC / "turnwise.css"]
    scripts = [STATIC / "vendor/uplot/uPlot.iife.min.js", STATIC / "charts.js"]
    uplot, drawing = (path.read_text(encoding="utf-8") for path in scripts)
    return "\n".join(path.read_text(encoding="utf-8") for path in styles), uplot, drawing


def _digest(text: str) -> str:
    """As a Content-Security-Policy names an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def static_address(name: str) -> str:
    """Where a file of static/ is, under the digest of them all: a browser may keep it for good."""
    return f"/static/{version()}/{name}"


@cache
def version() -> str:
    """A digest of all static files: another one with every change of any of them."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for path in STATIC.rglob("*") if path.is_file()):
        digest.update(path.relative_to(STATIC).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def _environment() -> Environment:
    # Not select_autoescape: it goes by the file's ending, and .jinja is not one that it escapes.
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FileSystemLoader(ROOT / "templates"),
    )
    environment.filters |= {
        "static": static_address,
        "ago": figures.ago,
        "size": figures.size,
        "spaced": figures.spaced,
        "signed": figures.signed,
    }
    return environment
