"""GET /env/{env_id}/view: a page for people that shows an environment as it is now, and goes on showing it.

One file, no script or style from elsewhere. The page asks for itself again every second and is told 304 while
nothing has happened. Watching is no use of the environment: it expires as if nobody looked.
"""

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping
from html import escape
from importlib.resources import files
from string import Template
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import HTMLResponse, Response

from task_app.errors import UnknownId, boundary
from task_app.guards.threads import Threads
from task_app.observing.pictures import Pictured, png
from task_app.observing.recent import RecentDecision
from task_app.services import services_of
from task_app.sessions import EnvironmentSession

router = APIRouter(prefix="/env", tags=["env"])

FRAME_SIDE = 144  # 9 cells of 16 pixels, as the textures are; the browser enlarges it
_PAGE = files("task_app.routes").joinpath("view.html").read_text(encoding="utf-8")


def _policy(page: str) -> str:
    """A Content-Security-Policy that lets the page's own script and style run, and nothing else."""
    allowed = {}
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        allowed[tag] = f"'sha256-{digest}'"
    return (
        f"default-src 'none'; img-src data:; connect-src 'self'; script-src {allowed['script']}; "
        f"style-src {allowed['style']}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


HEADERS = {
    "Content-Security-Policy": _policy(_PAGE),
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@router.get("/{env_id}/view", response_class=HTMLResponse)
async def view(request: Request, env_id: Annotated[str, Path(min_length=1, max_length=200)]) -> Response:
    """A page with its picture, text, facts and last decisions; a browser sends the key as a password."""
    services = services_of(request)
    session = services.environments.find(env_id)
    if session is None:
        raise UnknownId("env", env_id, where="env_id", hint="terminated, or idle for too long?")
    if request.headers.get("if-none-match") == (tag := _tag(env_id, session)):
        return Response(status_code=304, headers={**HEADERS, "ETag": tag})
    async with request.app.state.pictures, session.lock:
        tag = _tag(env_id, session)
        frame = await _frame(services.threads, session)
        main = "".join(_main(session, frame))
    title = f"{session.environment.name}, world {session.seed}"
    page = Template(_PAGE).substitute(tag=escape(tag), title=escape(title), where=escape(env_id), main=main)
    return HTMLResponse(page.encode("utf-8", "replace"), headers={**HEADERS, "ETag": tag})


def _tag(env_id: str, session: EnvironmentSession) -> str:
    """Another one whenever the page would be another."""
    shown = (
        f"{env_id}/{session.seed}/{session.turn}/{session.step_idx}/{session.over}/{session.observation.text}"
    )
    return f'"{hashlib.blake2b(shown.encode("utf-8", "replace"), digest_size=12).hexdigest()}"'


async def _frame(threads: Threads, session: EnvironmentSession) -> bytes | None:
    environment = session.environment
    if not isinstance(environment, Pictured):
        return None
    with boundary("environment.frame"):
        return await threads.run("environment.frame", lambda: png(environment.frame(FRAME_SIDE, FRAME_SIDE)))


def _main(session: EnvironmentSession, frame: bytes | None) -> Iterator[str]:
    observation = session.observation
    over = '<p class="over">The episode has ended.</p>' if session.over else ""
    yield f'{over}<div class="columns"><section>'
    if frame is not None:
        uri = base64.b64encode(frame).decode("ascii")
        yield f'<img alt="the game after decision {session.turn}" src="data:image/png;base64,{uri}">'
    yield f'<ul class="facts">{"".join(_facts(session))}</ul></section><section>'
    yield f"<pre>{escape(observation.text)}</pre></section></div>"
    yield f"<h2>Last decisions</h2>{_decisions(session)}"


def _facts(session: EnvironmentSession) -> Iterator[str]:
    """Counts of the session, and the plain numbers and words that the environment's data holds."""
    counts = session.observation.achievements_counts
    yield _fact("decisions", session.turn)
    yield _fact("env steps", session.step_idx)
    if counts:
        yield _fact("achievements", f"{sum(count > 0 for count in counts.values())} of {len(counts)}")
    yield from _plain(session.observation.data)


def _plain(data: Mapping[str, Any]) -> Iterator[str]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            numbers = {key: one for key, one in value.items() if type(one) in (int, float) and one}
            yield from (_fact(key, one) for key, one in numbers.items())
        elif isinstance(value, bool):
            yield _fact(name, "yes" if value else "no")
        elif isinstance(value, int | float | str):
            yield _fact(name, value)


def _fact(name: str, value: object) -> str:
    return f"<li>{escape(str(name))} <b>{escape(str(value))}</b></li>"


def _decisions(session: EnvironmentSession) -> str:
    if not session.recent:
        return '<p class="quiet">None yet.</p>'
    head = "<tr><th>turn</th><th>executed</th><th>reward</th><th>achieved</th></tr>"
    rows = "".join(_row(decision) for decision in reversed(session.recent))
    return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _row(decision: RecentDecision) -> str:
    executed = f"<code>{escape(', '.join(decision.executed))}</code>"
    if decision.invalid_reason is not None:
        executed += f' <span class="refused">{escape(decision.invalid_reason)}</span>'
    marks = "".join(
        f'<span class="{"first" if first else "again"}">{escape(name)}</span>'
        for name, first in decision.achieved()
    )
    reward = sum(decision.env_rewards)
    return (
        f'<tr><td class="number">{decision.turn}</td><td>{executed}</td>'
        f'<td class="number">{reward:g}</td><td>{marks or "&ndash;"}</td></tr>'
    )
