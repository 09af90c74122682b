"""A policy behind the gateway, in this process: the learner's, or that of a folder which nobody trains.

Engine and server have threads of their own.
"""

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import SecretStr

from trainer_backend.collect.plan import Inference
from trainer_backend.core.memory import MemoryNeeds
from trainer_backend.errors import JobError
from trainer_backend.inference.engine import EngineLimits, LocalEngine, stop_token_ids
from trainer_backend.inference.gateway import create_gateway
from trainer_backend.inference.served_policy import ServedPolicy
from trainer_backend.inference.server import GatewayServer, Listener, is_wildcard
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.learner.capacity import MemoryPlan, memory_plan
from trainer_backend.learner.copies import folder_to_serve
from trainer_backend.learner.device import place
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.loading import load_named
from trainer_backend.learner.support import refuse_unsupported
from trainer_backend.logs import configure_logs

ACTOR = "actor"


def model_name(job: JobConfig) -> str:
    """What the gateway calls the policy that is trained."""
    return f"{job.job.name}/{ACTOR}"


class LocalServer:
    """Implements `protocols.InferenceServer`."""

    def __init__(
        self, engine: LocalEngine, policy: ServedPolicy, learner: LocalLearner, inference: Inference
    ) -> None:
        self._engine, self._policy = engine, policy
        self._learner, self.inference = learner, inference

    async def publish(self, policy_version: int) -> None:
        """Copy the learner's weights to the engine between two requests."""
        await self._engine.load_weights(policy_version, self._learner.weights())

    def totals(self) -> dict[str, int]:
        """The engine's counters, and what the gateway counted of the conversations."""
        return asdict(self._engine.counters) | self._policy.figures.totals()


def gateway_listener(job: JobConfig) -> Listener:
    """The gateway's port, held before there is a model to serve.

    Raises:
        JobError: services.gateway_host is no address that a task app can call.
        PortTaken: services.gateway_port is in use.
    """
    host = job.services.gateway_host
    if is_wildcard(host):
        raise JobError(
            f"services.gateway_host is {host!r}, which listens everywhere and is no address to call",
            hint="Name the address of this machine that the task apps reach.",
        )
    return Listener(host, job.services.gateway_port)


@asynccontextmanager
async def serving(
    job: JobConfig, learner: LocalLearner, listener: Listener | None = None
) -> AsyncIterator[LocalServer]:
    """A gateway for `{job}/actor` with a fresh key; ended when the context is left.

    Args:
        listener: where it listens; absent: `gateway_listener(job)`, and raises what that raises.
    """
    engine = LocalEngine(
        learner.copy_to_serve(),
        stop_ids=stop_token_ids(learner.model, learner.tokenizer),
        limits=_limits(job),
    )
    policy = ServedPolicy(engine, learner.tokenizer)
    with _gateway(job, engine, policy, listener) as inference:
        yield LocalServer(engine, policy, learner, inference)


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
        table = job.model.model_copy(update={"preset": None, "name": None, "path": folder})
        model, tokenizer = load_named(table)
        refuse_unsupported(model, longest=job.inference.max_model_len)
        placement = place(job.model.device)
        served = folder_to_serve(model, folder, placement)
        self._engine = LocalEngine(served, stop_ids=stop_token_ids(served, tokenizer), limits=_limits(job))
        self._policy = ServedPolicy(self._engine, tokenizer)

    @contextmanager
    def serving(self, listener: Listener | None = None, key: SecretStr | None = None) -> Iterator[Inference]:
        """A gateway for `{job}/actor`; ended when the context is left, and not begun again.

        Args:
            listener: as `serving` takes it.
            key: what callers must know; absent: a fresh one.
        """
        with _gateway(self._job, self._engine, self._policy, listener, key) as inference:
            yield inference


@contextmanager
def _gateway(
    job: JobConfig,
    engine: LocalEngine,
    policy: ServedPolicy,
    listener: Listener | None,
    key: SecretStr | None = None,
) -> Iterator[Inference]:
    configure_logs()
    model, key = model_name(job), key or SecretStr(secrets.token_urlsafe(32))
    server = GatewayServer(create_gateway({model: policy}, key=key), listener or gateway_listener(job))
    engine.start()
    try:
        url = server.start()
        try:
            yield Inference(url=url, model=model, key=key, max_model_len=job.inference.max_model_len)
        finally:
            server.stop()
    finally:
        engine.stop()


def _limits(job: JobConfig) -> EngineLimits:
    table = job.inference
    return EngineLimits(
        slots=table.max_running,
        kept_prefixes=table.kept_prefixes,
        max_model_len=table.max_model_len,
        torch_threads=table.threads,
    )


def serving_part(plan: MemoryPlan) -> MemoryPlan:
    """What of a job's plan serving alone needs. The model must fit; the cache grows with what is asked."""
    needs = plan.needs.device
    device: dict[str, int] = {kind: needs[kind] for kind in ("engine", "cache", "overhead") if kind in needs}
    return replace(plan, needs=MemoryNeeds(device, {}, sum(device.values()) - needs["cache"]))
