"""One environment of a task app, stepped from here over HTTP: /env/create, /env/step, /env/{id}/frame."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx
from pydantic import SecretStr

from shared_schemas.messages import ToolCall
from trainer_backend.collect.answers import TaskAppLost
from trainer_backend.errors import TaskAppError

_NOT_FOUND = 404


class NoPictures(TaskAppError):
    """There are none of an episode, and asking again would change nothing."""

    code = "no_pictures"


class EnvironmentClient:
    """Use as an async context manager: it creates the environment, and terminates it at the end.

    Args:
        url, api_key, name: of the task app, as its TaskAppClient has them.
        env_name, config, seed: what to create.
        timeout_s: deadline of one request.
    """

    def __init__(
        self, url: str, api_key: SecretStr, *, env_name: str, config: Mapping[str, Any], seed: int,
        timeout_s: float, name: str = "",
    ) -> None:  # fmt: skip
        self._url = url
        self._wanted = {"env_name": env_name, "config": dict(config), "seed": seed}
        headers = {"X-API-Key": api_key.get_secret_value()} | ({"Host": name} if name else {})
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout_s)
        # Whom a certificate must be for, where that is not the host of the URL.
        self._extensions = {"sni_hostname": name.rpartition(":")[0]} if name else {}
        self._env_id = ""

    async def __aenter__(self) -> Self:
        try:
            self._env_id = (await self._post("/env/create", self._wanted))["env_id"]
        except BaseException:
            await self._http.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                await self._post("/env/terminate", {"env_id": self._env_id})
        finally:
            await self._http.aclose()

    async def step(self, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """Carry out one decision; the answer of POST /env/step.

        Raises:
            TaskAppLost: the task app does not answer, or with an error of its own; another one may.
        """
        wire = [call.model_dump(mode="json") for call in calls]
        return await self._post("/env/step", {"env_id": self._env_id, "tool_calls": wire})

    async def frame(self, side: int) -> bytes:
        """A PNG of `side` x `side` pixels.

        Raises:
            NoPictures: the environment, or this task app, draws none.
            TaskAppError: another request failed.
        """
        path = f"/env/{self._env_id}/frame"
        reply = await self._send("GET", path, params={"width": side, "height": side})
        if reply.status_code == _NOT_FOUND:
            raise NoPictures(f"{self._url} draws no pictures of this environment")
        self._check("GET", path, reply)
        return reply.content

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        reply = await self._send("POST", path, json=dict(body))
        self._check("POST", path, reply)
        try:
            return dict(reply.json())
        except ValueError as error:
            raise TaskAppError(f"{self._url}: POST {path} did not answer with JSON: {error}") from error

    async def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return await self._http.request(method, path, extensions=self._extensions, **options)
        except httpx.HTTPError as error:
            told = str(error) or type(error).__name__
            raise TaskAppLost(f"{self._url}: {method} {path}: {told}") from error

    def _check(self, method: str, path: str, reply: httpx.Response) -> None:
        if reply.is_error:
            told = f"status {reply.status_code}: {reply.text[:200]}"
            raise (TaskAppLost if reply.is_server_error else TaskAppError)(
                f"{self._url}: {method} {path}: {told}"
            )
