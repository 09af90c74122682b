"""Where task apps ask the policy: a gateway in this process, or with [cluster] in children. No torch here.

    this process -- listening sockets, keys, a folder --> gateway 0 .. n-1, each with an engine of its own
                 -- POST /control/load, GET /control/totals -->

This process holds the sockets for the whole run. A gateway that dies is started again on its socket, from the
folder that it served, and meanwhile requests wait there. The task app sends the ones that it had again.
"""

import asyncio
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

import aiohttp
from pydantic import SecretStr

from service_kit.children import PIPE, READY, Child, last_line
from service_kit.server import Listener, is_wildcard
from shared_schemas.base import Body
from trainer_backend.collect.plan import Inference
from trainer_backend.core.policies import ACTOR, model_of
from trainer_backend.errors import EngineTimeout, InferenceError, JobError, WeightsRefused
from trainer_backend.inference.versions import LOAD, TOTALS, PolicyVersion
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import InferenceTable, ModelTable, ServicesTable
from trainer_backend.protocols import InferenceServer, Learner, Reporter
from trainer_backend.run.stopping import while_unbroken
from trainer_backend.run.weight_folders import WeightFolders
from trainer_backend.rundir.layout import RunDirectory

if TYPE_CHECKING:  # torch
    from trainer_backend.run.vllm_servers import VllmServers

Result = TypeVar("Result")
Tell = Callable[[str], None]
NOBODY: Mapping[str, Any] = MappingProxyType({})

# What a gateway's process gets in its environment, and how it ends.
SETUP, GATEWAY_KEY, CONTROL_KEY = "TURNWISE_GATEWAY", "TURNWISE_GATEWAY_KEY", "TURNWISE_CONTROL_KEY"
REFUSAL, BREAKDOWN = 2, 3
# The line by which it tells that it has answered a request.
SERVED = "has answered a request"
# It says this with the address of a vLLM server of the run's own that does not come back.
RENEW = "start anew "

_MODULE = "trainer_backend.run.gateway_process"
_STOP_S = 10.0
_TOTALS_S = 30.0
# Of reading a model, beside the wait for servers.
_LOAD_S = 600.0
# A process that has ended so often in a row without an answer will not give one, nor load what it died of.
_MOST_IN_VAIN = 3
_LOOK_S = 0.2
# Among the totals: how often a gateway was started again.
RESTARTS = "gateway_restarts"
_SHOWN = 500


class GatewaySetup(Body):
    """What a gateway's process serves.

    Attributes:
        inference: [inference] with this gateway's share of threads and servers.
        version: the one that it begins with.
    """

    job_name: str
    model: ModelTable
    inference: InferenceTable
    version: PolicyVersion


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


