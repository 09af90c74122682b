"""The routes by which a run controls a gateway of its own, beside the gateway and under a key of their own.

`inference.versions` names them; the other side is `run.gateways`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pydantic import SecretStr, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from service_kit.problems import install_problem_handlers
from trainer_backend.errors import BadChatRequest
from trainer_backend.inference.asgi import error_response
from trainer_backend.inference.gateway import GatewayLimits, gate_for
from trainer_backend.inference.versions import CONTROL, LOAD, PROBE, TOTALS, VERIFY, PolicyVersion


class Controlled(Protocol):
    """The actor of a gateway that runs as a process of its own."""

    async def load(self, version: PolicyVersion) -> None:
        """Serve this version from now on; WeightsRefused where the one before goes on serving."""

    def totals(self) -> Mapping[str, float]:
        """The counts since the start."""

    async def probe(self) -> None:
        """Return once its engine has given a sign of life."""


class ControlledGateway:
    """An ASGI app: the gateway, and the control routes, which have a key of their own.

    `verify` checks the policies other than the actor, and returns a line for each.
    """

    def __init__(
        self, gateway: ASGIApp, actor: Controlled, verify: Callable[[], Sequence[str]], *, key: SecretStr
    ) -> None:
        self._gateway, self._actor, self._check = gateway, actor, verify
        routes = [
            Route(LOAD, self._load, methods=["POST"]),
            Route(TOTALS, self._totals, methods=["GET"]),
            Route(PROBE, self._probe, methods=["GET"]),
            Route(VERIFY, self._verify, methods=["GET"]),
        ]
        self._control = Starlette(routes=routes, middleware=[gate_for(key, GatewayLimits())])
        install_problem_handlers(self._control, error_response)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_control = scope["type"] == "http" and scope["path"].startswith(CONTROL)
        await (self._control if is_control else self._gateway)(scope, receive, send)

    async def _load(self, request: Request) -> Response:
        try:
            version = PolicyVersion.model_validate_json(await request.body())
        except ValidationError as error:
            raise BadChatRequest(f"the body is no version of a policy: {error}") from error
        await self._actor.load(version)
        return JSONResponse({"version": version.number})

    async def _totals(self, request: Request) -> Response:
        return JSONResponse(dict(self._actor.totals()))

    async def _probe(self, request: Request) -> Response:
        await self._actor.probe()
        return JSONResponse({})

    async def _verify(self, request: Request) -> Response:
        return JSONResponse({"lines": list(await asyncio.to_thread(self._check))})
