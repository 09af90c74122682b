"""The actor at vLLM servers: they are checked before a run begins, and load each version from a folder."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer_backend.errors import EngineBusy, JobError, RemoteRefused, RemoteUnavailable
from trainer_backend.inference.pool import Canary, Publication, ReplicaPool
from trainer_backend.inference.served_policy import PolicyFacts
from trainer_backend.inference.versions import PolicyVersion
from trainer_backend.inference.vllm_engine import VllmEngine
from trainer_backend.job.tables import InferenceTable, ModelTable
from trainer_backend.learner.device import place
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.run.weight_folders import WeightFolders

# Differences of log-probs that arithmetic explains, by the precision that serves.
_CANARY_LIMIT_FLOAT32, _CANARY_LIMIT_BFLOAT16 = 1e-4, 0.05
# A server that is being started answers after minutes.
_LOOK_S = 1.0


async def check_servers(table: InferenceTable) -> list[str]:
    """Check each server of inference.urls, and wait up to `replica_wait_s` for one that is still starting.

    Returns:
        A line about each.

    Raises:
        JobError: one does not answer in time, or cannot be trained with.
    """
    return list(await asyncio.gather(*(_check(engine, table) for engine in _engines(table))))


async def _check(engine: VllmEngine, table: InferenceTable) -> str:
    deadline = time.monotonic() + table.replica_wait_s
    try:
        while True:
            try:
                return await engine.refuse_unfit()
            except (EngineBusy, RemoteUnavailable) as error:
                if time.monotonic() > deadline:
                    raise JobError(
                        f"inference.urls: no vLLM server answered within {table.replica_wait_s:g} s "
                        f"(inference.replica_wait_s): {error.detail}",
                        hint="docs/vllm.md says how to start one.",
                    ) from error
                await asyncio.sleep(_LOOK_S)
            except RemoteRefused as error:
                raise JobError(f"inference.urls: {error.detail}", hint=error.hint) from error
    finally:
        await engine.close()


class ReplicaPublisher:
    """Gives the learner's weights to the replicas of the actor.

    Args:
        weights: the folder of the versions.
        tell: is given a line for each replica that is lost or serves again.
    """

    def __init__(
        self, table: InferenceTable, learner: LocalLearner, weights: Path, tell: Callable[[str], None]
    ) -> None:
        facts = learner.facts()
        self.engine, self._model = pool_of(table, facts, tell), facts.table
        self._folders = WeightFolders(learner, weights, prompt_tokens=table.max_model_len - 1)

    async def publish(self, policy_version: int) -> None:
        """Write the policy as a model folder, and have every replica serve it."""
        version = await asyncio.to_thread(self._folders.write, policy_version)
        await self.engine.publish(publication_of(version, self._model))

    def totals(self) -> dict[str, float]:
        return self.engine.totals()

    async def look_after(self) -> None:
        """Bring lost replicas back, until it is cancelled."""
        await self.engine.look_after()


def pool_of(table: InferenceTable, facts: PolicyFacts, tell: Callable[[str], None]) -> ReplicaPool:
    """The replicas of inference.urls, none of which serves yet."""
    engines = _engines(table, stop_ids=facts.stop_ids, vocabulary=facts.vocabulary)
    return ReplicaPool(engines, wait_s=table.replica_wait_s, tell=tell)


def publication_of(version: PolicyVersion, model: ModelTable) -> Publication:
    """A version as replicas load it, with the canary that its scored prompt is.

    Args:
        model: says where the learner computes, and so how exactly.
    """
    prompt = version.prompt
    assert prompt is not None, "the learner scores one for every server that is not ours"
    limit = _CANARY_LIMIT_FLOAT32 if place(model.device).low is None else _CANARY_LIMIT_BFLOAT16
    return Publication(version.number, version.folder, Canary(prompt.ids, prompt.logprobs, limit))


def _engines(
    table: InferenceTable, *, stop_ids: Sequence[int] = (), vocabulary: int = 2**31
) -> list[VllmEngine]:
    return [
        VllmEngine(
            url,
            stop_ids=stop_ids,
            vocabulary=vocabulary,
            max_model_len=table.max_model_len,
            wait_s=table.replica_wait_s,
            weight_update=table.weight_update,
        )
        for url in table.urls
    ]
