"""Out of memory while generating: who did not fit hears which keys to lower, and everyone else goes on."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3ForCausalLM

from shared_schemas.trajectory import Sampling
from tests.trainer_backend.inference.naive import ask, assert_equal_to_naive, running, together
from trainer_backend.errors import EngineOutOfMemory
from trainer_backend.inference.cache import SlotCache
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.row_attention import RowAttention, RowAttentions
from trainer_backend.models.folder import is_out_of_memory

StartEngine = Callable[..., LocalEngine]
KNOBS = r"\[inference\]: .*Lower max_running, max_model_len or kept_prefixes"


class TightModel(Qwen3ForCausalLM):
    """Raises as CUDA does where a call does not fit."""

    fits: Callable[[int, int], bool] = staticmethod(lambda rows, tokens: True)

    def forward(self, input_ids: Tensor, **kwargs: object) -> object:
        if not self.fits(*input_ids.shape):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(input_ids=input_ids, **kwargs)


@pytest.fixture
def tight(model: PreTrainedModel) -> TightModel:
    own = TightModel(model.config)
    own.load_state_dict(model.state_dict())
    return own.eval()


async def test_a_prompt_that_does_not_fit_is_refused_with_the_keys_and_the_others_go_on(start_engine, tight):
    tight.fits = lambda rows, tokens: tokens <= 100
    engine = start_engine(tight)
    other = await running(engine, [1, 2, 3], tokens=200)
    long, beside = await together(engine, ask(engine, [7] * 150), ask(engine, [8, 9]))
    with pytest.raises(EngineOutOfMemory, match=KNOBS) as caught:
        long.result()
    assert "prefilling a prompt of 150 tokens, with" in caught.value.detail
    assert "room for 2048 tokens each" in caught.value.detail
    assert (len((await other).token_ids), len(beside.result().token_ids)) == (200, 5)
    assert len((await ask(engine, [7] * 50)).token_ids) == 5


async def test_the_kept_prefixes_make_room_first(start_engine: StartEngine, tight: TightModel):
    engine = start_engine(tight)
    prompt, other = list(range(120)), list(range(200, 320))
    await ask(engine, prompt)
    tight.fits = lambda rows, tokens: len(engine._worker.batch.prefixes.copies) == 0
    result = await ask(engine, other)
    tight.fits = lambda rows, tokens: True
    assert_equal_to_naive(tight, [(other, Sampling(seed=1, max_tokens=5))], [result])
    assert (await ask(engine, prompt)).prompt_tokens_reused == 0, "it was dropped"


class TightHead(nn.Linear):
    """Raises as CUDA does where it is given more than `most` rows."""

    most = 2

    def forward(self, hidden: Tensor) -> Tensor:
        if len(hidden) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(hidden)


def with_tight_head(model: PreTrainedModel) -> PreTrainedModel:
    own = copy.deepcopy(model)
    own.lm_head = TightHead(own.config.hidden_size, own.config.vocab_size, bias=False)
    own.lm_head.weight = own.model.embed_tokens.weight
    return own


@pytest.mark.parametrize("by_decoder", [True, False], ids=["our decoder", "transformers"])
async def test_a_step_that_does_not_fit_ends_the_longest_request_and_no_other(
    start_engine: StartEngine, tight: TightModel, model: PreTrainedModel, by_decoder: bool
):
    tight.fits = lambda rows, tokens: tokens > 1 or rows <= 2
    if by_decoder:
        tight = with_tight_head(model)
    engine = start_engine(tight)
    prompts = [[1, 2, 3], [4, 5, 6] * 5, [7, 8, 9] * 2]
    short, longest, middle = await together(engine, *(ask(engine, prompt) for prompt in prompts))
    with pytest.raises(EngineOutOfMemory, match="while decoding, with 3 requests running"):
        longest.result()
    requests = [(prompts[i], Sampling(seed=1, max_tokens=5)) for i in (0, 2)]
    assert_equal_to_naive(tight, requests, [short.result(), middle.result()])


async def test_where_not_even_one_request_fits_each_hears_it_and_the_engine_waits_for_the_next(
    start_engine: StartEngine, tight: TightModel
):
    tight.fits = lambda rows, tokens: False
    engine = start_engine(tight)
    for task in await together(engine, ask(engine, [1, 2, 3]), ask(engine, [4, 5, 6])):
        assert isinstance(task.exception(), EngineOutOfMemory)
    tight.fits = lambda rows, tokens: True
    assert len((await ask(engine, [1, 2, 3])).token_ids) == 5


async def test_a_cache_that_this_machine_cannot_hold_is_out_of_memory_too(start_engine, tokenizer):
    engine = start_engine(max_running=10**10)  # the CPU's allocator raises an error of another kind
    with pytest.raises(EngineOutOfMemory, match=KNOBS):
        await ask(engine, [1, 2, 3])


def test_only_running_out_of_memory_is_taken_for_it():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value) and is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    for text in (
        "MPS backend out of memory (MPS allocated: 9.06 GB, max allowed: 9.07 GB)",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    ):
        assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))


class SmallMemory(SlotCache):
    """Room for so many tensors of the next size."""

    left = 3

    def _grow(self, old: Tensor, capacity: int) -> Tensor:
        if old.shape[2] < capacity:
            if self.left == 0:
                raise torch.OutOfMemoryError("no memory left")
            self.left -= 1
        return super()._grow(old, capacity)


def test_a_cache_that_ran_out_of_memory_while_growing_still_holds_everything_and_can_try_again():
    cache = SmallMemory(slots=2, max_len=1024)
    cache.begin_prefill(first_row=0, length=100)
    numbers = torch.randn(2, 1, 100, 4)
    for layer in range(2):
        cache.update(numbers + layer, -numbers - layer, layer)
    with pytest.raises(torch.OutOfMemoryError):
        cache.reserve(200)
    assert cache.capacity == 128
    cache.left = 1
    cache.reserve(200)
    assert cache.capacity == 256
    for layer in range(2):
        row = cache.copy_out(1, 100).tensors
        torch.testing.assert_close(row[layer], numbers[1] + layer)
        torch.testing.assert_close(row[2 + layer], -numbers[1] - layer)


@pytest.mark.parametrize("left", [0, 1, 2, 3], ids=lambda left: f"{left} of 4 tensors grew")
def test_rows_attend_the_same_after_their_cache_ran_out_of_memory_while_growing(left: int):
    torch.manual_seed(0)
    small, large = (kind(slots=3, max_len=1024) for kind in (SmallMemory, SlotCache))
    both = [
        RowAttentions(cache, kv_heads=2, device=torch.device("cpu"), most_waste=10**6)
        for cache in (small, large)
    ]

    def assert_same(passes: list[RowAttention], tokens: int) -> None:
        for layer in range(2):
            keys_TKD, values_TKD, queries_TKD = torch.randn(3, tokens, 2, 4).unbind()
            for attention in passes:
                attention.write(layer, keys_TKD, values_TKD)
            mixed, expected = (attention.attend(layer, queries_TKD) for attention in passes)
            torch.testing.assert_close(mixed, expected)

    none_B, full_B = np.array([0, 0]), np.array([100, 90])
    assert_same([one.prefill(first_row=0, starts_B=none_B, counts_B=full_B) for one in both], 190)
    small.left = left
    with pytest.raises(torch.OutOfMemoryError):
        small.reserve(400)
    for step in range(3):
        assert_same([one.decode(full_B + step) for one in both], 2)
    small.left = 4
    small.reserve(200)  # of 4 tensors, some have room for 512 tokens already
    assert_same([one.decode(full_B + 3) for one in both], 2)
    assert_same([one.prefill(first_row=2, starts_B=none_B[:1], counts_B=full_B[:1]) for one in both], 100)
