"""The actor at vLLM servers."""

from collections.abc import Callable

from trainer_backend.inference.pool import Servers
from trainer_backend.inference.served_policy import PolicyFacts
from trainer_backend.inference.vllm_engine import VllmEngine
from trainer_backend.job.tables import InferenceTable
from trainer_backend.learner.device import place

# Differences of log-probs that arithmetic explains, by the precision that serves.
_CANARY_LIMIT_FLOAT32, _CANARY_LIMIT_BFLOAT16 = 1e-4, 0.05


def make_servers(
    table: InferenceTable,
    facts: PolicyFacts,
    tell: Callable[[str], None],
    renew: Callable[[str], None] | None,
    ask: Callable[[], None],
) -> Servers:
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
    return Servers(engines, wait_s=table.replica_patience_s, canary_limit=limit, tell=tell, renew=renew)
