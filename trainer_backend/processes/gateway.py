"""Keeps one gateway of a run with [cluster] serving at its public address.

A gateway process that dies, or that is killed because it hangs, is replaced at the same address. This module
does not import torch.
"""

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from service_kit.process import Process, Worker, last_line, name_exit
from service_kit.replies import ReplyFault, plain_session, read_bounded
from service_kit.rpc import MOST_REFUSAL_BYTES, PATH, Reply, Tell
from service_kit.server import Listener
from service_kit.tasks import end_tasks
from trainer_backend.errors import (
    EngineStopped,
    EngineTimeout,
    InferenceError,
    JobError,
    TrainerError,
    WeightsRefused,
)
from trainer_backend.inference.versions import PolicyVersion
from trainer_backend.job.tables import InferenceTable
from trainer_backend.parts import Reporter
from trainer_backend.processes.gateway_calls import (
    CONTROL_KEY,
    GATEWAY_CALLS,
    Event,
    GatewaySetup,
    Line,
    ProcessChanged,
    Sign,
    gateway_command,
)
from trainer_backend.processes.launching import LOCAL, Launcher, Place, Resources, Role
from trainer_backend.processes.public_address import PublicAddress
from trainer_backend.rundir.state import is_final

Say = Callable[[str], None]

_TOTALS_S = 30.0
# Time for reading a model; `load_s` adds the wait for servers.
_LOAD_S = 600.0
# If this many processes in a row end without an answered request, no other is started. If this many end
# during one call, the call fails.
_MOST_IN_VAIN = 3
_LOOK_S = 0.2
_SHOWN = 500
# Time to wait for the result of the call `serve` after the process has ended.
_LAST_WORDS_S = 1.0


