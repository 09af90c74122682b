"""The actor at vLLM servers, which load each version from a folder, or from the learner."""

from collections.abc import Callable
from urllib.parse import urlsplit

from trainer_backend.inference.pool import Replica, ReplicaPool, Show
from trainer_backend.inference.served_policy import PolicyFacts
from trainer_backend.inference.vllm_engine import VllmEngine
from trainer_backend.job.tables import InferenceTable
from trainer_backend.learner.device import place
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.protocols import Reporter
from trainer_backend.run.weight_broadcast import deliver_to_servers
from trainer_backend.rundir.layout import RunDirectory

# Differences of log-probs that arithmetic explains, by the precision that serves.
_CANARY_LIMIT_FLOAT32, _CANARY_LIMIT_BFLOAT16 = 1e-4, 0.05


class ReplicaPublisher:
    """Gives the learner's weights to the replicas of the actor; `tell` is given lines about these."""

    def __init__(
        self,
        table: InferenceTable,
        learner: LocalLearner,
        directory: RunDirectory,
        tell: Callable[[str], None],
        *,
        broadcasts: bool = False,
    ) -> None:
        has_adapters = learner.config.lora is not None
        self._weights, table = deliver_to_servers(
            learner, table, directory, tell, broadcasts=broadcasts, has_adapters=has_adapters
        )
        weights = self._weights
        self.engine = pool_of(table, learner.facts(), tell, weights.renew, weights.serve_again)

    async def publish(self, policy_version: int) -> None:
        """Write or send the policy, and have every replica serve it; at first, start servers."""
        version = await self._weights.write(policy_version)
        await self._weights.deliver(self.engine.publish(version))

    def totals(self) -> dict[str, float]:
        return self.engine.totals()

    def watch(self, reporter: Reporter) -> None:
        """Report each replica, and each change of one from now on."""
        self.engine.watch(shown_by(reporter.process))

    async def release(self) -> None:
        """Its servers have memory of their own."""

    async def look_after(self) -> None:
        """Bring lost replicas back, until it is cancelled; then servers of the run end."""
        try:
            await self.engine.look_after()
        finally:
            await self._weights.close()


def shown_by(report: Callable[..., None]) -> Show:
    """What reports a replica as a process of the run; `report` is called as `protocols.Reporter.process`."""

    def show(replica: Replica, version: int | None) -> None:
        word = replica.last_error if replica.state == "lost" else ""
        name = urlsplit(replica.engine.url).netloc
        report(name, role="replica", state=replica.state, version=version, word=word)

    return show


def pool_of(
    table: InferenceTable,
    facts: PolicyFacts,
    tell: Callable[[str], None],
    renew: Callable[[str], None] | None,
    ask: Callable[[], None],
) -> ReplicaPool:
    """The replicas of inference.urls, none of which serves yet.

    Args:
        renew: starts the server of an address anew; None: they are not the run's own.
        ask: has the learner send its weights to a server that is about to ask for them.
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
    return ReplicaPool(engines, wait_s=table.replica_patience_s, canary_limit=limit, tell=tell, renew=renew)
