"""The engine on a CUDA device: reused prefixes, exact log-probs, and running out of real memory."""

import asyncio
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from shared_schemas.trajectory import Sampling
from trainer_backend.errors import EngineOutOfMemory
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.models import build_preset, train_tokenizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.fixture
def model() -> PreTrainedModel:
    return build_preset("tiny-0.3m", train_tokenizer(["wood stone tree"], 512), seed=1).to("cuda")


@pytest.fixture
def engine(model: PreTrainedModel) -> Iterator[LocalEngine]:
    started = LocalEngine(model, stop_ids=[])
    started.start()
    yield started
    started.stop()


async def test_siblings_and_turns_reuse_prefixes_and_keep_their_logprobs(
    engine: LocalEngine, model: PreTrainedModel
):
    prompt = [i % 200 for i in range(150)]
    siblings = await asyncio.gather(
        *(engine.generate(prompt, Sampling(seed=i, max_tokens=20), request_id=str(i)) for i in range(8))
    )
    longer = [*prompt, *siblings[0].token_ids, *range(40)]
    turn = await engine.generate(longer, Sampling(seed=1, max_tokens=20), request_id="turn")
    assert sorted(result.prompt_tokens_reused for result in siblings) == [0] + [149] * 7
    assert turn.prompt_tokens_reused == 169
    for ids, result in [*((prompt, sibling) for sibling in siblings), (longer, turn)]:
        with torch.inference_mode():
            whole = torch.tensor([[*ids, *result.token_ids]], device="cuda")
            logits = model(whole).logits[0, len(ids) - 1 : -1].float()
        chosen = torch.tensor(result.token_ids, device="cuda")[:, None]
        recomputed = logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist()
        assert result.logprobs == pytest.approx(recomputed, abs=1e-4)


async def test_a_cache_that_the_device_cannot_hold_is_told_with_the_keys_to_lower(model: PreTrainedModel):
    # A row of the first capacity is 2 layers x 2 x 4 heads x 128 positions x 24 numbers: 200 kB.
    keys = EngineKeys().model_copy(update={"max_running": 10**8})
    engine = LocalEngine(model, stop_ids=[], keys=keys, paged=False)
    engine.start()
    with pytest.raises(EngineOutOfMemory, match="Lower max_running, max_model_len or kept_prefixes"):
        await engine.generate([1, 2, 3], Sampling(max_tokens=2), request_id="a")
    engine.stop()
