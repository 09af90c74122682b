"""From templates to responses: all is escaped, and no page may run or load what is not ours."""

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse

from trainer_backend.dashboard import figures

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
    text = (
        _environment()
        .get_template(f"{template}.html.jinja")
        .render({"here": "", "can_submit": False} | values)
    )
    # Half a surrogate pair, which a model may well write, has no UTF-8.
    return HTMLResponse(text.encode("utf-8", "replace"), status_code=status, headers=dict(HEADERS))


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
