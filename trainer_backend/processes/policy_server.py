"""Serves policies behind a gateway in this process: the learner's, and untrained ones from folders.

Each engine and the server have their own threads.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from pydantic import SecretStr

from service_kit.boundary import describe_error
from service_kit.logs import configure_logs_from
from service_kit.server import Listener, ServerThread
from service_kit.tasks import end_tasks
from trainer_backend.collect.plan import Inference
from trainer_backend.core.policies import ACTOR, name_model
from trainer_backend.errors import EngineStopped, JobError
from trainer_backend.inference.actor import Engine, WeightSource
from trainer_backend.inference.asgi import error_response
from trainer_backend.inference.chat_check import Tokenizer
from trainer_backend.inference.engine import LocalEngine, stop_token_ids
from trainer_backend.inference.gateway_app import GatewayLimits, create_gateway
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.inference.served_policy import PolicyFacts, ServedPolicy
from trainer_backend.inference.servers import Servers
from trainer_backend.inference.versions import PolicyVersion
from trainer_backend.inference.vllm_engine import VllmEngine
from trainer_backend.job.tables import InferenceTable, ModelTable
from trainer_backend.learner.adapter_folder import FOLDER, read_adapter
from trainer_backend.learner.device import place
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.loading import folder_to_serve, load_named, new_weights
from trainer_backend.learner.memory_plan import serving_plan
from trainer_backend.learner.support import refuse_unsupported
from trainer_backend.models.sources import in_folder
from trainer_backend.parts import Reporter
from trainer_backend.processes.weight_delivery import WeightCopies, WeightFolders, make_delivery
from trainer_backend.run.fixed_policies import FixedPolicies
from trainer_backend.run.stopping import while_unbroken
from trainer_backend.rundir.layout import RunDirectory

Result = TypeVar("Result")
# Limits, by serving precision, of the mean difference of a test prompt's log-probs that rounding explains.
_CANARY_LIMIT_FLOAT32, _CANARY_LIMIT_BFLOAT16 = 1e-4, 0.05
NO_POLICIES: Mapping[str, ServedPolicy] = MappingProxyType({})


class ActorServer:
    """Implements `parts.InferenceServer` for the actor; the other served policies keep their weights."""

    def __init__(
        self,
        inference: Inference,
        engine: Engine,
        weights: WeightFolders,
        policy: ServedPolicy,
        fixed: FixedPolicies,
        *,
        broken: asyncio.Future[str],
    ) -> None:
        self.inference, self._engine, self._weights, self._policy = inference, engine, weights, policy
        self._fixed, self._broken = fixed, broken

    async def publish(self, policy_version: int) -> None:
        version = await self._weights.write(policy_version)
        await self._weights.deliver(self._engine.load(version))

    async def release(self) -> None:
        self._weights.hold()
        with suppress(EngineStopped):  # the next sample raises it; an update does not need the engine
            await self._engine.release()
        await self._fixed.release()

    async def resume(self) -> None:
        if (version := self._weights.held) is not None:
            await self._weights.deliver(self._engine.load(version))

    async def while_serving(self, work: Coroutine[Any, Any, Result]) -> Result:
        return await while_unbroken(self._broken, work)

    def watch(self, reporter: Reporter) -> None:
        self._engine.watch(reporter.process)

    async def verify(self) -> list[str]:
        return await asyncio.to_thread(self._fixed.verify)

    async def totals(self) -> dict[str, float]:
        """Return the counters of the actor's engine, and the gateway's counters of its conversations."""
        return {**self._engine.totals(), **self._policy.figures.totals()}


class PolicyServer:
    """Serves the actor and the fixed policies of a job behind one address and one key.

    Args:
        job_name: the beginning of the policies' names, such as `{job}/actor`.
        table: [inference], with the threads of one engine.
        key: the callers' key; None: a new random key; "none": callers on this machine need no key.
        directory: receives versions that engines load; None: an engine of this process copies the weights.
        broadcasts: whether the learner sends versions instead of writing them.
        tell: receives a line for each vLLM server that is lost or serves again.
    """

    def __init__(
        self,
        job_name: str,
        listener: Listener,
        table: InferenceTable,
        *,
        key: SecretStr | Literal["none"] | None = None,
        directory: RunDirectory | None = None,
        broadcasts: bool = False,
        tell: Callable[[str], None] = print,
        gateway_limits: GatewayLimits | None = None,
    ) -> None:
        self._directory, self._broadcasts, self._tell = directory, broadcasts, tell
        self._gateway_limits = gateway_limits
        self._job_name, self._listener, self.table = job_name, listener, table
        fresh = SecretStr(secrets.token_urlsafe(32))
        self._key = None if key == "none" else key or fresh
        model, length = name_model(job_name, ACTOR), table.max_model_len
        self.inference = Inference(listener.url, model, self._key, length, table.asks)

    @contextmanager
    def gateway(self, actor: ServedPolicy, fixed: Mapping[str, ServedPolicy] = NO_POLICIES) -> Iterator[None]:
        """Serve policies until the context is left. Call it only once."""
        configure_logs_from()
        served = {name_model(self._job_name, name): item for name, item in {ACTOR: actor, **fixed}.items()}
        gateway = create_gateway(served, key=self._key, limits=self._gateway_limits)
        server = ServerThread(gateway, self._listener, respond=error_response)
        with ExitStack() as stack:
            for policy in served.values():
                stack.callback(policy.engine.stop)
                policy.engine.start()
            server.start()
            stack.callback(server.stop)
            yield

    @asynccontextmanager
    async def serving(
        self, learner: LocalLearner, fixed: FixedPolicies | None = None
    ) -> AsyncIterator["ActorServer"]:
        """Serve the learner's policy, and fixed policies, until the context is left."""
        fixed = fixed or FixedPolicies()
        engine, weights = self._engine(learner)
        others = fixed.policies
        policy = ServedPolicy(engine, learner.tokenizer)
        with self.gateway(policy, others):
            watch = asyncio.ensure_future(engine.look_after())
            broken = asyncio.ensure_future(first_breakdown([policy, *others.values()], [watch]))
            try:
                yield ActorServer(self.inference, engine, weights, policy, fixed, broken=broken)
            finally:
                await end_tasks(broken, watch)
                await weights.close()

    def _engine(self, learner: LocalLearner) -> tuple[Engine, WeightFolders]:
        """Make the actor's vLLM servers or local engine, and the delivery of versions to it."""
        has_adapters = learner.config.lora is not None
        if self.table.engine == "vllm":
            assert self._directory is not None, "vLLM servers need folders"
            weights, table = make_delivery(
                learner, self.table, self._directory, self._tell,
                broadcasts=self._broadcasts, has_adapters=has_adapters,
            )  # fmt: skip
            engine = make_servers(table, learner.facts(), self._tell, weights.renew, weights.serve_again)
            return engine, weights

        def read(version: PolicyVersion) -> WeightSource:
            if self._directory is None:
                return learner.weights()
            # The engine copies the learner's model, in which adapters and base are apart in any precision.
            return read_adapter(version.folder / FOLDER) if has_adapters else version.folder

        stop_ids = learner.facts().stop_ids
        local = LocalEngine(learner.copy_to_serve(), stop_ids=stop_ids, keys=self.table, read=read)
        if self._directory is None:
            return local, WeightCopies(learner)
        return local, WeightFolders(learner, self._directory.weights)


