"""Policies behind the gateway, in this process: the learner's, and untrained ones from folders.

Each engine and the server have threads of their own.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import SecretStr

from service_kit.logs import configure_logs_from
from service_kit.server import Listener, ServerThread, is_wildcard
from trainer_backend.collect.plan import Inference
from trainer_backend.core.memory import MemoryNeeds
from trainer_backend.core.policies import ACTOR, model_of
from trainer_backend.errors import EngineStopped, JobError
from trainer_backend.inference.asgi import error_response
from trainer_backend.inference.engine import EngineLimits, LocalEngine, stop_token_ids
from trainer_backend.inference.gateway import create_gateway
from trainer_backend.inference.served_policy import ServedPolicy
from trainer_backend.job.mixture_table import AllocationTable
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import InferenceTable, ModelTable, ServicesTable
from trainer_backend.learner.capacity import MemoryPlan, memory_plan
from trainer_backend.learner.device import place
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.loading import folder_to_serve, load_named
from trainer_backend.learner.support import refuse_unsupported

Result = TypeVar("Result")


class LocalServer:
    """Implements `protocols.InferenceServer` for the actor; it never touches policies served beside it."""

    def __init__(
        self,
        engine: LocalEngine,
        policy: ServedPolicy,
        learner: LocalLearner,
        inference: Inference,
        broken: asyncio.Future[str],
    ) -> None:
        self._engine, self._policy = engine, policy
        self._learner, self.inference = learner, inference
        self._broken = broken

    async def publish(self, policy_version: int) -> None:
        """Copy the learner's weights to the actor's engine between two requests."""
        await self._engine.load_weights(policy_version, self._learner.weights())

    async def while_serving(self, work: Coroutine[Any, Any, Result]) -> Result:
        return await while_unbroken(self._broken, work)

    def totals(self) -> dict[str, float]:
        """The actor's: the engine's counters, and what the gateway counted of the conversations."""
        return asdict(self._engine.counters) | self._policy.figures.totals()


def gateway_listener(table: ServicesTable) -> Listener:
    """The gateway's port, held before there is a model to serve.

    Raises:
        JobError: services.gateway_host is no address that a task app can call.
        PortTaken: services.gateway_port is in use.
    """
    host = table.gateway_host
    if is_wildcard(host):
        raise JobError(
            f"services.gateway_host is {host!r}, which listens everywhere and is no address to call",
            hint="Name the address of this machine that the task apps reach.",
        )
    return Listener(host, table.gateway_port)


@asynccontextmanager
async def serving(
    job: JobConfig,
    learner: LocalLearner,
    listener: Listener | None = None,
    *,
    fixed: Mapping[str, ServedPolicy] = MappingProxyType({}),
) -> AsyncIterator[LocalServer]:
    """A gateway for `{job}/actor` with a fresh key; ended when the context is left.

    Args:
        listener: where it listens; absent: `gateway_listener`, and raises what that raises.
        fixed: by name, policies that are served beside it, as `{job}/{name}` with the same key.
    """
    engine = LocalEngine(
        learner.copy_to_serve(),
        stop_ids=stop_token_ids(learner.model, learner.tokenizer),
        limits=engine_limits(job.inference, job.rollout_allocation_schedule, engines=1 + len(fixed)),
    )
    policy = ServedPolicy(engine, learner.tokenizer)
    names = {model_of(job.job.name, name): item for name, item in {ACTOR: policy, **fixed}.items()}
    listener = listener or gateway_listener(job.services)
    with _gateway(names, listener, None, max_model_len=job.inference.max_model_len) as inference:
        broken = asyncio.ensure_future(first_breakdown([policy, *fixed.values()]))
        try:
            yield LocalServer(engine, policy, learner, inference, broken)
        finally:
            broken.cancel()


class FolderPolicy:
    """The model of a folder as it is played, not trained: one copy, without optimizer or adapters.

    Args:
        job: [model] says how it is spoken to and where it computes, [inference] within which limits.
        folder: a model folder, such as a checkpoint of a run; its weights are read here.

    Raises:
        JobError: the device is not there, or cannot hold the model.
        ModelFolderError: there is no such model, or it cannot be played exactly.
    """

    def __init__(self, job: JobConfig, folder: Path) -> None:
        self._job = job
        self.plan = serving_part(memory_plan(job.model_copy(update={"lora": None}), folder))
        if shortage := self.plan.shortage():
            raise JobError(f"{shortage}, for the model alone: {self.plan}")
        model, tokenizer = load_named(in_folder(job.model, folder))
        refuse_unsupported(model, longest=job.inference.max_model_len)
        served = folder_to_serve(model, folder, place(job.model.device))
        stop_ids = stop_token_ids(served, tokenizer)
        self._policy = ServedPolicy(
            LocalEngine(served, stop_ids=stop_ids, limits=engine_limits(job.inference)), tokenizer
        )

    @contextmanager
    def serving(self, listener: Listener | None = None, key: SecretStr | None = None) -> Iterator[Inference]:
        """A gateway for `{job}/actor`; ended when the context is left, and not begun again.

        Args:
            listener: as `serving` takes it.
            key: what callers must know; absent: a fresh one.
        """
        job = self._job
        served, listener = (
            {model_of(job.job.name, ACTOR): self._policy},
            listener or gateway_listener(job.services),
        )
        with _gateway(served, listener, key, max_model_len=job.inference.max_model_len) as inference:
            yield inference

    async def while_serving(self, work: Coroutine[Any, Any, Result]) -> Result:
        """As `protocols.InferenceServer` has it."""
        broken = asyncio.ensure_future(first_breakdown([self._policy]))
        try:
            return await while_unbroken(broken, work)
        finally:
            broken.cancel()


async def first_breakdown(policies: Iterable[ServedPolicy]) -> str:
    """Waits until one of them can answer nobody any more; why that is."""
    loop = asyncio.get_running_loop()
    first: asyncio.Future[str] = loop.create_future()

    def settle(reason: str) -> None:
        if not first.done():
            first.set_result(reason)

    def report(breakdown: Future[str]) -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it who waited
            loop.call_soon_threadsafe(settle, breakdown.result())

    for policy in policies:
        policy.engine.breakdown.add_done_callback(report)
    return await first


async def while_unbroken(broken: asyncio.Future[str], work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which has ended in any case.

    Raises:
        EngineStopped: an engine ended by itself before; what waits for it would wait in vain.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, broken), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise EngineStopped(f"the engine does not run: {broken.result()}")
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextmanager
def _gateway(
    served: Mapping[str, ServedPolicy], listener: Listener, key: SecretStr | None, *, max_model_len: int
) -> Iterator[Inference]:
    """Serve policies by model name in a gateway; yield the address of the first one."""
    configure_logs_from()
    key = key or SecretStr(secrets.token_urlsafe(32))
    server = ServerThread(create_gateway(served, key=key), listener, respond=error_response)
    with ExitStack() as stack:
        for policy in served.values():
            stack.callback(policy.engine.stop)
            policy.engine.start()
        url = server.start()
        stack.callback(server.stop)
        yield Inference(url=url, model=next(iter(served)), key=key, max_model_len=max_model_len)


def engine_limits(
    table: InferenceTable, schedule: AllocationTable | None = None, *, engines: int = 1
) -> EngineLimits:
    """Of one of so many engines. Where several may sample at a time they share the job's threads: more would
    take the task app's cores. Where an iteration is sampled by one policy, that one has all of them."""
    sharing = 1 if schedule is None or schedule.unit == "iteration" else engines
    return EngineLimits(
        slots=table.slots,
        kept_prefixes=table.kept,
        max_model_len=table.max_model_len,
        torch_threads=max(1, table.threads // sharing),
    )


def in_folder(table: ModelTable, folder: Path) -> ModelTable:
    """Return the job's [model] table for another folder, with the same chat and device settings."""
    return table.model_copy(update={"preset": None, "name": None, "path": folder})


def serving_part(plan: MemoryPlan) -> MemoryPlan:
    """Return the part of a job's plan that serving needs. The model must fit; the cache grows with use."""
    needs = plan.needs.device
    device: dict[str, int] = {kind: needs[kind] for kind in ("engine", "cache", "overhead") if kind in needs}
    return replace(plan, needs=MemoryNeeds(device, {}, sum(device.values()) - needs["cache"]))
