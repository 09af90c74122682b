"""Computes log-probs and entropies of sampled tokens under a causal LM.

Segments are packed: one row of a batch can hold several segments.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from trainer_backend.core.collate import Packed, by_segment, cut_packed, pack_segments
from trainer_backend.core.experts import UNKNOWN
from trainer_backend.core.logprobs import PLAIN, LogitMap, chunked_logprobs
from trainer_backend.core.segments import Segment
from trainer_backend.core.tries import Tries
from trainer_backend.errors import SegmentError, place
from trainer_backend.job.training_table import LoopKeys
from trainer_backend.learner.attention import GROUPS, ONE_ROW, Groups, PackedAttention, PaddedRows
from trainer_backend.learner.device import Placement
from trainer_backend.learner.experts import Experts, Routing
from trainer_backend.learner.operators import BY_TORCH
from trainer_backend.learner.packed_decoder import Operators, is_known, read_states
from trainer_backend.learner.ranks import ALONE, Ranks
from trainer_backend.learner.sharding import through
from trainer_backend.models.folder import embedding_rows
from trainer_backend.models.precision import tokens_for
from trainer_backend.models.routers import count_experts, replaying

Piece = TypeVar("Piece")


@dataclass(frozen=True, slots=True)
class Hidden:
    """Last hidden states [N, D] at the positions that predict the N sampled tokens `rows.target_N`."""

    rows: Packed
    hidden_ND: Tensor


@dataclass(frozen=True, slots=True)
class States(Hidden):
    """Last hidden states, with the log-probs and entropies (nats) of the sampled tokens."""

    logprobs_N: Tensor
    entropies_N: Tensor


@dataclass(frozen=True, slots=True)
class Scorer:
    """Computes hidden states, log-probs and entropies of segments with one model."""

    model: PreTrainedModel
    """The model, on the device of `placement`, with the attention function `attention.implementation`."""
    placement: Placement
    attention: PackedAttention
    logits_chunk: int
    """Number of tokens whose logits are in memory at the same time."""
    ranks: Ranks = ALONE
    """The ranks that share the work."""
    operators: Operators = BY_TORCH
    """Implementation of norms, rotary embeddings, projections and gates (`learner.operators`)."""
    share_from: int | None = None
    """Prefixes of at least this many tokens that segments share are computed once; None: never."""
    logits: LogitMap = PLAIN
    """Scales and caps the outputs of the LM head."""
    experts: Experts | None = None
    """Number of experts and balancing loss; None for a model without experts."""

    def describe(self) -> dict[str, str]:
        """Describe in log fields which code computes the model, and why segments are not packed."""
        attention = self.attention.implementation
        if isinstance(self.attention, PaddedRows):
            return {
                "way": "transformers, a segment a row",
                "attention": attention,
                "reason": self.attention.why,
            }
        way = "own layers" if attention == ONE_ROW and is_known(self.model) else "transformers"
        return {"way": f"{way}, packed rows", "attention": attention}

    def states(self, packed: Packed, routing: Routing | None = None) -> States:
        """Compute last hidden states, log-probs and entropies at the positions that predict sampled tokens.

        All are differentiable in the model's weights. Segments in the same row do not affect each other.
        `routing` counts the tokens that routers send to each expert; None: they are not counted.
        """
        rows, arguments = self._arranged(packed)
        return States(rows, *through(self.model, self._read, rows, arguments, routing))

    def hidden(self, packed: Packed, routing: Routing | None = None) -> Hidden:
        """Compute only the last hidden states, without the LM head; `routing` is as in `states`."""
        rows, arguments = self._arranged(packed)
        return Hidden(rows, through(self.model, self._hidden, rows, arguments, routing))

    def _arranged(self, packed: Packed) -> tuple[Packed, Mapping[str, Any]]:
        dtype = self.placement.low or self.model.dtype
        return self.attention.arranged(packed, self.placement.device, dtype)

    def _read(
        self,
        model: PreTrainedModel,
        rows: Packed,
        arguments: Mapping[str, Any],
        routing: Routing | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden_ND = self._hidden(model, rows, arguments, routing)
        # The LM head runs only on the N positions that predict a sampled token. It runs outside autocast, so
        # that logits are float32.
        logprobs_N, entropies_N = chunked_logprobs(
            hidden_ND,
            model.lm_head.weight,
            rows.target_N,
            rows.temperature_N,
            chunk=self.logits_chunk,
            factors=self.placement.low,
            reading=self.operators.reading,
            bias_V=model.lm_head.bias,
            logits=self.logits,
        )
        return hidden_ND, logprobs_N, entropies_N

    def _hidden(
        self,
        model: PreTrainedModel,
        rows: Packed,
        arguments: Mapping[str, Any],
        routing: Routing | None,
    ) -> Tensor:
        if GROUPS in arguments:
            return self._apart(model, arguments[GROUPS], routing)
        attend, attend_read = (arguments.get(f"turnwise_{name}") for name in ("attend", "attend_read"))
        if attend is not None and is_known(model):
            tokens = tokens_for(model, rows.token_ids_BL, self.placement.low)
            reads = arguments.get("turnwise_reads")
            with self.placement.autocast():
                return read_states(model, rows, tokens, attend, attend_read, self.operators, reads)
        # Where `attend` is given, all segments are joined in one row without padding.
        is_real_BL = None if attend is not None else rows.segment_ids_BL > 0
        keywords = {"position_ids": rows.position_ids_BL, **arguments}
        with replaying(model, rows.experts_BLW):
            hidden_BLD = self._by_transformers(model, rows.token_ids_BL, is_real_BL, keywords, routing)
        return hidden_BLD[rows.predict_row_N, rows.predict_position_N]

    def _apart(self, model: PreTrainedModel, groups: Groups, routing: Routing | None) -> Tensor:
        """Compute the [N, D] hidden states by transformers' layers, with one segment per row."""
        parts = []
        for group in groups[0]:
            ids_BL = group.token_ids_BL
            # Positions continue over the padding: transformers would take a restart for a packed sequence.
            positions_BL = torch.arange(ids_BL.shape[1], device=ids_BL.device).expand_as(ids_BL)
            keywords = {"position_ids": positions_BL}
            with replaying(model, group.experts_BLW):
                hidden_BLD = self._by_transformers(model, ids_BL, group.is_real_BL, keywords, routing)
            parts.append(hidden_BLD.flatten(0, 1).index_select(0, group.read_R))
        return torch.cat(parts).index_select(0, groups[1])

    def _by_transformers(
        self,
        model: PreTrainedModel,
        ids_BL: Tensor,
        is_real_BL: Tensor | None,
        keywords: Mapping[str, Any],
        routing: Routing | None,
    ) -> Tensor:
        """Compute the [B, L, D] last hidden states by transformers' forward pass."""
        tokens = tokens_for(model, ids_BL, self.placement.low)
        with self.placement.autocast():
            if routing is None:
                found = model.model(**tokens, use_cache=False, **keywords)
            else:
                with routing.watching(model, is_real_BL):
                    found = model.model(**tokens, use_cache=False, **keywords, **routing.keywords)
        if routing is not None and routing.reads_probabilities:
            routing.add(found.router_logits, is_real_BL)
        hidden_BLD: Tensor = found.last_hidden_state
        return hidden_BLD

    def logprobs(self, packed: Packed) -> Tensor:
        """Compute the [N] log-probs of the sampled tokens, differentiable in the model's weights."""
        return self.states(packed).logprobs_N

    def score(self, segments: Sequence[Segment], keys: LoopKeys) -> list[NDArray[Any]]:
        """Compute the [N] log-probs (nats) of each segment's sampled tokens, without gradient."""
        refuse_unknown(segments, self.model)
        return score_by(self.logprobs, segments, keys, self)

    def tries(self, segments: Sequence[Segment]) -> Tries | None:
        """Find the prefixes that segments share (`Tries`, prefix trees); None if `share_from` is None."""
        return None if self.share_from is None else Tries.of(segments, self.share_from)

    def row_tokens(self, segments: Sequence[Segment], keys: LoopKeys, tries: Tries | None) -> int:
        """Return the width in tokens of a packed row: at least `keys.row_tokens` and the longest segment.

        With `tries` and a layout that joins rows, the width grows up to a micro-batch, because only segments
        in the same row share prefixes. With several ranks, it grows only to one rank's share of the tokens.
        """
        width = keys.row_tokens
        if tries is not None and self.attention.rows_are_joined:
            share = keys.micro_batch
            if self.ranks.are_several:
                share = -(-tries.distinct // self.ranks.count)
            width = min(keys.micro_batch, max(width, share))
        return max(width, max(len(segment) for segment in segments))


def cut_pieces(segments: Sequence[Segment], keys: LoopKeys, scorer: Scorer) -> tuple[Packed, list[Packed]]:
    """Pack segments into rows, and divide these into micro-batches; return the rows and the micro-batches."""
    tries = scorer.tries(segments)
    width = scorer.row_tokens(segments, keys, tries)
    packed = pack_segments(segments, row_tokens=width, tries=tries)
    rows = scorer.ranks.rows_of_a_piece(len(packed.token_ids_BL), keys.micro_batch // width)
    return packed, list(cut_packed(packed, rows))


@torch.no_grad()  # inference mode would leave tensors in a sharded model that break a backward pass
def read_pieces(
    segments: Sequence[Segment],
    forward: Callable[[Packed], Piece],
    columns: Callable[[Piece], tuple[Tensor, ...]],
    keys: LoopKeys,
    scorer: Scorer,
) -> list[list[NDArray[Any]]]:
    """Compute one or more columns of numbers per sampled token, without gradient; split each by segment.

    Each rank runs `forward` on one micro-batch at a time. `columns` returns the columns, tensors [N], of the
    result. Segments are packed as for `scorer`.
    """
    ranks = scorer.ranks
    packed, pieces = cut_pieces(segments, keys, scorer)
    passes = ((forward(piece), counts) for piece, counts in ranks.own_pieces(pieces))
    own = [columns(found) for found, counts in passes if counts]
    if ranks.are_several:
        own = ranks.in_order([tuple(column.cpu() for column in piece) for piece in own])
    return [by_segment(packed, torch.cat(column)) for column in zip(*own, strict=True)]


def score_by(
    policy: Callable[[Packed], Tensor], segments: Sequence[Segment], keys: LoopKeys, scorer: Scorer
) -> list[NDArray[Any]]:
    """Compute the [N] log-probs (nats) of each segment's sampled tokens, without gradient.

    `policy` computes the log-probs of a micro-batch. Segments are packed as for `scorer`.
    """
    return read_pieces(segments, policy, lambda logprobs_N: (logprobs_N,), keys, scorer)[0]


def refuse_unknown(segments: Sequence[Segment], model: PreTrainedModel) -> None:
    """Raise SegmentError if a segment has token ids or expert indices that do not exist in the model.

    This happens if a server samples with another model. The error's `rollout_ids` names the rollouts.
    """
    refuse_unknown_ids(segments, embedding_rows(model))
    refuse_unknown_experts(segments, count_experts(model))


def refuse_unknown_ids(segments: Sequence[Segment], rows: int) -> None:
    """Raise SegmentError for token ids outside of 0 to `rows` - 1; `rows` is the number of embeddings.

    A remote server may send such ids even if the first check of the server found none.
    """
    unknown = [
        segment for segment in segments if ((segment.token_ids < 0) | (segment.token_ids >= rows)).any()
    ]
    if not unknown:
        return
    segment = unknown[0]
    index = int(((segment.token_ids < 0) | (segment.token_ids >= rows)).argmax())
    # A token of a prompt is reported with the decision that follows the prompt.
    turn = next((int(span["decision"]) + 1 for span in segment.spans if span["end"] > index), None)
    error = SegmentError(
        f"token id {segment.token_ids[index]}, but the actor knows the ids 0 to {rows - 1}",
        where=place(segment.rollout_id, turn, index),
        hint="The sampler's vocabulary differs from the actor's.",
    )
    error.rollout_ids = tuple(dict.fromkeys(segment.rollout_id for segment in unknown))
    raise error


def refuse_unknown_experts(segments: Sequence[Segment], count: int) -> None:
    """Raise SegmentError for expert indices of `count` or more; each layer has `count` experts."""
    unknown = [
        segment for segment in segments if ((segment.experts >= count) & (segment.experts != UNKNOWN)).any()
    ]
    if not unknown:
        return
    error = SegmentError(
        f"its tokens name experts up to {unknown[0].experts[unknown[0].experts != UNKNOWN].max()}, but a "
        f"layer of the actor has {count}",
        where=place(unknown[0].rollout_id),
        hint="The sampler's experts differ from the actor's.",
    )
    error.rollout_ids = tuple(dict.fromkeys(segment.rollout_id for segment in unknown))
    raise error