class Gateway:
    """One gateway: its socket, and the process that serves on it, one after another where they die.

    Args:
        name: for people and for its log.
        setup: all but the version that it serves.
        keys: of the gateway and of its control, by environment variable.
        log_file: receives the logs of its processes.
        tell: is given a line for each process that dies, and what they have to tell.

    Attributes:
        restarts: how many of its processes died and were followed by another.
        pid: of its process; None before the first one.
        reporter: is given its process, and each change of it.
        renew: starts the vLLM server of an address anew.
    """

    def __init__(
        self,
        name: str,
        listener: Listener,
        setup: Mapping[str, Any],
        keys: Mapping[str, str],
        log_file: Path,
        tell: Tell,
    ) -> None:
        self.name, self._listener, self._setup, self._keys = name, listener, setup, keys
        self._log_file, self._tell = log_file, tell
        self._load_s = load_s(setup["inference"])
        self.restarts = 0
        self.pid: int | None = None
        self.reporter: Reporter | None = None
        self.renew: Tell | None = None
        self._version: PolicyVersion | None = None
        self._last_words = ""
        self._ready = asyncio.Event()
        self._totals = RunningTotals()
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {keys[CONTROL_KEY]}"},
            connector=aiohttp.TCPConnector(force_close=True),  # none outlives the process that it led to
        )

    async def keep(self, version: PolicyVersion) -> str:
        """Serve this version and what is loaded after it, until cancelled; return why that cannot go on."""
        self._version, in_vain = version, 0
        self._report("starting")
        while True:
            served, code = await self._run_one(self._version)
            self._ready.clear()
            self._totals.start_again()
            self._last_words = self._last_line()
            if code in (REFUSAL, BREAKDOWN):
                return f"{self.name}: {self._last_words}"
            in_vain = 0 if served else in_vain + 1
            if in_vain == _MOST_IN_VAIN:
                return (
                    f"{self.name} ended {in_vain} times without answering a request, with exit code {code}; "
                    f"{self._log_file} ends with: {self._last_words}"
                )
            self.restarts += 1
            word = f"ended with exit code {code}, and is started again"
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
        self.pid = child.pid
        try:
            async with asyncio.timeout(self._load_s) as until_ready:
                async for line in child.lines():
                    if line.startswith(READY) and version is not self._version:
                        # A load has ended since it was started; the next process begins with that version.
                        await child.end(_STOP_S)
                    elif line.startswith(READY):
                        until_ready.reschedule(None)
                        self._be_ready(version)
                    elif line == SERVED:
                        served = True
                    elif line.startswith(RENEW) and self.renew is not None:
                        self.renew(line.removeprefix(RENEW))
                    elif line:
                        self._tell(f"{self.name}: {line}")
            return served, await child.ended()
        except TimeoutError:
            self._tell(f"{self.name} did not serve within {self._load_s:g} s")
        finally:
            await child.end(_STOP_S)
        return served, await child.ended()

    def _be_ready(self, version: PolicyVersion) -> None:
        self._ready.set()
        self._report("serving")
        if self.restarts:
            self._tell(f"{self.name} serves version {version.number} again")

    def _report(self, state: str, word: str = "") -> None:
        if self.reporter is not None and self._version is not None:
            address, version = urlsplit(self._listener.url).netloc, self._version.number
            self.reporter.process(
                self.name, role="gateway", state=state, version=version, word=word, host=address
            )

    async def _start(self, version: PolicyVersion) -> Child:
        setup = GatewaySetup(**self._setup, version=version)
        with self._log_file.open("ab") as log:
            return await Child.start(
                (sys.executable, "-m", _MODULE, self.name, "--socket", str(self._listener.socket.fileno())),
                stdout=PIPE,
                stderr=log,
                env={**os.environ, **self._keys, SETUP: setup.model_dump_json()},
                descriptors=(self._listener.socket.fileno(),),
            )

    async def _ask(self, method: str, path: str, body: str = "", *, timeout_s: float) -> dict[str, float]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, self._listener.url + path, data=body, timeout=timeout
            ) as response:
                reply = json.loads(await response.read())
                if response.status == 200:
                    return dict(reply)
        except TimeoutError as error:
            raise EngineTimeout(f"{self.name} did not answer {path} within {timeout_s:g} s") from error
        kind = WeightsRefused if reply.get("code") == WeightsRefused.code else InferenceError
        raise kind(f"{self.name}: {reply.get('detail')}", where=reply.get("where"), hint=reply.get("hint"))

    def _last_line(self) -> str:
        return last_line(self._log_file)[:_SHOWN] or "(nothing)"


class Gateways:
    """Implements `protocols.InferenceServer` over gateways that are processes of their own.

    Args:
        inference: how the actor is asked there.
        folders: where the learner's versions are written.
        servers: vLLM servers that the run starts itself, which the gateways have among them.
    """

    def __init__(
        self,
        inference: Inference,
        gateways: Sequence[Gateway],
        folders: WeightFolders,
        servers: "VllmServers | None" = None,
    ) -> None:
        self.inference, self.gateways, self._folders, self._servers = inference, gateways, folders, servers
        for gateway in gateways:
            gateway.renew = None if servers is None else servers.renew
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._keepers: list[asyncio.Task[str]] = []

    async def publish(self, policy_version: int) -> None:
        """Write the policy as a model folder, and have every gateway serve it; the first one starts them."""
        version = await self._folders.write(policy_version)
        if self._servers is not None:
            await self._servers.start(version.folder)
        await self.while_serving(self._load(version))

    async def while_serving(self, work: Coroutine[Any, Any, Result]) -> Result:
        return await while_unbroken(self._broken, work)

    def watch(self, reporter: Reporter) -> None:
        for gateway in self.gateways:
            gateway.reporter = reporter

    async def totals(self) -> dict[str, float]:
        """The sums over the gateways, and how often one was started again.

        Where the gateways are broken, the newest that are known: who asks has an update to save, and hears of
        the breakdown from what needs the gateways.
        """
        reading = _all(gateway.totals() for gateway in self.gateways)
        try:
            counts = await self.while_serving(reading)
        except InferenceError:
            if not self._broken.done():
                raise
            counts = [gateway.known_totals for gateway in self.gateways]
        return {**added(counts), RESTARTS: sum(gateway.restarts for gateway in self.gateways)}

    async def close(self) -> None:
        """End the processes."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for gateway in self.gateways:
            await gateway.close()
        if self._servers is not None:
            await self._servers.stop()

    async def _load(self, version: PolicyVersion) -> None:
        if self._keepers:
            await _all(gateway.load(version) for gateway in self.gateways)
            return
        self._keepers = [asyncio.ensure_future(gateway.keep(version)) for gateway in self.gateways]
        for keeper in self._keepers:
            keeper.add_done_callback(self._end)
        await _all(gateway.ready() for gateway in self.gateways)

    def _end(self, keeper: asyncio.Task[str]) -> None:
        if not keeper.cancelled() and not self._broken.done():
            error = keeper.exception()
            self._broken.set_result(keeper.result() if error is None else f"{type(error).__name__}: {error}")


async def _all(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results of all; the first error once all have ended, since none may be left half done."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


class ActorGateways(Protocol):
    """Where a run's policy is asked, once it is served.

    Attributes:
        inference: how; it stands before anything is served.
    """

    inference: Inference

    def serving(self, learner: Any, fixed: Any = NOBODY) -> AbstractAsyncContextManager[InferenceServer]:
        """Serve the learner's policy, and fixed ones by name, until the context is left."""


