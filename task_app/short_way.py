"""The short way of POST /env/step, as ASGI middleware: a decision that nothing delays is answered in one go.

A deadline, a lock, a thread and the memory of answers are for requests that wait or come twice. A plain one
does neither: its body is whole, it has no Idempotency-Key, nobody holds its session, and the environment
promises quick steps. It is answered here, before all of these and before FastAPI, which costs as much as a
step. What is not plain goes the long way, by the route, which also words what is wrong with a body.
"""

from typing import Any

from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from service_kit.gate import JSON_BODY
from service_kit.problems import problem_response
from task_app.errors import TaskAppError
from task_app.guards import once
from task_app.routes import steps
from task_app.routes.bodies import LONGEST_ID
from task_app.routes.wire import reply_body
from task_app.services import Services

# Where the long way ends; metrics count both ways under its path.
ROUTE = next(route for route in steps.router.routes if isinstance(route, APIRoute) and route.name == "step")
KEYS = steps.EnvStep.model_fields.keys()
JSON = b"application/json"


class ShortWay:
    """Wraps the long way; stands behind service_kit.gate, which has read the body.

    Args:
        app: the long way.
        services: with the sessions.
    """

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = self._answer(scope.pop(JSON_BODY, None)) if _may_be_plain(scope) else None
        except TaskAppError as error:
            scope["route"] = ROUTE
            await problem_response(error)(scope, receive, send)
            return
        if body is None:
            # The route reads the body for itself: a large one need not be there twice.
            scope.pop(JSON_BODY, None)
            await self._app(scope, receive, send)
            return
        scope["route"] = ROUTE
        headers = [(b"content-length", b"%d" % len(body)), (b"content-type", JSON)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _answer(self, body: Any) -> bytes | None:
        """The answer, or None when the long way has to find it: then nothing has been done yet.

        Raises:
            TaskAppError: there is no such session, or the decision was refused, or failed.
        """
        asked = _plain_body(body)
        if asked is None:
            return None
        env_id, tool_calls = asked
        session = self._services.environments.get(env_id, where="env_id")
        if not session.steps_at_once:
            return None
        return reply_body(steps.decide_at_once(self._services, session, tool_calls))


def _plain_body(body: Any) -> tuple[str, list[dict[str, Any]]] | None:
    """What a `steps.EnvStep` of two keys says; None for whatever its validation may have to look at."""
    if type(body) is not dict or body.keys() != KEYS:
        return None
    env_id, calls = body["env_id"], body["tool_calls"]
    plain = type(env_id) is str and type(calls) is list and all([type(call) is dict for call in calls])
    return (env_id, calls) if plain and 0 < len(env_id) <= LONGEST_ID else None


def _may_be_plain(scope: Scope) -> bool:
    """As far as its head tells."""
    if scope["type"] != "http" or scope["path"] != ROUTE.path or scope["method"] != "POST":
        return False
    headers = dict(scope["headers"])
    return headers.get(b"content-type") == JSON and once.HEADER not in headers
