"""Policies behind the gateway, in this process: the learner's, and those of folders which nobody trains.

Each engine and the server have threads of their own.
"""

import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType

from pydantic import SecretStr

from trainer_backend.collect.plan import Inference
from trainer_backend.core.memory import MemoryNeeds
from trainer_backend.core.policies import ACTOR, model_of
from trainer_backend.errors import JobError
from trainer_backend.inference.engine import EngineLimits, LocalEngine, stop_token_ids
from trainer_backend.inference.gateway import create_gateway
from trainer_backend.inference.served_policy import ServedPolicy
from trainer_backend.inference.server import GatewayServer, Listener, is_wildcard
from trainer_backend.jobfile.model_table import ModelTable
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.learner.capacity import MemoryPlan, memory_plan
from trainer_backend.learner.copies import folder_to_serve
from trainer_backend.learner.device import place
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.loading import load_named
from trainer_backend.learner.support import refuse_unsupported
from trainer_backend.logs import configure_logs


def model_name(job: JobConfig) -> str:
    """What the gateway calls the policy that is trained."""
    return model_of(job.job.name, ACTOR)


class LocalServer:
    """Implements `protocols.InferenceServer`, for the actor: what is served beside is never touched here."""

    def __init__(
        self, engine: LocalEngine, policy: ServedPolicy, learner: LocalLearner, inference: Inference
    ) -> None:
        self._engine, self._policy = engine, policy
        self._learner, self.inference = learner, inference

    async def publish(self, policy_version: int) -> None:
        """Copy the learner's weights to the actor's engine between two requests."""
        await self._engine.load_weights(policy_version, self._learner.weights())

    def totals(self) -> dict[str, float]:
        """The actor's: the engine's counters, and what the gateway counted of the conversations."""
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
    job: JobConfig,
    learner: LocalLearner,
    listener: Listener | None = None,
    *,
    fixed: Mapping[str, ServedPolicy] = MappingProxyType({}),
) -> AsyncIterator[LocalServer]:
    """A gateway for `{job}/actor` with a fresh key; ended when the context is left.

    Args:
        listener: where it listens; absent: `gateway_listener(job)`, and raises what that raises.
        fixed: by name, policies that are served beside it, as `{job}/{name}` with the same key.
    """
    engine = LocalEngine(
        learner.copy_to_serve(),
        stop_ids=stop_token_ids(learner.model, learner.tokenizer),
        limits=engine_limits(job, engines=1 + len(fixed)),
    )
    policy = ServedPolicy(engine, learner.tokenizer)
    with _gateway(job, {ACTOR: policy, **fixed}, listener) as inference:
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
        model, tokenizer = load_named(in_folder(job, folder))
        refuse_unsupported(model, longest=job.inference.max_model_len)
        served = folder_to_serve(model, folder, place(job.model.device))
        stop_ids = stop_token_ids(served, tokenizer)
        self._policy = ServedPolicy(
            LocalEngine(served, stop_ids=stop_ids, limits=engine_limits(job)), tokenizer
        )

    @contextmanager
    def serving(self, listener: Listener | None = None, key: SecretStr | None = None) -> Iterator[Inference]:
        """A gateway for `{job}/actor`; ended when the context is left, and not begun again.

        Args:
            listener: as `serving` takes it.
            key: what callers must know; absent: a fresh one.
        """
        with _gateway(self._job, {ACTOR: self._policy}, listener, key) as inference:
            yield inference


@contextmanager
def _gateway(
    job: JobConfig,
    policies: Mapping[str, ServedPolicy],
    listener: Listener | None,
    key: SecretStr | None = None,
) -> Iterator[Inference]:
    configure_logs()
    key = key or SecretStr(secrets.token_urlsafe(32))
    served = {model_of(job.job.name, name): policy for name, policy in policies.items()}
    server = GatewayServer(create_gateway(served, key=key), listener or gateway_listener(job))
    with ExitStack() as stack:
        for policy in policies.values():
            stack.callback(policy.engine.stop)
            policy.engine.start()
        url = server.start()
        stack.callback(server.stop)
        yield Inference(url=url, model=model_name(job), key=key, max_model_len=job.inference.max_model_len)


def engine_limits(job: JobConfig, *, engines: int = 1) -> EngineLimits:
    """Of one of so many engines. Where several may sample at a time they share the job's threads: more would
    take the task app's cores. Where an iteration is sampled by one policy, that one has all of them."""
    table, schedule = job.inference, job.rollout_allocation_schedule
    sharing = 1 if schedule is None or schedule.unit == "iteration" else engines
    return EngineLimits(
        slots=table.slots,
        kept_prefixes=table.kept,
        max_model_len=table.max_model_len,
        torch_threads=max(1, table.threads // sharing),
    )


def in_folder(job: JobConfig, folder: Path) -> ModelTable:
    """[model] of the job for another folder: spoken to and placed as it says."""
    return job.model.model_copy(update={"preset": None, "name": None, "path": folder})


def serving_part(plan: MemoryPlan) -> MemoryPlan:
    """What of a job's plan serving alone needs. The model must fit; the cache grows with what is asked."""
    needs = plan.needs.device
    device: dict[str, int] = {kind: needs[kind] for kind in ("engine", "cache", "overhead") if kind in needs}
    return replace(plan, needs=MemoryNeeds(device, {}, sum(device.values()) - needs["cache"]))
