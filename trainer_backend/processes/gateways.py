"""Runs the gateways of a run with [cluster]: processes to which task apps send their model calls.

    this process -- listening sockets, keys, a folder --> gateway 0 .. n-1, each with an engine of its own
                 -- the calls of `processes.gateway_calls` -->

This process holds the sockets for the whole run. A gateway that dies is restarted with the same socket and
the same version. Until then, new requests wait at the socket, and task apps repeat interrupted requests. This
module does not import torch.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from pydantic import SecretStr

from service_kit.boundary import describe_error
from service_kit.server import Listener
from service_kit.tasks import end_tasks
from shared_schemas.urls import is_wildcard
from trainer_backend.collect.plan import Inference
from trainer_backend.core.policies import ACTOR, name_model
from trainer_backend.errors import InferenceError, JobError, NotPlaced
from trainer_backend.inference.versions import PolicyVersion
from trainer_backend.job.tables import InferenceTable, ModelTable, ServicesTable
from trainer_backend.parts import InferenceServer, Learner, Reporter
from trainer_backend.processes.gateway import Gateway, Say, added, load_s
from trainer_backend.processes.gateway_calls import CONTROL_KEY, GATEWAY_KEY, GatewaySetup
from trainer_backend.processes.launching import Launcher, Resources
from trainer_backend.processes.weight_delivery import WeightFolders, make_delivery
from trainer_backend.run.fixed_setup import FixedSetup
from trainer_backend.run.stopping import while_unbroken
from trainer_backend.rundir.layout import RunDirectory

Result = TypeVar("Result")
# Name, in the totals, of the number of restarts of gateways.
RESTARTS = "gateway_restarts"


class Gateways:
    """Implements `parts.InferenceServer` with gateways that run in other processes.

    The vLLM servers of the run are divided among the gateways.
    """

    def __init__(self, inference: Inference, gateways: Sequence[Gateway], weights: WeightFolders) -> None:
        self.inference, self.gateways, self._weights = inference, gateways, weights
        self._may_start = asyncio.Event()
        self._may_start.set()
        for gateway in gateways:
            gateway.renew, gateway.serve_again = weights.renew, weights.serve_again
            gateway.may_start = self._may_start
        if weights.servers is not None:
            weights.servers.on_move(self.move_server)
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._keepers: list[asyncio.Task[str]] = []

    async def publish(self, policy_version: int) -> None:
        """Write or send the policy, and let every gateway serve it. The first call starts the gateways."""
        version = await self._weights.write(policy_version)
        await self._deliver(version)

    async def release(self) -> None:
        """Let vLLM servers sleep if `inference.sleep` is set. Local engines keep their memory."""
        self._weights.hold()
        if self._weights.held is not None:
            await self.while_serving(_all(gateway.release() for gateway in self.gateways))
            self._may_start.clear()  # a gateway that starts would wake its servers

    async def resume(self) -> None:
        if (version := self._weights.held) is not None:
            await self._deliver(version)

    async def _deliver(self, version: PolicyVersion) -> None:
        self._may_start.set()
        await self._weights.deliver(self.while_serving(self._load(version)))

    async def while_serving(self, work: Coroutine[Any, Any, Result]) -> Result:
        return await while_unbroken(self._broken, work)

    def watch(self, reporter: Reporter) -> None:
        for gateway in self.gateways:
            gateway.reporter = reporter

    async def verify(self) -> list[str]:
        if not self._keepers:  # stopped before the first publish: no gateway will ever answer
            return []
        lines = await self.while_serving(_all(gateway.verify() for gateway in self.gateways))
        return [line for own in lines for line in own]

    async def totals(self) -> dict[str, float]:
        """Return the counts summed over all gateways, and the number of restarts of gateways.

        If a gateway can no longer serve, return the last known counts, so that the caller can still save an
        update. The next call that needs the gateways raises the error.
        """
        reading = _all(gateway.totals() for gateway in self.gateways)
        try:
            counts = await self.while_serving(reading)
        except (InferenceError, JobError, NotPlaced):
            if not self._broken.done():
                raise
            counts = [gateway.known_totals for gateway in self.gateways]
        return {**added(counts), RESTARTS: sum(gateway.restarts for gateway in self.gateways)}

    async def close(self) -> None:
        await end_tasks(*self._keepers)
        await self._weights.close()
        for gateway in self.gateways:
            await gateway.close()

    async def move_server(self, url: str, new_url: str) -> None:
        await _all(gateway.move_server(url, new_url) for gateway in self.gateways)

    async def _load(self, version: PolicyVersion) -> None:
        if self._keepers:
            await _all(gateway.load(version) for gateway in self.gateways)
            return
        self._keepers = [asyncio.ensure_future(gateway.keep(version)) for gateway in self.gateways]
        for keeper in self._keepers:
            keeper.add_done_callback(self._end)
        await _all(gateway.ready.wait() for gateway in self.gateways)

    def _end(self, keeper: asyncio.Task[str]) -> None:
        if not keeper.cancelled() and not self._broken.done():
            error = keeper.exception()
            if isinstance(error, JobError | NotPlaced):
                self._broken.set_exception(error)
                self._broken.exception()  # or asyncio would log it if no later call reads it
                return
            self._broken.set_result(keeper.result() if error is None else describe_error(error))


async def _all(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run coroutines concurrently and return their results. Raise an error only once all have ended."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


class ActorGateways(Protocol):
    """Starts the gateways of a run: `serving` yields the server to which the run publishes its policy."""

    inference: Inference
    """The address, model name and key for requests; set before `serving` is called."""

    def serving(self, learner: Any, fixed: Any = None) -> AbstractAsyncContextManager[InferenceServer]:
        """Serve the learner's policy, and the policies in `fixed`, until the context is left."""


