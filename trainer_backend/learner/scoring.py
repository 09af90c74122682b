"""Log-probs and entropies of sampled tokens under a causal LM, on packed rows."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer_backend.core.collate import Packed, block_mask, by_segment, cut_packed, pack_segments
from trainer_backend.core.logprobs import chunked_logprobs
from trainer_backend.core.segments import Segment


def packed_logprobs(model: PreTrainedModel, packed: Packed) -> tuple[Tensor, Tensor]:
    """[N] log-probs and [N] entropies of the sampled tokens, differentiable in the model's weights.

    The attention mask and the positions keep the segments of a row apart, so the result is that of each
    segment alone. The LM head runs on the N positions that predict a sampled token and nowhere else.
    """
    hidden_BLD = model.model(
        input_ids=packed.token_ids_BL,
        attention_mask=block_mask(packed.segment_ids_BL),
        position_ids=packed.position_ids_BL,
        use_cache=False,
    ).last_hidden_state
    hidden_ND = hidden_BLD[packed.predict_row_N, packed.predict_position_N]
    return chunked_logprobs(hidden_ND, model.lm_head.weight, packed.target_N, packed.temperature_N)


def row_width(segments: Sequence[Segment], row_tokens: int) -> int:
    """Width of a packed row: `row_tokens`, or the longest segment where that does not fit."""
    return max(row_tokens, max(len(segment) for segment in segments))


@torch.inference_mode()
def score(
    model: PreTrainedModel, segments: Sequence[Segment], *, row_tokens: int, micro_batch_tokens: int
) -> list[list[float]]:
    """For each segment, the log-prob of each of its sampled tokens (nats), without gradient."""
    width = row_width(segments, row_tokens)
    packed = pack_segments(segments, row_tokens=width)
    pieces = [
        packed_logprobs(model, piece)[0] for piece in cut_packed(packed, max(1, micro_batch_tokens // width))
    ]
    return by_segment(packed, torch.cat(pieces))
