"""A gateway on a real port with engines that the test can reach behind it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import openai
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from service_kit.server import Listener, ServerThread
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
    **keys: object,
) -> Iterator[Served]:
    """`stop_ids` None takes the tokenizer's end token; () makes `max_tokens` the only end."""
    stop_ids = (tokenizer.eos_token_id,) if stop_ids is None else stop_ids
    engine = LocalEngine(model, stop_ids=stop_ids, keys=make_keys(model, **keys))
    policies = {MODEL: ServedPolicy(engine, tokenizer)}
    app = create_gateway(policies, key=KEY, limits=GatewayLimits(default_max_tokens=16))
    engine.start()
    with (
        ServerThread(app, Listener("127.0.0.1", 0)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=30) as client,
    ):
        yield Served(engine, url, client)
    engine.stop()
