"""Log-probs and entropies of sampled tokens under a causal LM, on packed rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer_backend.core.collate import Packed, by_segment, cut_packed, pack_segments
from trainer_backend.core.logprobs import chunked_logprobs
from trainer_backend.core.segments import CONTEXT, Segment
from trainer_backend.errors import SegmentError, place
from trainer_backend.learner.attention import PackedAttention
from trainer_backend.learner.decoder import is_known, read_states
from trainer_backend.learner.device import Placement
from trainer_backend.models.folder import embedding_rows
from trainer_backend.models.precision import tokens_for


@dataclass(frozen=True, slots=True)
class States:
    """What a forward pass leaves for the heads.

    rows: as the model was given them, on its device.
    hidden_ND: last hidden states, in the order of `rows.target_N`.
    """

    rows: Packed
    hidden_ND: Tensor


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

    def states(self, packed: Packed) -> States:
        """The last hidden states where sampled tokens are predicted, differentiable in the model's weights.

        Attention and positions keep the segments of a row apart, so they are those of each segment alone.
        """
        dtype = self.placement.low or self.model.dtype
        rows, arguments = self.attention.arranged(packed, self.placement.device, dtype)
        tokens = tokens_for(self.model, rows.token_ids_BL, self.placement.low)
        attend, attend_read = (arguments.get(f"turnwise_{name}") for name in ("attend", "attend_read"))
        with self.placement.autocast():
            if attend is not None and is_known(self.model):
                return States(rows, read_states(self.model, rows, tokens, attend, attend_read))
            hidden_BLD = self.model.model(
                **tokens, position_ids=rows.position_ids_BL, use_cache=False, **arguments
            ).last_hidden_state
        return States(rows, hidden_BLD[rows.predict_row_N, rows.predict_position_N])

    def logprobs_at(self, states: States) -> tuple[Tensor, Tensor]:
        """[N] log-probs and [N] entropies of the sampled tokens.

        The LM head runs on the N positions that predict a sampled token and nowhere else; outside
        autocast, so that logits are float32.
        """
        return chunked_logprobs(
            states.hidden_ND,
            self.model.lm_head.weight,
            states.rows.target_N,
            states.rows.temperature_N,
            chunk=self.logits_chunk,
            factors=self.placement.low,
        )

    def logprobs(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """[N] log-probs and [N] entropies of the sampled tokens, differentiable in the model's weights."""
        return self.logprobs_at(self.states(packed))

    def score(
        self, segments: Sequence[Segment], *, row_tokens: int, micro_batch_tokens: int
    ) -> list[list[float]]:
        """For each segment, the log-prob of each of its sampled tokens (nats), without gradient."""
        (found,) = self.each(
            segments,
            lambda states: (self.logprobs_at(states)[0],),
            row_tokens=row_tokens,
            micro_batch_tokens=micro_batch_tokens,
        )
        return found

    def each(
        self,
        segments: Sequence[Segment],
        columns: Callable[[States], tuple[Tensor, ...]],
        *,
        row_tokens: int,
        micro_batch_tokens: int,
    ) -> list[list[list[float]]]:
        """As `in_pieces`, of the states of each piece."""
        refuse_unknown_ids(segments, embedding_rows(self.model))
        return in_pieces(
            segments,
            lambda piece: columns(self.states(piece)),
            row_tokens=row_tokens,
            micro_batch_tokens=micro_batch_tokens,
        )


@torch.inference_mode()
def in_pieces(
    segments: Sequence[Segment],
    columns: Callable[[Packed], tuple[Tensor, ...]],
    *,
    row_tokens: int,
    micro_batch_tokens: int,
) -> list[list[list[float]]]:
    """For each [N] column that `columns` gives: for each segment, the numbers of its sampled tokens."""
    width = row_width(segments, row_tokens)
    packed = pack_segments(segments, row_tokens=width)
    pieces = [columns(piece) for piece in cut_packed(packed, max(1, micro_batch_tokens // width))]
    return [by_segment(packed, torch.cat(column)) for column in zip(*pieces, strict=True)]


def logprobs_in_pieces(
    policy: Callable[[Packed], Tensor],
    segments: Sequence[Segment],
    *,
    row_tokens: int,
    micro_batch_tokens: int,
) -> list[list[float]]:
    """For each segment, the [N] log-probs (nats) that `policy` gives its sampled tokens."""
    (found,) = in_pieces(
        segments,
        lambda piece: (policy(piece),),
        row_tokens=row_tokens,
        micro_batch_tokens=micro_batch_tokens,
    )
    return found


def refuse_unknown_ids(segments: Sequence[Segment], rows: int) -> None:
    """A model with `rows` ids has none beyond them: somebody else's server may, long after it was probed."""
    for segment in segments:
        if min(segment.token_ids) >= 0 and max(segment.token_ids) < rows:
            continue
        index = next(i for i, token in enumerate(segment.token_ids) if not 0 <= token < rows)
        # A prompt is of the decision that comes after it.
        turn = next((t + 1 for t in segment.decision[index:] if t != CONTEXT), None)
        raise SegmentError(
            f"token id {segment.token_ids[index]}, and the actor knows the ids 0 to {rows - 1}",
            where=place(segment.rollout_id, turn, index),
            hint="Who sampled it has another vocabulary than the actor.",
        )


def row_width(segments: Sequence[Segment], row_tokens: int) -> int:
    """Width of a packed row: `row_tokens`, or the longest segment where that does not fit."""
    return max(row_tokens, max(len(segment) for segment in segments))
