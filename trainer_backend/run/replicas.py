"""The actor at vLLM servers: they are checked before a run begins, and load each version from a folder."""

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer_backend.errors import EngineBusy, JobError, RemoteRefused, RemoteUnavailable
from trainer_backend.inference.engine import stop_token_ids
from trainer_backend.inference.pool import Canary, Publication, ReplicaPool
from trainer_backend.inference.vllm_engine import VllmEngine
from trainer_backend.job.tables import InferenceTable
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.models.folder import embedding_rows

_CANARY_TOKENS = 64
# Differences of log-probs that arithmetic explains, by the precision that serves.
_CANARY_LIMIT_FLOAT32, _CANARY_LIMIT_BFLOAT16 = 1e-4, 0.05
# A server that is being started answers after minutes.
_LOOK_S = 1.0
_KEPT_VERSIONS = 2


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
        weights: the folder of the versions; the newest two are kept, since a replica that comes back loads
            the newest, and one may still be reading the one before.
        tell: is given a line for each replica that is lost or serves again.
    """

    def __init__(
        self, table: InferenceTable, learner: LocalLearner, weights: Path, tell: Callable[[str], None]
    ) -> None:
        stop_ids = stop_token_ids(learner.model, learner.tokenizer)
        engines = _engines(table, stop_ids=stop_ids, vocabulary=embedding_rows(learner.model))
        self.engine = ReplicaPool(engines, wait_s=table.replica_wait_s, tell=tell)
        self._learner, self._weights = learner, weights

    async def publish(self, policy_version: int) -> None:
        """Write the policy as a model folder, and have every replica serve it."""
        folder = self._weights / f"version_{policy_version}"
        canary = await asyncio.to_thread(self._write, folder)
        await self.engine.publish(Publication(policy_version, folder, canary))

    def totals(self) -> dict[str, float]:
        return self.engine.totals()

    async def look_after(self) -> None:
        """Bring lost replicas back, until it is cancelled."""
        await self.engine.look_after()

    def _write(self, folder: Path) -> Canary:
        self._learner.publish(folder)
        # By age, not by number: a run that goes on from an older checkpoint writes lower numbers anew.
        versions = sorted(self._weights.glob("version_*"), key=lambda path: path.stat().st_mtime_ns)
        for old in (*versions[:-_KEPT_VERSIONS], *self._weights.glob(".version_*")):
            shutil.rmtree(old, ignore_errors=True)
        ids = _canary_ids(embedding_rows(self._learner.model))[: self.engine.max_model_len - 1]
        low = self._learner.scorer.placement.low is not None
        limit = _CANARY_LIMIT_BFLOAT16 if low else _CANARY_LIMIT_FLOAT32
        return Canary(tuple(ids), tuple(self._learner.logprobs_of(ids)), limit)


def replicas_of(
    table: InferenceTable, learner: LocalLearner, weights: Path, tell: Callable[[str], None]
) -> ReplicaPublisher | None:
    """The servers that sample for the actor; None where an engine of this process does."""
    return ReplicaPublisher(table, learner, weights, tell) if table.engine == "vllm" else None


def _canary_ids(vocabulary: int) -> list[int]:
    """Spread over the vocabulary, so that no part of the embedding or the head goes untested."""
    return [(7 + place * (vocabulary // _CANARY_TOKENS + 1)) % vocabulary for place in range(_CANARY_TOKENS)]


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
