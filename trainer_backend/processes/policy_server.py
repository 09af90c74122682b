"""Serves policies through a gateway in this process: the learner's policy, and policies that are not trained.

The server and each engine have a thread of their own.
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
# The largest mean difference of a test prompt's log-probs, between server and learner, that rounding can
# explain, by serving precision.
_CANARY_LIMIT_FLOAT32, _CANARY_LIMIT_BFLOAT16 = 1e-4, 0.05
NO_POLICIES: Mapping[str, ServedPolicy] = MappingProxyType({})


class ActorServer:
    """Implements `parts.InferenceServer` with a gateway in this process.

    A publish changes the weights of the actor only.
    """

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
        with suppress(EngineStopped):  # the next request raises it; an update does not need the engine
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
        """Return the counters of the actor's engine, and the counters of the actor's conversations."""
        return {**self._engine.totals(), **self._policy.figures.totals()}


class PolicyServer:
    """Serves the actor and the fixed policies of a job behind one address and one key.

    Args:
        job_name: the first part of the names of the policies, such as `{job_name}/actor`.
        table: [inference]; every engine gets the number of threads in `threads`.
        key: the key that callers must send; None: a new random key; "none": callers on this machine need no
            key.
        directory: the run's directory, in which versions are written for the engines. None: a local engine
            copies the learner's weights.
        broadcasts: whether the learner sends versions to the engines instead of writing them.
        tell: receives a line of text for each vLLM server that is lost or serves again.
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
        """Return the actor's engine, and the object that delivers versions of the policy to this engine."""
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
            # The adapters are enough: the engine's model is a copy of the learner's, which keeps adapters and
            # base model apart in any precision.
            return read_adapter(version.folder / FOLDER) if has_adapters else version.folder

        stop_ids = learner.facts().stop_ids
        local = LocalEngine(learner.copy_to_serve(), stop_ids=stop_ids, keys=self.table, read=read)
        if self._directory is None:
            return local, WeightCopies(learner)
        return local, WeightFolders(learner, self._directory.weights)


class FolderPolicy:
    """Serves the model in a folder without training it. Only one copy of the model is in memory."""

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
        """Run `work`, which uses the server, in the same way as `parts.InferenceServer.while_serving`."""
        broken = asyncio.ensure_future(first_breakdown([self._policy]))
        try:
            return await while_unbroken(broken, work)
        finally:
            broken.cancel()


async def first_breakdown(
    policies: Iterable[ServedPolicy], watches: Iterable[asyncio.Task[None]] = ()
) -> str:
    """Wait until the engine of a policy stops or a task in `watches` fails; return the reason."""
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
    """Make a local engine for the model in a folder; return the engine and the tokenizer.

    Args:
        version: the version number that the engine gives to the weights of the folder.
    """
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
    """Make an engine that uses the vLLM servers in `inference.urls`; it is not started yet.

    Args:
        renew: restarts the server at an address; None: the run did not start the servers.
        ask: lets the learner send its weights; called when a server is about to ask for them.
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
