"""One gateway of a run with [cluster]: its socket, and the child process that serves on it. No torch here.

The orchestrator holds the socket for the whole run. A process that dies is followed by another on the same
socket, and one that no longer answers is killed first.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from service_kit.process import READY, last_line, name_exit
from service_kit.replies import ReplyTooLarge, read_bounded
from service_kit.server import Listener
from shared_schemas.base import Body
from trainer_backend.errors import EngineStopped, EngineTimeout, InferenceError, JobError, WeightsRefused
from trainer_backend.inference.versions import LOAD, PROBE, TOTALS, VERIFY, PolicyVersion
from trainer_backend.job.tables import InferenceTable, ModelTable
from trainer_backend.launchers.launcher import LOCAL, Launcher, Place, Process, Resources, Role
from trainer_backend.launchers.port_forward import PortForward
from trainer_backend.protocols import Reporter
from trainer_backend.run.fixed_setup import FixedSetup

Tell = Callable[[str], None]

# What a gateway's process gets in its environment, and how it ends.
SETUP, GATEWAY_KEY, CONTROL_KEY = "TURNWISE_GATEWAY", "TURNWISE_GATEWAY_KEY", "TURNWISE_CONTROL_KEY"
LOST, REFUSAL, BREAKDOWN = 1, 2, 3
# The line by which it tells that it has answered a request.
SERVED = "has answered a request"
# It says this with the address of a vLLM server of the run's own that does not come back,
RENEW = "start anew "
# this where one is about to ask the learner for the weights,
SERVE_AGAIN = "a server is about to ask for the weights"
# and this with arguments of `Reporter.process`, about a vLLM server that is its own to watch.
PROCESS = "process "

_MODULE = "trainer_backend.run.gateway_process"
_STOP_S = 10.0
_TOTALS_S = 30.0
# Of reading a model, beside the wait for servers.
_LOAD_S = 600.0
# A process that has ended so often in a row without an answer will not give one, nor load what it died of.
_MOST_IN_VAIN = 3
_LOOK_S, _PROBE_EVERY_S = 0.2, 10.0
_SHOWN = 500
# Counts, and the errors of a load, are some kilobytes.
_MOST_REPLY_BYTES = 16 << 20


class GatewaySetup(Body):
    """What a gateway's process serves."""

    job_name: str
    model: ModelTable
    inference: InferenceTable
    """[inference] with this gateway's share of threads and servers."""
    fixed: FixedSetup
    run: Path
    """The run's directory, which has the record of its fixed policies."""
    version: PolicyVersion
    """The one that it begins with."""
    probes: bool
    """Whether the servers of fixed policies are tried: one that is away for a moment must not keep a gateway
    from being started again."""


class RunningTotals:
    """Counts of one process after another, which never go back."""

    def __init__(self) -> None:
        self._ended: dict[str, float] = {}
        self._newest: Mapping[str, float] = {}

    def read(self, counts: Mapping[str, float]) -> None:
        """The counts of the process that runs, since its start."""
        self._newest = counts

    def start_again(self) -> None:
        """The process has ended; what it counted after the last reading is lost."""
        self._ended, self._newest = self.sum, {}

    @property
    def sum(self) -> dict[str, float]:
        return added([self._ended, self._newest])