class FolderPolicy:
    """Serves the model of a folder without training it: one copy, without optimizer or adapters."""

    def __init__(self, table: ModelTable, server: PolicyServer, folder: Path) -> None:
        self._server = server
        self.plan = serving_plan(table, server.table, folder)
        if shortage := self.plan.shortage():
            raise JobError(f"{shortage}, for the model alone: {self.plan}")
        engine, tokenizer = engine_of_folder(table, folder, server.table)
        self._policy = ServedPolicy(engine, tokenizer)

    @contextmanager
    def serving(self) -> Iterator[Inference]:
        """Serve the model as the actor until the context is left. Call it only once."""
        with self._server.gateway(self._policy):
            yield self._server.inference

    async def while_serving(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Implement `parts.InferenceServer.while_serving`."""
        broken = asyncio.ensure_future(first_breakdown([self._policy]))
        try:
            return await while_unbroken(broken, work)
        finally:
            broken.cancel()


async def first_breakdown(
    policies: Iterable[ServedPolicy], watches: Iterable[asyncio.Task[None]] = ()
) -> str:
    """Wait until an engine stops, or a task that watches one fails; return the reason."""
    loop = asyncio.get_running_loop()
    first: asyncio.Future[str] = loop.create_future()

    def settle(reason: str) -> None:
        if not first.done():
            first.set_result(reason)

    def report(breakdown: Future[str]) -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it all waiting calls
            loop.call_soon_threadsafe(settle, breakdown.result())

    def report_watch(watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and (error := watch.exception()) is not None:
            settle(describe_error(error))

    for watch in watches:
        watch.add_done_callback(report_watch)
    for policy in policies:
        policy.engine.breakdown.add_done_callback(report)
    return await first


def engine_of_folder(
    table: ModelTable, folder: Path, keys: EngineKeys, *, version: int = 0
) -> tuple[LocalEngine, Tokenizer]:
    """Make an engine with the weights of a model folder as this version; return it and the tokenizer."""
    model, tokenizer = load_named(in_folder(table, folder))
    refuse_unsupported(model, longest=keys.max_model_len)
    placement = place(table.device)
    served = folder_to_serve(model, folder, placement)
    engine = LocalEngine(
        served,
        stop_ids=stop_token_ids(served.generation_config, tokenizer),
        version=version,
        keys=keys,
        read=lambda later: new_weights(later.folder, placement),
    )
    return engine, tokenizer


def make_servers(
    table: InferenceTable,
    facts: PolicyFacts,
    tell: Callable[[str], None],
    renew: Callable[[str], None] | None,
    ask: Callable[[], None],
) -> Servers:
    """Make the replicas of inference.urls, which do not serve yet.

    Args:
        renew: restarts the server of an address; None: the servers are not the run's own.
        ask: makes the learner send its weights, since a server is about to ask for them.
    """
    engines = [
        VllmEngine(
            url, stop_ids=facts.stop_ids, vocabulary=facts.vocabulary, max_model_len=table.max_model_len,
            wait_s=table.replica_wait_s, weight_update=table.weight_update, ask=ask,
        )
        for url in table.urls
    ]  # fmt: skip
    is_exact = place(facts.table.device).low is None
    limit = _CANARY_LIMIT_FLOAT32 if is_exact else _CANARY_LIMIT_BFLOAT16
    return Servers(
        engines, wait_s=table.replica_patience_s, canary_limit=limit, tell=tell, renew=renew,
        sleeps=table.sleep,
    )  # fmt: skip
