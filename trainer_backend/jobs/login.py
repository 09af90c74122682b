"""The log-in page, which exchanges the service's key for a cookie that scripts cannot read.

The browser also sends the cookie when a user follows a link from another site (SameSite=lax). Such a request
can only read: the gate (service_kit.gate) accepts changes only from the service's own pages.
"""

import math
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Form, Query, Request
from starlette.responses import RedirectResponse, Response

from trainer_backend.jobs.router import Router
from trainer_backend.jobs.service import get_service
from trainer_backend.jobs.sessions import COOKIE, SESSION_S
from trainer_backend.pages.page import page

router = Router(include_in_schema=False)
LOGIN = "/login"
_LONGEST = 2000
_WRONG = "That is not the key of this service."
_TOO_MANY = f"{_WRONG} Too many wrong ones came from here; the right one opens at any time."


@router.get(LOGIN)
async def ask(request: Request, next: Annotated[str, Query(max_length=_LONGEST)] = "/") -> Response:
    """Return the log-in form, or redirect to `next` if the service has no key."""
    if not get_service(request).keys.configured:
        return RedirectResponse(own_path(next), 303)
    return _form(request, own_path(next))


@router.post(LOGIN)
async def log_in(
    request: Request,
    key: Annotated[str, Form(max_length=_LONGEST)],
    next: Annotated[str, Form(max_length=_LONGEST)] = "/",
) -> Response:
    """Start a session for the right key. After several wrong keys, each further wrong key gets status 429.

    The right key always works. Otherwise a stranger could lock out everyone behind the same proxy.
    """
    service = get_service(request)
    if service.keys.opens(key):
        response = RedirectResponse(own_path(next), 303)
        response.set_cookie(
            COOKIE, service.sessions.cookie(), max_age=SESSION_S, httponly=True, samesite="lax",
            secure=request.url.scheme == "https",
        )  # fmt: skip
        return response
    address = request.client.host if request.client is not None else ""
    if wait_s := math.ceil(service.guesses.wait_s(address)):
        answer = _form(request, own_path(next), refused=_TOO_MANY, status=429)
        answer.headers["Retry-After"] = str(wait_s)
        return answer
    service.guesses.count(address)
    return _form(request, own_path(next), refused=_WRONG, status=401)


def _form(request: Request, next: str, *, refused: str = "", status: int = 200) -> Response:
    command = get_service(request).settings.key_command
    return page("login", status=status, next=next, refused=refused, key_command=command)


def own_path(path: str) -> str:
    """Return the path, or `/` if it leads to another host (`//host`, `/\\host`)."""
    parts = urlsplit(path)
    plain = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if plain and not parts.netloc and not parts.scheme else "/"
