"""Runs the local engine in a process of its own, so that the gateway's work does not delay decoding steps.

In a shared process, the engine's thousand calls a second would wait for Python's global interpreter lock
while the gateway parses requests and renders prompts.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from service_kit.process import Child, name_exit
from service_kit.socket_calls import Caller, Unanswered
from service_kit.tasks import racing
from shared_schemas.trajectory import Sampling
from trainer_backend.errors import EngineStopped, EngineTimeout
from trainer_backend.inference.actor import NO_EXTRAS, Engine, Extras, Generation, refuse_too_long
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.versions import PolicyVersion
from trainer_backend.inference.worker import EngineCounters
from trainer_backend.processes.engine_calls import ENGINE_CALLS, EngineCall, EngineSetup, engine_role
from trainer_backend.processes.launching import LOCAL

_STOP_S = 10.0
_BEGIN_S = 600.0
# Added to the engine's own time limit of a request, within which a working process answers.
_GRACE_S = 10.0


class EngineLost(Exception):
    """Raised when an engine's process has ended unexpectedly. A new process may succeed."""


class ProcessEngine(Engine):
    """Implements `Engine` with a `LocalEngine` in a child process. `begin` starts the process."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup, self._version = setup, setup.version.number
        self._caller = Caller(ENGINE_CALLS)
        self._child: Child | None = None
        self._serving: asyncio.Task[str] | None = None
        self._end: asyncio.Task[int] | None = None
        self._is_closed = False
        self.breakdown: Future[str] = Future()
        self.counters = EngineCounters()  # as sent with the last answer

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_model_len(self) -> int:
        return self._setup.keys.max_model_len

    @property
    def pid(self) -> int | None:
        """The id of the process; None before the start."""
        return None if self._child is None else self._child.pid

    async def begin(self) -> None:
        """Start the process, and wait until it serves.

        Raises:
            EngineLost: the process has ended.
            EngineTimeout: the process did not serve in time.
            TrainerError: the process cannot serve the version.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = await LOCAL.start(engine_role(theirs.fileno()))
        self._end = asyncio.ensure_future(self._child.ended())  # also reads what libraries print
        await self._caller.connect(ours)
        ready = asyncio.Event()
        self._serving = asyncio.ensure_future(self._caller.call("serve", self._setup, tell=ready.set))
        try:
            async with asyncio.timeout(_BEGIN_S), racing(ready.wait(), self._serving):
                pass
        except TimeoutError as error:
            raise EngineTimeout(f"the engine's process did not serve within {_BEGIN_S:g} s") from error
        if not ready.is_set():
            await self.look_after()

    async def look_after(self) -> None:
        """Wait until the engine fails, and store the reason in `breakdown`. Return also after `stop`.

        Raises:
            EngineLost: the engine's process has ended.
        """
        assert self._end is not None and self._serving is not None, "it has begun"
        try:
            reason = await asyncio.shield(self._serving)
        except Unanswered as error:
            if self._is_closed:
                return
            code = await self._end
            raise EngineLost(f"the engine's process ended with {name_exit(code)}") from error
        self.breakdown.set_result(reason)

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, request_id: str, extras: Extras = NO_EXTRAS
    ) -> Generation:
        refuse_too_long(len(ids), sampling.max_tokens, self.max_model_len)
        call = EngineCall(
            tuple(ids),
            sampling,
            likeliest=extras.likeliest,
            processed=extras.processed,
            common_draws=extras.common_draws,
            stop=() if extras.stop is None else extras.stop.strings,
            streams=extras.on_token is not None,
        )
        limit_s = LocalEngine.request_timeout_s + _GRACE_S
        generation: Generation
        generation, self.counters = await self._call(
            "generate", call, tell=extras.on_token, timeout_s=limit_s
        )
        return generation

    async def load(self, version: PolicyVersion) -> None:
        limit_s = LocalEngine.order_timeout_s + _GRACE_S
        self.counters = await self._call("load", version, timeout_s=limit_s)
        self._version = version.number

    async def probe(self) -> None:
        self.counters = await self._call("probe", timeout_s=LocalEngine.order_timeout_s)

    def totals(self) -> dict[str, float]:
        return asdict(self.counters)

    def stop(self) -> None:
        """Disconnect from the process, which then ends. Unfinished requests raise EngineStopped."""
        self._is_closed = True
        self._caller.close()

    async def close(self) -> None:
        self.stop()
        if self._child is not None:
            await self._child.end(_STOP_S)

    async def _call(
        self, name: str, *arguments: Any, timeout_s: float, tell: Callable[..., None] | None = None
    ) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._caller.call(name, *arguments, tell=tell)
        except TimeoutError as error:
            raise EngineTimeout(f"the engine's process gave no answer within {timeout_s:g} s") from error
        except Unanswered as error:
            raise EngineStopped(f"the engine does not run: {error}") from error
