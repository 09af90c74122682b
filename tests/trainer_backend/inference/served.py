"""A gateway on a real port with engines that the test can reach behind it."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import openai
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from service_kit.server import Listener, ServerThread
from shared_schemas.trajectory import Sampling
from trainer_backend.inference.actor import NO_EXTRAS, Extras, FrozenEngine, Generation
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.gateway_app import GatewayLimits, create_gateway
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.inference.served_policy import ServedPolicy

KEY = "key of this job"
MODEL = "job/actor"
MESSAGES = [{"role": "system", "content": "play"}, {"role": "user", "content": "wood 2 tree 1"}]


@dataclass(frozen=True)
class Served:
    """`client` waits for each reply; `asynchronous` makes a client for tests that do something meanwhile."""

    engine: LocalEngine
    url: str
    client: openai.OpenAI

    def asynchronous(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=30)


class StandInEngine(FrozenEngine):
    """Samples the ids that it was given, or raises the error, for a request each; then it waits for ever."""

    version, max_model_len = 0, 4096

    def __init__(self, samples: Iterable[Sequence[int] | Exception] = ()) -> None:
        self._samples = iter(samples)
        self.asked, self.cancelled = asyncio.Event(), asyncio.Event()

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, request_id: str, extras: Extras = NO_EXTRAS
    ) -> Generation:
        sample = next(self._samples, None)
        if isinstance(sample, Exception):
            raise sample
        if sample is not None:
            return Generation(tuple(sample), (-0.5,) * len(sample), "stop", ((0, 0),))
        self.asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError


def make_keys(model: PreTrainedModel, **changes: object) -> EngineKeys:
    """Keys with the model's own length. Changes are not checked: tests have sizes that no job may have."""
    longest = model.config.get_text_config().max_position_embeddings
    return EngineKeys(max_model_len=longest).model_copy(update=changes)


@contextmanager
def serving(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    stop_ids: tuple[int, ...] | None = None,
    version: int = 0,
    **keys: object,
) -> Iterator[Served]:
    """`stop_ids` None takes the tokenizer's end token; () makes `max_tokens` the only end."""
    stop_ids = (tokenizer.eos_token_id,) if stop_ids is None else stop_ids
    engine = LocalEngine(model, stop_ids=stop_ids, version=version, keys=make_keys(model, **keys))
    policies = {MODEL: ServedPolicy(engine, tokenizer)}
    limits = GatewayLimits(max_body_bytes=100_000, default_max_tokens=16)
    app = create_gateway(policies, key=KEY, limits=limits, clock=lambda: 1000.0)
    engine.start()
    with (
        ServerThread(app, Listener("127.0.0.1", 0)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=30) as client,
    ):
        yield Served(engine, url, client)
    engine.stop()
