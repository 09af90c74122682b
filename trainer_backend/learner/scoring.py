"""Log-probs and entropies of sampled tokens under a causal LM, on packed rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer_backend.core.collate import Packed, by_segment, cut_packed, pack_segments
from trainer_backend.core.logprobs import chunked_logprobs
from trainer_backend.core.segments import Segment
from trainer_backend.learner.attention import PackedAttention
from trainer_backend.learner.device import Placement
from trainer_backend.learner.last_mlp import last_mlp_on


@dataclass(frozen=True, slots=True)
class Scorer:
    """A model with how it computes.

    Attributes:
        model: on the placement's device, its attention set to `attention.implementation`.
        logits_chunk: tokens whose logits exist at a time.
    """

    model: PreTrainedModel
    placement: Placement
    attention: PackedAttention
    logits_chunk: int

    def logprobs(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """[N] log-probs and [N] entropies of the sampled tokens, differentiable in the model's weights.

        Attention and positions keep the segments of a row apart, so the result is that of each segment
        alone. The LM head runs on the N positions that predict a sampled token and nowhere else (and so does
        the last layer's MLP); outside autocast, so that logits are float32.
        """
        dtype = self.placement.low or self.model.dtype
        rows, told = self.attention.arranged(packed, self.placement.device, dtype)
        read = last_mlp_on(self.model, rows.predict_row_N, rows.predict_position_N)
        with self.placement.autocast(), read:
            hidden_BLD = self.model.model(
                input_ids=rows.token_ids_BL, position_ids=rows.position_ids_BL, use_cache=False, **told
            ).last_hidden_state
        return chunked_logprobs(
            hidden_BLD[rows.predict_row_N, rows.predict_position_N],
            self.model.lm_head.weight,
            rows.target_N,
            rows.temperature_N,
            chunk=self.logits_chunk,
            factors=self.placement.low,
        )

    @torch.inference_mode()
    def score(
        self, segments: Sequence[Segment], *, row_tokens: int, micro_batch_tokens: int
    ) -> list[list[float]]:
        """For each segment, the log-prob of each of its sampled tokens (nats), without gradient."""
        width = row_width(segments, row_tokens)
        packed = pack_segments(segments, row_tokens=width)
        pieces = [
            self.logprobs(piece)[0] for piece in cut_packed(packed, max(1, micro_batch_tokens // width))
        ]
        return by_segment(packed, torch.cat(pieces))


def row_width(segments: Sequence[Segment], row_tokens: int) -> int:
    """Width of a packed row: `row_tokens`, or the longest segment where that does not fit."""
    return max(row_tokens, max(len(segment) for segment in segments))