def added(counts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sums by name. Pure."""
    names = dict.fromkeys(name for one in counts for name in one)
    return {name: sum(one.get(name, 0) for one in counts) for name in names}


@dataclass(frozen=True, slots=True)
class GatewayRole:
    """What the processes of a gateway have in common for who starts them."""

    number: int
    """Among the gateways of the run."""
    keys: Mapping[str, str]
    """Keys of the gateway and of its control, by environment variable."""
    log_file: Path
    """Receives their logs."""
    resources: Resources | None = None
    """What all gateways need, where machines are chosen for their engines; None: they are with the
    orchestrator."""

    @property
    def name(self) -> str:
        return f"gateway_{self.number}"


class Gateway:
    """One gateway: its socket, and the process that serves on it, one after another where they die.

    Args:
        role: what its processes have in common for who starts them; `setup` has the rest.
        tell: is given a line for each process that dies, and what they have to tell.
        launcher: starts its processes; one that is elsewhere is led to from the socket.
    """

    silence_s = 120.0
    """A process that serves is wedged if a sign of life takes so long. An engine answers between two of its
    steps, and a policy that waits for a sample has given up by then."""

    def __init__(
        self,
        role: GatewayRole,
        listener: Listener,
        setup: Mapping[str, Any],
        tell: Tell,
        launcher: Launcher = LOCAL,
    ) -> None:
        self.name, self._role, self._listener, self._setup = role.name, role, listener, setup
        self._log_file, self._tell, self._launcher = role.log_file, tell, launcher
        self._forward: PortForward | None = None
        self._load_s = load_s(setup["inference"])
        self._is_elsewhere = False
        self.restarts = 0  # how many of its processes died and were followed by another
        self.pid: int | None = None
        self.reporter: Reporter | None = None
        self.renew: Tell | None = None  # starts the vLLM server of an address again
        # Has the learner hand the weights out to a server that is about to ask for them.
        self.serve_again: Callable[[], None] | None = None
        self._version: PolicyVersion | None = None
        self._child: Process | None = None
        self._last_words = ""
        self._ready = asyncio.Event()
        self._totals = RunningTotals()
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {role.keys[CONTROL_KEY]}"},
            connector=aiohttp.TCPConnector(force_close=True),  # none outlives the process that it led to
        )

    async def keep(self, version: PolicyVersion) -> str:
        """Serve this version and what is loaded after it, until cancelled; return why that cannot go on.

        Raises:
            JobError: it refuses what the job asks of it, and would again.
        """
        self._version, in_vain = version, 0
        self._report("starting")
        while True:
            served, code = await self._run_one(self._version)
            self._ready.clear()
            self._totals.start_again()
            self._last_words = last_line(self._log_file)[:_SHOWN] or "(nothing)"
            if code == REFUSAL:  # another start would be refused too
                raise JobError(f"{self.name}: {self._last_words}")
            if code == BREAKDOWN:
                return f"{self.name}: {self._last_words}"
            in_vain = 0 if served else in_vain + 1
            if in_vain == _MOST_IN_VAIN:
                return (
                    f"{self.name} ended {in_vain} times without answering a request, with {name_exit(code)}; "
                    f"{self._log_file} ends with: {self._last_words}"
                )
            self.restarts += 1
            word = f"ended with {name_exit(code)}, and is started again"
            self._tell(f"{self.name} {word}")
            self._report("starting", word)

    async def load(self, version: PolicyVersion) -> None:
        """Have it serve this version. One that dies meanwhile serves the version before, and is asked again.

        Raises:
            WeightsRefused: they do not fit, no server takes them, or its processes die of them; the version
                before goes on serving.
            EngineTimeout: it did not answer in time.
        """
        restarts = self.restarts
        if version.address is not None and not self._ready.is_set():
            # The process that starts cannot get the version before: the learner has it no more.
            self._version = version
            if self._child is not None:
                self._child.signal(signal.SIGKILL)
            await self._ready.wait()
            return
        while True:
            await self._ready.wait()
            deaths = self.restarts - restarts
            if deaths >= _MOST_IN_VAIN:
                raise WeightsRefused(
                    f"{self.name} ended {deaths} times while it loaded version {version.number}; "
                    f"{self._log_file} ends with: {self._last_words}"
                )
            try:
                await self._ask("POST", LOAD, version.model_dump_json(), timeout_s=self._load_s)
            except (aiohttp.ClientError, OSError):
                await asyncio.sleep(_LOOK_S)  # its end is about to be seen
                continue
            self._version = version
            self._report("serving")
            return

    async def verify(self) -> list[str]:
        """Check that its fixed policies are as they were loaded; return a line for each local one."""
        while self._setup["fixed"].folders:
            await self._ready.wait()
            try:
                reply = await self._ask("GET", VERIFY, timeout_s=self._load_s)
            except (aiohttp.ClientError, OSError):
                await asyncio.sleep(_LOOK_S)  # its end is about to be seen
                continue
            return [f"{self.name}: {line}" for line in reply["lines"]]
        return []

    async def ready(self) -> None:
        """Wait until its process serves."""
        await self._ready.wait()

    async def totals(self) -> dict[str, float]:
        """The actor's counts here since the start of the run; those of now, or the newest that are known.

        Raises:
            EngineTimeout: none are known, and it did not answer in time.
        """
        if self.known_totals:
            await self._read()
        while not self.known_totals:
            await self._ready.wait()
            await self._read()
            if not self.known_totals:
                await asyncio.sleep(_LOOK_S)
        return self.known_totals

    @property
    def known_totals(self) -> dict[str, float]:
        """The counts as they were when they were last read."""
        return self._totals.sum

    async def close(self) -> None:
        await self._session.close()
        if self._forward is not None:
            await self._forward.close()

    async def _read(self) -> None:
        restarts = self.restarts
        try:
            counts = await self._ask("GET", TOTALS, timeout_s=_TOTALS_S)
        except (aiohttp.ClientError, OSError):
            return
        except EngineTimeout:
            if self.known_totals or restarts != self.restarts or not self._ready.is_set():
                return
            raise
        if restarts == self.restarts and self._ready.is_set():
            self._totals.read(counts)

    async def _run_one(self, version: PolicyVersion) -> tuple[bool, int]:
        """Run one process to its end; return whether it answered a request, and its exit code."""
        child, served = await self._start(version), False
        self._child = child
        watch: asyncio.Task[None] | None = None
        self.pid = child.pid
        try:
            async with asyncio.timeout(self._load_s) as until_ready:
                async for line in child.lines():
                    if line.startswith(READY) and version is not self._version:
                        # A load has ended since it was started; the next process begins with that version.
                        await child.end(_STOP_S)
                    elif line.startswith(READY):
                        until_ready.reschedule(None)
                        if self._is_elsewhere:  # it does not listen on the socket
                            self._forward = self._forward or await PortForward.opened(self._listener.socket)
                            self._forward.lead_to(line.removeprefix(READY))
                        self._ready.set()
                        self._report("serving")
                        if self.restarts:
                            self._tell(f"{self.name} serves version {version.number} again")
                        watch = asyncio.ensure_future(self._kill_if_silent(child))
                    elif line == SERVED:
                        served = True
                    else:
                        self._heed(line)
            return served, await child.ended()
        except TimeoutError:
            self._tell(f"{self.name} did not serve within {self._load_s:g} s")
        finally:
            if watch is not None:
                watch.cancel()
            if self._forward is not None:
                self._forward.lead_to(None)
            await child.end(_STOP_S)
        return served, await child.ended()

    def _heed(self, line: str) -> None:
        """Do what a line of its process asks for, or pass it on to the run's user."""
        if line.startswith(RENEW) and self.renew is not None:
            self.renew(line.removeprefix(RENEW))
        elif line == SERVE_AGAIN:
            if self.serve_again is not None:
                self.serve_again()
        elif line.startswith(PROCESS):
            if self.reporter is not None:
                self.reporter.process(**json.loads(line.removeprefix(PROCESS)))
        elif line:
            self._tell(f"{self.name}: {line}")

    async def _kill_if_silent(self, child: Process) -> None:
        """Kill the process once it lives and gives no sign of life; then it is started again."""
        while True:
            await asyncio.sleep(min(_PROBE_EVERY_S, self.silence_s))
            # An error is a sign of life: what breaks the engine ends the process by itself.
            with suppress(aiohttp.ClientError, OSError, InferenceError):
                try:
                    await self._ask("GET", PROBE, timeout_s=self.silence_s)
                except EngineTimeout:
                    self._tell(
                        f"{self.name} has given no sign of life for {self.silence_s:g} s, and is killed"
                    )
                    child.signal(signal.SIGKILL)
                    return

    def _report(self, state: str, word: str = "") -> None:
        if self.reporter is not None and self._version is not None:
            address, version = urlsplit(self._listener.url).netloc, self._version.number
            self.reporter.process(
                self.name, role="gateway", state=state, version=version, word=word, host=address
            )

    async def _start(self, version: PolicyVersion) -> Process:
        setup = GatewaySetup(**self._setup, version=version, probes=not self.restarts)
        environment = {**self._role.keys, SETUP: setup.model_dump_json()}
        return await self._launcher.start(
            Role(
                self.name, self._command, environment, self._log_file, replica=self._role.number,
                resources=self._role.resources, descriptors=(self._listener.socket.fileno(),),
            )
        )  # fmt: skip

    def _command(self, place: Place) -> tuple[str, ...]:
        self._is_elsewhere = place.host is not None
        socket = ("--socket", str(self._listener.socket.fileno()))
        where = socket if place.host is None else ("--host", place.host)
        return (sys.executable, "-m", _MODULE, self.name, *where)

    async def _ask(self, method: str, path: str, body: str = "", *, timeout_s: float) -> dict[str, Any]:
        timeout, child = aiohttp.ClientTimeout(total=timeout_s), self._child
        try:
            async with self._session.request(
                method, self._listener.url + path, data=body, timeout=timeout, allow_redirects=False
            ) as response:
                reply = json.loads(await read_bounded(response.content.iter_any(), _MOST_REPLY_BYTES))
                if response.status == 200:
                    return dict(reply)
        except TimeoutError as error:
            raise EngineTimeout(f"{self.name} did not answer {path} within {timeout_s:g} s") from error
        except (ReplyTooLarge, ValueError) as error:
            raise InferenceError(f"{self.name} did not answer {path} as a gateway does: {error}") from error
        if reply.get("code") == EngineStopped.code and await self._ends(child):
            raise ConnectionResetError(f"{self.name} ended with its engine")
        kind = WeightsRefused if reply.get("code") == WeightsRefused.code else InferenceError
        raise kind(f"{self.name}: {reply.get('detail')}", where=reply.get("where"), hint=reply.get("hint"))

    async def _ends(self, child: Process | None) -> bool:
        """Whether the process ends by itself, as one does whose engine has; it may take a moment."""
        try:
            async with asyncio.timeout(_STOP_S):
                while self._child is child and self._ready.is_set():
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            return False
        return True


def load_s(table: InferenceTable) -> float:
    """The most seconds that a gateway may take to serve a version.

    A pool waits for its first server, which then has as long for the load, and for the others as long again.
    """
    return _LOAD_S + 3 * table.replica_patience_s