@dataclass
class GatewayProcesses:
    """Starts the gateways of a run with [cluster], one process for each listener.

    Each process loads its own copies of the fixed policies.
    """

    job_name: str
    model: ModelTable
    table: InferenceTable
    fixed: FixedSetup
    listeners: Sequence[Listener]
    directory: RunDirectory
    tell: Say
    """Receives a line of text for each gateway or vLLM server that dies."""
    launcher: Launcher
    has_adapters: bool
    by_broadcast: bool
    """Whether the learner sends new weights to vLLM servers, tensor by tensor."""

    def __post_init__(self) -> None:
        self._key = SecretStr(secrets.token_urlsafe(32))
        url, *others = (listener.url for listener in self.listeners)
        table, model = self.table, name_model(self.job_name, ACTOR)
        self.inference = Inference(url, model, self._key, table.max_model_len, table.asks, tuple(others))

    @asynccontextmanager
    async def serving(self, learner: Learner, fixed: None = None) -> AsyncIterator[Gateways]:
        """Yield the gateways. They serve from the first publish until the context is left."""
        weights, table = await asyncio.to_thread(
            make_delivery, learner, self.table, self.directory, self.tell,
            broadcasts=self.by_broadcast, has_adapters=self.has_adapters,
            launcher=self.launcher, device=self.model.device,
        )  # fmt: skip
        keys = {GATEWAY_KEY: self._key.get_secret_value(), CONTROL_KEY: secrets.token_urlsafe(32)}
        # Gateways without local engines run on the orchestrator's machine.
        needs = Resources("gateways", len(self.listeners), device=self.model.device)
        resources = needs if self.table.engine == "local" else None
        gateways = [
            Gateway(
                number, listener, partial(self._setup, table, weights, number), self.tell, self.launcher,
                keys=keys, log_file=self.directory.gateway_log(number), resources=resources,
                load_s=load_s(table),
            )
            for number, listener in enumerate(self.listeners)
        ]  # fmt: skip
        server = Gateways(self.inference, gateways, weights)
        try:
            yield server
        finally:
            await server.close()

    def _setup(
        self, table: InferenceTable, weights: WeightFolders, number: int, version: PolicyVersion, first: bool
    ) -> GatewaySetup:
        """Make the setup for a gateway's next process; `first` is true for the gateway's first process."""
        if weights.servers is not None:  # the servers' addresses may have changed
            table = table.model_copy(update={"urls": weights.servers.urls})
        return GatewaySetup(
            job_name=self.job_name,
            model=self.model,
            inference=divide_table(table, number, len(self.listeners)),
            fixed=self.fixed,
            run=self.directory.path.resolve(),
            version=version,
            probes=first,
        )


def divide_table(table: InferenceTable, number: int, count: int) -> InferenceTable:
    """Return [inference] with one gateway's share of the servers and threads."""
    share = {"threads": max(1, table.threads // count), "urls": table.urls[number::count]}
    return table.model_copy(update=share)


def gateway_listener(table: ServicesTable, number: int = 0) -> Listener:
    """Open the port of a gateway. If `services.gateway_port` is set, `number` is added to it.

    Raises:
        JobError: `services.gateway_host` is an address on which nothing can be called, such as 0.0.0.0.
    """
    host = table.gateway_host
    if is_wildcard(host):
        raise JobError(
            f"services.gateway_host is {host!r}, which listens everywhere and is no address to call",
            hint="Name the address of this machine that the task apps reach.",
        )
    return Listener(host, table.gateway_port and table.gateway_port + number)
