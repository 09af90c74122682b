"""Draw tokens like `sampler.sample` without truncation by Triton kernels, in 2 launches instead of 30.

The first kernel reads the logits once. For each chunk of the vocabulary, it finds the maximum and its index.
For each block of a chunk, it sums exp(logit / temperature - maximum of the chunk). The second kernel draws a
block in proportion to these sums, then a token of the block. As in `sampler.inverse_cdf`, sums are float32
within a block and float64 across blocks. If a random number lies within 1e-7 of the boundary between two
tokens, the kernel may choose one of them, and `sampler.sample` the other.

Import this module only if `triton` is installed.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code=misc

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer_backend.inference.sampler import BELOW_ONE, BLOCK, Draw, RowSettings

# The number of blocks of a chunk.
_BLOCKS = 64


@triton.jit
def _sum_blocks(
    logits_ptr, temperatures_ptr, sums_ptr, highest_ptr, likeliest_ptr, in_row,
    VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * (BLOCKS * BLOCK) + tl.arange(0, BLOCKS * BLOCK)
    is_token = ids < VOCABULARY
    z = tl.load(logits_ptr + row * in_row + ids, mask=is_token, other=float("-inf")).to(tl.float32)
    z /= tl.load(temperatures_ptr + row)
    # With NaN among the logits the index of the maximum may be wrong, but the sums show the NaN.
    highest, place = tl.max(tl.where(z == z, z, float("-inf")), 0, return_indices=True)
    # If all logits of a chunk are -inf, its sums are 0, not NaN. With NaN or +inf, they are NaN.
    z = tl.where(z == float("-inf"), -1e38, z) - tl.maximum(highest, -1e37)
    sums = tl.sum(tl.reshape(tl.where(is_token, tl.exp(z), 0.0), (BLOCKS, BLOCK)), 1)
    place_of_chunk = row * CHUNKS + chunk
    tl.store(sums_ptr + place_of_chunk * BLOCKS + tl.arange(0, BLOCKS), sums)
    tl.store(highest_ptr + place_of_chunk, highest)
    tl.store(likeliest_ptr + place_of_chunk, chunk * (BLOCKS * BLOCK) + place)


@triton.jit
def _draw(
    logits_ptr, temperatures_ptr, greedy_ptr, uniforms_ptr, sums_ptr, highest_ptr, likeliest_ptr,
    tokens_ptr, logprobs_ptr, in_row,
    VOCABULARY: tl.constexpr, CHUNKS: tl.constexpr, ALL: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, BELOW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    c = tl.arange(0, ALL)
    is_chunk = c < CHUNKS
    highest_of_chunks = tl.load(highest_ptr + row * CHUNKS + c, mask=is_chunk, other=float("-inf"))
    highest, chunk = tl.max(highest_of_chunks, 0, return_indices=True)
    likeliest = tl.load(likeliest_ptr + row * CHUNKS + chunk)
    b = tl.arange(0, ALL * BLOCKS)
    of_block = tl.load(
        highest_ptr + row * CHUNKS + b // BLOCKS, mask=b < CHUNKS * BLOCKS, other=float("-inf")
    )
    sums = tl.load(sums_ptr + row * (CHUNKS * BLOCKS) + b, mask=b < CHUNKS * BLOCKS, other=0.0)
    sums = (sums * tl.exp(tl.maximum(of_block, -1e37) - tl.maximum(highest, -1e37))).to(tl.float64)
    cdf = tl.cumsum(sums, 0)
    total = tl.sum(sums, 0)
    threshold = tl.load(uniforms_ptr + row) * total
    # The first block whose cumulative sum exceeds the threshold; it has a mass above 0.
    is_before = cdf <= threshold
    block = tl.minimum(tl.sum(is_before.to(tl.int32), 0), tl.cdiv(VOCABULARY, BLOCK) - 1)
    rest = threshold - tl.sum(tl.where(b < block, sums, 0.0), 0)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < VOCABULARY
    z = tl.load(logits_ptr + row * in_row + ids, mask=is_token, other=float("-inf")).to(tl.float32)
    p = tl.exp(z / temperature - highest).to(tl.float64)
    cdf_of_block = tl.cumsum(p, 0)
    # The block's float32 sum may exceed its float64 sum, and so may the rest of the threshold.
    rest = tl.minimum(tl.maximum(rest, 0.0), tl.sum(p, 0) * BELOW)
    token = block * BLOCK + tl.sum((cdf_of_block <= rest).to(tl.int32), 0)
    token = tl.where(tl.load(greedy_ptr + row) != 0, likeliest, tl.minimum(token, VOCABULARY - 1))
    chosen = tl.load(logits_ptr + row * in_row + token).to(tl.float32) / temperature
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logprobs_ptr + row, chosen - highest - tl.log(total.to(tl.float32)))


def draw_tokens(logits_BV: Tensor, settings: RowSettings, uniforms_B: Tensor) -> Draw:
    """Draw tokens like `sampler.sample`, for settings from `RowSettings.of` that truncate nothing."""
    temperatures_B, greedy_B = settings.temperatures_B, settings.greedy_B
    assert temperatures_B is not None and greedy_B is not None, "of RowSettings.of"
    rows, vocabulary = logits_BV.shape
    chunks = triton.cdiv(vocabulary, _BLOCKS * BLOCK)
    sums = logits_BV.new_empty((rows, chunks * _BLOCKS), dtype=torch.float32)
    highest = logits_BV.new_empty((rows, chunks), dtype=torch.float32)
    likeliest = logits_BV.new_empty((rows, chunks), dtype=torch.int32)
    tokens_B = logits_BV.new_empty(rows, dtype=torch.int64)
    logprobs_B = logits_BV.new_empty(rows, dtype=torch.float32)
    _sum_blocks[(rows, chunks)](
        logits_BV, temperatures_B, sums, highest, likeliest, logits_BV.stride(0),
        VOCABULARY=vocabulary, CHUNKS=chunks, BLOCKS=_BLOCKS, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    _draw[(rows,)](
        logits_BV, temperatures_B, greedy_B.to(torch.int8), uniforms_B, sums, highest, likeliest,
        tokens_B, logprobs_B, logits_BV.stride(0),
        VOCABULARY=vocabulary, CHUNKS=chunks, ALL=triton.next_power_of_2(chunks), BLOCKS=_BLOCKS,
        BLOCK=BLOCK, BELOW=BELOW_ONE, num_warps=8,
    )  # fmt: skip
    return Draw(tokens_B, logprobs_B, None)
