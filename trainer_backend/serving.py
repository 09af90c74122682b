"""The learner's policy behind the gateway, in this process: engine and server have threads of their own."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

from pydantic import SecretStr

from trainer_backend.collect.plan import Inference
from trainer_backend.inference.engine import EngineLimits, LocalEngine, stop_token_ids
from trainer_backend.inference.gateway import create_gateway
from trainer_backend.inference.served_policy import ServedPolicy
from trainer_backend.inference.server import GatewayServer, Listener
from trainer_backend.job_schema import JobConfig
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.logs import configure_logs

ACTOR = "actor"


def model_name(job: JobConfig) -> str:
    """What the gateway calls the policy that is trained."""
    return f"{job.job.name}/{ACTOR}"


class LocalServer:
    """Implements `protocols.InferenceServer`."""

    def __init__(self, engine: LocalEngine, learner: LocalLearner, inference: Inference) -> None:
        self._engine, self._learner, self.inference = engine, learner, inference

    async def publish(self, policy_version: int) -> None:
        """Copy the learner's weights to the engine between two requests."""
        await self._engine.load_weights(policy_version, self._learner.weights())

    def totals(self) -> dict[str, int]:
        """The engine's counters."""
        return asdict(self._engine.counters)


def gateway_listener(job: JobConfig) -> Listener:
    """The gateway's port, held before there is a model to serve.

    Raises:
        JobError: services.gateway_host is no address that a task app can call.
        PortTaken: services.gateway_port is in use.
    """
    return Listener(job.services.gateway_host, job.services.gateway_port)


@asynccontextmanager
async def serving(
    job: JobConfig, learner: LocalLearner, listener: Listener | None = None
) -> AsyncIterator[LocalServer]:
    """A gateway for `{job}/actor` with a fresh key; ended when the context is left.

    Args:
        listener: where it listens; absent: `gateway_listener(job)`, and raises what that raises.
    """
    configure_logs()
    table = job.inference
    key = SecretStr(secrets.token_urlsafe(32))
    model = model_name(job)
    engine = LocalEngine(
        learner.copy_to_serve(),
        stop_ids=stop_token_ids(learner.model, learner.tokenizer),
        limits=EngineLimits(
            slots=table.max_running,
            kept_prefixes=table.kept_prefixes,
            max_model_len=table.max_model_len,
            torch_threads=table.threads,
        ),
    )
    app = create_gateway({model: ServedPolicy(engine, learner.tokenizer)}, key=key)
    server = GatewayServer(app, listener or gateway_listener(job))
    engine.start()
    try:
        url = server.start()
        try:
            yield LocalServer(engine, learner, Inference(url=url, model=model, key=key))
        finally:
            server.stop()
    finally:
        engine.stop()