def added(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return, for each name, the sum of its counts in all mappings. Pure."""
    names = dict.fromkeys(name for one in counts for name in one)
    return {name: sum(one.get(name, 0) for one in counts) for name in names}


@dataclass(slots=True)
class _Life:
    """What the run knows about one process of a gateway, from the start of the process to its end."""

    child: Process
    version: PolicyVersion
    url: str = ""
    """Address for the calls of the run; empty until it is known."""
    public_url: str = ""
    """Address for the requests of task apps."""
    announced: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the process answers requests."""
    moves: list[tuple[str, str]] = field(default_factory=list)
    """Former and new address of each vLLM server that has moved, if the process does not know it yet."""
    tasks: list[asyncio.Future[Any]] = field(default_factory=list)
    """Three tasks, which wait for the end of the process, the end of the call `serve`, and `announced`."""
    has_answered: bool = False
    fault: Exception | None = None
    """If a further process would fail too: the error to raise instead of starting another process."""

    async def await_serve_result(self) -> None:
        """Wait for the result of the call `serve` after its process has ended."""
        await asyncio.wait(self.tasks[1:2], timeout=_LAST_WORDS_S)


class _Hopeless(Exception):
    """Raised when a further process of this gateway would fail too."""


class Gateway(Worker):
    """Keeps one gateway's process running, at a public address that does not change.

    Args:
        number: index among the gateways of the run.
        setup: returns the setup of a process, given the version, and whether it is the first process.
        say: receives a line of text for each process that dies, and each message of a process.
        launcher: starts the processes.
        keys: the keys for requests and for calls, by the name of the environment variable.
        log_file: receives the processes' logs.
        resources: what all gateways need together, for a launcher that chooses machines. None: the gateways
            run on the orchestrator's machine.
    """

    pauses_s = (0.0, 0.0)
    silence_s = 120.0
    """A process that does not answer a probe within this time is treated as hanging. A working engine answers
    much sooner, between two decoding steps."""

    def __init__(
        self,
        number: int,
        listener: Listener,
        setup: Callable[[PolicyVersion, bool], GatewaySetup],
        say: Say,
        launcher: Launcher = LOCAL,
        *,
        keys: Mapping[str, str],
        log_file: Path,
        resources: Resources | None = None,
        load_s: float = _LOAD_S,
    ) -> None:
        super().__init__()
        self._address, self._is_elsewhere = PublicAddress(listener), False
        self.name, self._log_file, self._setup = f"gateway_{number}", log_file, setup
        self._say, self._launcher, self.ready_s = say, launcher, load_s
        self._role = Role(
            self.name, self._command, keys, log_file, replica=number, resources=resources,
            descriptors=(self._address.socket.fileno(),),
        )  # fmt: skip
        self.reporter: Reporter | None = None
        self.renew: Say | None = None  # restarts the vLLM server at an address
        # Lets the learner send the weights to a server that is about to ask for them.
        self.serve_again: Callable[[], None] | None = None
        self._version: PolicyVersion | None = None
        self._life: _Life | None = None
        self._last_words = ""
        self._in_vain = 0  # processes in a row that ended without an answer
        # The counts of all ended processes together, and of the running process, as they were last read.
        self._ended: Mapping[str, float] = {}
        self._newest: Mapping[str, float] = {}
        self._session = plain_session(
            headers={"Authorization": f"Bearer {keys[CONTROL_KEY]}"},
            connector=aiohttp.TCPConnector(force_close=True),  # no connection outlives its process
        )

    @property
    def pid(self) -> int | None:
        """The id of the gateway's process; None before the first process."""
        return None if self._life is None else self._life.child.pid

    async def keep(self, version: PolicyVersion) -> str:
        """Serve this version, and then each version given to `load`, until cancelled.

        If serving ends earlier because every further process would fail too, return the reason.

        Raises:
            JobError: the gateway cannot serve this job.
            NotPlaced: no machine had free resources for the process in time.
        """
        self._version, self._in_vain = version, 0
        self._report("starting")
        try:
            await self.run_forever()
        except _Hopeless as error:
            word = str(error)
        return word

    def on_end(self, code: int, lasted_s: float, pause_s: float) -> None:
        assert self._life is not None, "a process has ended"
        self._ended, self._newest = self.known_totals, {}
        if self._life.fault is not None:
            raise self._life.fault
        words = last_line(self._log_file)[:_SHOWN] or "(nothing)"
        self._last_words = f"; {self._log_file} ends with: {words}"
        self._in_vain = 0 if self._life.has_answered else self._in_vain + 1
        if self._in_vain == _MOST_IN_VAIN:
            raise _Hopeless(
                f"{self.name} ended {_MOST_IN_VAIN} times without answering a request, with "
                f"{name_exit(code)}{self._last_words}"
            )
        word = f"ended with {name_exit(code)}, and is started again"
        self._say(f"{self.name} {word}")
        self._report("starting", word)

    def on_silence(self, what: str) -> None:
        self._say(f"{self.name} {what}")

    async def load(self, version: PolicyVersion) -> None:
        """Let the process serve this version. If the process dies, send the call to the next process.

        Raises:
            WeightsRefused: the weights do not fit, no server accepts them, or several processes died during
                the call. The previous version is still served.
            EngineTimeout: the process did not answer in time.
        """
        if version.address is not None and not self.ready.is_set():
            # The starting process waits for the previous version, which the learner can no longer send.
            self._version = version
            if self._life is not None:
                self._life.child.signal(signal.SIGKILL)
            await self.ready.wait()
            return
        await self._ask_until_answered("load", version)
        self._version = version
        self._report("serving")

    async def release(self) -> None:
        """Let the gateway's vLLM servers sleep until the next load."""
        await self._ask_until_answered("release")

    async def verify(self) -> list[str]:
        """Check that the gateway's fixed policies are unchanged; return one line for each local policy."""
        return [f"{self.name}: {line}" for line in await self._ask_until_answered("verify")]

    async def move_server(self, url: str, new_url: str) -> None:
        """Send the new address of a vLLM server to the process, at once or as soon as the process serves."""
        if self._life is not None:
            self._life.moves.append((url, new_url))
            if self.ready.is_set():
                await self._pass_moves_on(self._life)

    async def totals(self) -> dict[str, float]:
        """Read and return the counts of the actor's requests, tokens and so on, since the start of the run.

        If the process does not answer, return the counts that were read last.

        Raises:
            EngineTimeout: the process did not answer in time, and no counts were read before.
        """
        while True:
            if not self.known_totals:
                await self.ready.wait()
            await self._read()
            if self.known_totals:
                return self.known_totals
            await asyncio.sleep(_LOOK_S)

    @property
    def known_totals(self) -> dict[str, float]:
        """The counts that were read last, summed over all processes so far; they never decrease."""
        return added([self._ended, self._newest])

    async def close(self) -> None:
        await self._session.close()

    async def _read(self) -> None:
        life = self._life
        try:
            counts = await self._call("totals", timeout_s=_TOTALS_S)
        except (aiohttp.ClientError, OSError):
            return
        except EngineTimeout:
            if self.known_totals or life is not self._life or not self.ready.is_set():
                return
            raise
        if life is self._life and self.ready.is_set():
            self._newest = counts

    async def _ask_until_answered(self, name: str, *arguments: Any) -> Any:
        """Make a call and return its result. If the process dies, send the call to the next process.

        Raises:
            WeightsRefused: `_MOST_IN_VAIN` processes died during the call.
        """
        restarts = self.restarts
        while True:
            await self.ready.wait()
            deaths = self.restarts - restarts
            if deaths >= _MOST_IN_VAIN:
                raise WeightsRefused(f"{self.name} ended {deaths} times in {name!r}{self._last_words}")
            try:
                return await self._call(name, *arguments, timeout_s=self.ready_s)
            except (aiohttp.ClientError, OSError):
                await asyncio.sleep(_LOOK_S)  # until the process's end is noticed

    async def start(self) -> Process:
        return await self._launcher.start(self._role)

    async def serve(self, process: Process) -> bool:
        """Wait until the process answers requests and return True.

        Return False if the process failed, or if `load` received a newer version before the process was
        ready. The next process then begins with the newest version.
        """
        assert self._version is not None, "`keep` sets it"
        self._life = life = _Life(process, self._version)
        address = await process.address()
        if address is None:
            return False
        life.url, life.version = address, self._version
        # `ended` also reads what libraries print; with a full pipe, the process would block.
        life.tasks = [
            asyncio.ensure_future(work)
            for work in (process.ended(), self._serve(life), life.announced.wait())
        ]
        await asyncio.wait(life.tasks, return_when=asyncio.FIRST_COMPLETED)
        if not life.announced.is_set() or life.version is not self._version:
            await life.await_serve_result()
            return False
        if self._is_elsewhere:
            await self._address.lead_to(life.public_url)
        self._report("serving")
        if self.restarts:
            self._say(f"{self.name} serves version {life.version.number} again")
        return True

    async def live(self, process: Process) -> None:
        assert self._life is not None, "`serve` sets it"
        await self._pass_moves_on(self._life)
        await asyncio.wait(self._life.tasks[:2], return_when=asyncio.FIRST_COMPLETED)
        await self._life.await_serve_result()

    async def end(self, process: Process) -> bool:
        self._address.hold()
        try:
            return await super().end(process)
        finally:
            if self._life is not None:
                await end_tasks(*self._life.tasks)

    async def probe(self) -> None:
        try:
            await self._call("probe", timeout_s=self.silence_s)
        except EngineTimeout as error:
            raise TimeoutError from error

    async def _serve(self, life: _Life) -> None:
        """Make the call `serve`, which lasts as long as the process serves."""
        setup = self._setup(life.version, not self.restarts)
        try:
            word = await self._call("serve", setup, tell=lambda event: self._handle_event(life, event))
            life.fault = _Hopeless(f"{self.name}: {word}") if word else None
        except (aiohttp.ClientError, OSError):
            pass  # it has died
        except TrainerError as error:
            # After a final error, another start of the run would fail too.
            life.fault = (JobError if is_final(error) else _Hopeless)(f"{self.name}: {error}")

    def _handle_event(self, life: _Life, event: Event) -> None:
        match event:
            case Line(kind="serving"):
                life.public_url = event.text
                life.announced.set()
            case Line(kind="say"):
                self._say(f"{self.name}: {event.text}")
            case Line(kind="server_away") if self.renew is not None:
                self.renew(event.text)
            case Sign(kind="answered"):
                life.has_answered = True
            case Sign(kind="server_asks") if self.serve_again is not None:
                self.serve_again()
            case ProcessChanged() if self.reporter is not None:
                self.reporter.process(**event.model_dump(exclude={"kind"}))

    async def _pass_moves_on(self, life: _Life) -> None:
        with suppress(aiohttp.ClientError, OSError, InferenceError):  # the next process gets the addresses
            while life.moves:
                await self._call("move_server", *life.moves.pop(0), timeout_s=_TOTALS_S)

    def _report(self, state: str, word: str = "") -> None:
        if self.reporter is not None and self._version is not None:
            address, version = urlsplit(self._address.url).netloc, self._version.number
            self.reporter.process(
                self.name, role="gateway", state=state, version=version, word=word, host=address
            )

    def _command(self, place: Place) -> tuple[str, ...]:
        self._is_elsewhere = place.host is not None
        return gateway_command(self.name, self._address.socket.fileno(), place)

    async def _call(
        self, name: str, *arguments: Any, timeout_s: float | None = None, tell: Tell | None = None
    ) -> Any:
        """Make a call and return its result.

        The message of an error begins with this gateway's name, unless the call is `serve`.

        Raises:
            aiohttp.ClientError, OSError: the process has ended.
            EngineTimeout: the call has not ended in time.
        """
        life = self._life
        assert life is not None, "a process was started"
        reply = Reply(GATEWAY_CALLS, name, GATEWAY_CALLS.write_arguments(name, arguments), tell)
        url = life.url + PATH + name
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.post(
                url, data=reply.body, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status != 200:
                    content = await read_bounded(response.content.iter_any(), MOST_REFUSAL_BYTES)
                    raise GATEWAY_CALLS.refusal(
                        url, response.status, response.headers.get("Location"), content
                    )
                async for part in response.content.iter_any():
                    if reply.take(part):
                        return reply.result()
            raise ConnectionResetError(f"{self.name} has broken off its reply")
        except TimeoutError as error:
            raise EngineTimeout(f"{self.name} did not answer {name!r} within {timeout_s:g} s") from error
        except ReplyFault as error:
            raise InferenceError(f"{self.name}: {error}") from error
        except TrainerError as error:
            if name == "serve":
                raise
            if isinstance(error, EngineStopped):  # the process ends because its engine has stopped
                raise ConnectionResetError(f"{self.name}: {error}") from error
            error.detail = f"{self.name}: {error.detail}"
            raise


def load_s(table: InferenceTable) -> float:
    """Return the time limit, in seconds, for a gateway to start serving a version.

    With vLLM, a gateway waits up to three times: for the first server, for the load, and for the other
    servers.
    """
    return _LOAD_S + 3 * table.replica_patience_s