class GatewayProcesses:
    """The gateways of a run with [cluster], before they are started.

    Args:
        listeners: the sockets, one for each.
        tell: is given a line for each gateway that dies.
    """

    def __init__(
        self, job: JobConfig, listeners: Sequence[Listener], directory: RunDirectory, tell: Tell
    ) -> None:
        self._job, self._listeners, self._directory, self._tell = job, listeners, directory, tell
        self._key = SecretStr(secrets.token_urlsafe(32))
        url, *others = (listener.url for listener in listeners)
        table, model = job.inference, model_of(job.job.name, ACTOR)
        self.inference = Inference(url, model, self._key, table.max_model_len, table.asks, tuple(others))

    @asynccontextmanager
    async def serving(self, learner: Learner, fixed: Mapping[str, Any] = NOBODY) -> AsyncIterator[Gateways]:
        """Serve the learner's policy from its first publish on, until the context is left."""
        assert not fixed, "a job with fixed policies and [cluster] is refused"
        table, servers = self._job.inference, None
        if table.engine == "vllm":
            from trainer_backend.run.vllm_servers import own_servers  # torch

            servers = own_servers(table, self._job.model, self._directory, self._tell)
            if servers is not None:
                table = table.model_copy(update={"urls": servers.urls})
        tokens = table.max_model_len - 1 if table.engine == "vllm" else 0
        folders = WeightFolders(learner, self._directory.weights, prompt_tokens=tokens)
        keys = {GATEWAY_KEY: self._key.get_secret_value(), CONTROL_KEY: secrets.token_urlsafe(32)}
        gateways = [
            Gateway(
                f"gateway_{number}", listener, self._setup(table, number), keys,
                log_file=self._directory.gateway_log(number), tell=self._tell,
            )
            for number, listener in enumerate(self._listeners)
        ]  # fmt: skip
        server = Gateways(self.inference, gateways, folders, servers)
        try:
            yield server
        finally:
            await server.close()

    def _setup(self, table: InferenceTable, number: int) -> dict[str, Any]:
        share = share_of(table, number, len(self._listeners))
        return {"job_name": self._job.job.name, "model": self._job.model, "inference": share}


def load_s(table: InferenceTable) -> float:
    """The most seconds that a gateway may take to serve a version.

    A pool waits for its first server, which then has as long for the load, and for the others as long again.
    """
    return _LOAD_S + 3 * table.replica_patience_s


def share_of(table: InferenceTable, number: int, count: int) -> InferenceTable:
    """[inference] of one gateway: no two control the same server; together they use the threads of one."""
    share = {"threads": max(1, table.threads // count), "urls": table.urls[number::count]}
    return table.model_copy(update=share)


@contextmanager
def actor_gateways(job: JobConfig, directory: RunDirectory, tell: Tell) -> Iterator[ActorGateways]:
    """The gateways of a run at ports that are held: in this process, or with [cluster] in children.

    Args:
        tell: is given a line where a server of the actor is lost, and when it is back.
    """
    with ExitStack() as stack:
        listeners = [
            stack.enter_context(gateway_listener(job.services, number))
            for number in range(job.services.gateways)
        ]
        if job.cluster is not None:
            yield GatewayProcesses(job, listeners, directory, tell)
            return
        # torch is imported here alone.
        from trainer_backend.run.policy_server import PolicyServer

        schedule = job.rollout_allocation_schedule
        yield PolicyServer(
            job.job.name, listeners[0], job.inference,
            schedule=schedule, directory=directory if job.weights_by_folder else None, tell=tell,
        )  # fmt: skip


def gateway_listener(table: ServicesTable, number: int = 0) -> Listener:
    """The port of a gateway, held before there is a model to serve; fixed ones follow each other."""
    host = table.gateway_host
    if is_wildcard(host):
        raise JobError(
            f"services.gateway_host is {host!r}, which listens everywhere and is no address to call",
            hint="Name the address of this machine that the task apps reach.",
        )
    return Listener(host, table.gateway_port and table.gateway_port + number)
