"""The local engine in a process of its own, so that no gateway's work holds up its steps.

With the gateway in the engine's process, each of the engine's thousand calls a second waits for Python's
global lock while the gateway parses and renders.
"""

import asyncio
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any

import structlog

from service_kit.process import Child
from shared_schemas.base import Body
from shared_schemas.trajectory import Sampling
from trainer_backend.errors import ContextLengthExceeded, EngineStopped, EngineTimeout
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.inference.protocol import NO_EXTRAS, Extras, Generation, SampledToken
from trainer_backend.inference.versions import PolicyVersion
from trainer_backend.inference.worker import EngineCounters
from trainer_backend.job.tables import ModelTable
from trainer_backend.launchers.launcher import LOCAL, Role
from trainer_backend.run.engine_frames import TO_ENGINE, TO_GATEWAY, EngineCall, Frame, Line

log = structlog.get_logger(__name__)

# What the engine's process gets in its environment.
SETUP = "TURNWISE_ENGINE"

_MODULE = "trainer_backend.run.engine_process"
_STOP_S = 10.0
_BEGIN_S = 600.0
# Beyond the engine's own limit of a request, which its process keeps while it works at all.
_GRACE_S = 10.0


class EngineSetup(Body):
    """What an engine's process computes."""

    model: ModelTable
    keys: EngineKeys
    version: PolicyVersion
    """The version with which it begins."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A call that waits for its end."""

    future: asyncio.Future[Any]
    on_token: Callable[[SampledToken], None] | None = None


class ProcessEngine:
    """A `FrozenEngine` whose process is a child of this one. It belongs to one event loop."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup, self._version = setup, setup.version.number
        self._child: Child | None = None
        self._line: Line | None = None
        self._numbers = count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._breakdown: Future[str] = Future()
        self._listening: asyncio.Future[None] | None = None
        self._gone: str | None = "it was not started"  # why it does not answer
        self._is_closed = False
        self.counters = EngineCounters()  # as the last answer told them

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_model_len(self) -> int:
        return self._setup.keys.max_model_len

    @property
    def breakdown(self) -> Future[str]:
        return self._breakdown

    @property
    def pid(self) -> int | None:
        """Of its process; None before the start."""
        return None if self._child is None else self._child.pid

    async def begin(self) -> int | None:
        """Start the process, and wait until it serves; return its exit code if it ends before.

        Raises:
            EngineTimeout: it did not serve in time.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            command = (sys.executable, "-m", _MODULE, "--socket", str(theirs.fileno()))
            environment = {SETUP: self._setup.model_dump_json()}
            role = Role("engine", lambda place: command, environment, descriptors=(theirs.fileno(),))
            self._child = await LOCAL.start(role)
        connection = await asyncio.open_connection(sock=ours)
        self._line = Line(*connection, says=TO_ENGINE, hears=TO_GATEWAY)
        try:
            async with asyncio.timeout(_BEGIN_S):
                if await self._child.address() is None:
                    return await self._child.ended()
        except TimeoutError as error:
            raise EngineTimeout(f"the engine's process did not serve within {_BEGIN_S:g} s") from error
        self._gone = None
        self._listening = asyncio.ensure_future(self._listen(self._line))
        return None

    async def ended(self) -> int | None:
        """Wait for the end of its process; return the exit code, or None where it was closed."""
        assert self._child is not None, "it has begun"
        code = await self._child.ended()
        return None if self._is_closed else code

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, request_id: str, extras: Extras = NO_EXTRAS
    ) -> Generation:
        if len(ids) + sampling.max_tokens > self.max_model_len:
            raise ContextLengthExceeded(
                prompt_tokens=len(ids), max_tokens=sampling.max_tokens, max_model_len=self.max_model_len
            )
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
        number, waiting = next(self._numbers), _Waiting(self._new_future(), extras.on_token)
        try:
            generation: Generation = await self._ask(number, waiting, "generate", call, timeout_s=limit_s)
        finally:
            if not waiting.future.done() or waiting.future.cancelled():
                self._say(next(self._numbers), "abort", number)
        return generation

    async def load(self, version: PolicyVersion) -> None:
        """Serve this version from now on; WeightsRefused where the one before goes on serving."""
        limit_s = LocalEngine.order_timeout_s + _GRACE_S
        await self._ask(next(self._numbers), _Waiting(self._new_future()), "load", version, timeout_s=limit_s)
        self._version = version.number

    async def probe(self) -> None:
        """Return once the engine is between two steps."""
        limit_s = LocalEngine.order_timeout_s
        await self._ask(next(self._numbers), _Waiting(self._new_future()), "probe", timeout_s=limit_s)

    def start(self) -> None:
        """Do nothing: `begin` has started it."""

    def stop(self) -> None:
        """Let go of the process, which ends then; unfinished requests get an EngineStopped."""
        self._is_closed = True
        self._fail_all("it was stopped")
        if self._line is not None:
            self._line.close()

    async def close(self) -> None:
        """End the process."""
        self.stop()
        if self._child is not None:
            await self._child.end(_STOP_S)

    def _new_future(self) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()

    async def _ask(self, number: int, waiting: _Waiting, verb: str, *rest: Any, timeout_s: float) -> Any:
        if self._gone is not None:
            raise EngineStopped(f"the engine does not run: {self._gone}")
        self._waiting[number] = waiting
        try:
            self._say(number, verb, *rest)
            async with asyncio.timeout(timeout_s):
                return await waiting.future
        except TimeoutError as error:
            raise EngineTimeout(f"the engine's process gave no answer within {timeout_s:g} s") from error
        finally:
            self._waiting.pop(number, None)

    def _say(self, number: int, kind: str, *carried: Any) -> None:
        if self._line is not None:
            self._line.say(number, kind, *carried)

    async def _listen(self, line: Line) -> None:
        reason = "its process has ended"
        try:
            while (frame := await line.hear()) is not None:
                self._take(frame)
        except Exception as error:
            log.exception("engine_process_misheard")
            reason = f"what its process said could not be read: {type(error).__name__}"
        finally:
            self._fail_all(reason)

    def _take(self, frame: Frame) -> None:
        number, kind, carried = frame
        if kind == "done":
            self.counters = EngineCounters(*carried[1])
        waiting = self._waiting.get(number)
        if waiting is None or waiting.future.done():
            return  # no call waits for it any more
        if kind == "token":
            if waiting.on_token is not None:
                waiting.on_token(carried[0])
        elif kind == "done":
            waiting.future.set_result(carried[0])
        else:
            waiting.future.set_exception(carried[0].error())

    def _fail_all(self, reason: str) -> None:
        self._gone = self._gone or reason
        for waiting in self._waiting.values():
            if not waiting.future.done():
                waiting.future.set_exception(EngineStopped(f"the engine does not run: {self._gone}"))
