"""Log-probs and entropies of sampled tokens under a causal LM, on packed rows."""

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
    """Result of a forward pass for a value head: last hidden states, in the order of `rows.target_N`."""

    rows: Packed
    hidden_ND: Tensor


@dataclass(frozen=True, slots=True)
class States(Hidden):
    """Result of a forward pass for both heads: also log-probs and entropies of the sampled tokens."""

    logprobs_N: Tensor
    entropies_N: Tensor


@dataclass(frozen=True, slots=True)
class Routed(States):
    """The same of a model with experts."""

    routing: Routing


@dataclass(frozen=True, slots=True)
class Scorer:
    """A model with how it computes."""

    model: PreTrainedModel
    """On the placement's device, its attention set to `attention.implementation`."""
    placement: Placement
    attention: PackedAttention
    logits_chunk: int
    """Tokens whose logits exist at a time."""
    ranks: Ranks = ALONE
    """The ranks that share the work."""
    operators: Operators = BY_TORCH
    """What a layer computes between its products."""
    share_from: int | None = None
    """Beginnings of segments of at least so many tokens are computed once; None: each segment by itself."""
    logits: LogitMap = PLAIN
    """What the model makes of its head's products."""
    experts: Experts | None = None
    """Those of a model that has some."""

    def told(self) -> dict[str, str]:
        """The way that the model is computed, in words, and why."""
        attention = self.attention.implementation
        if isinstance(self.attention, PaddedRows):
            return {
                "way": "transformers, a segment a row",
                "attention": attention,
                "reason": self.attention.why,
            }
        way = "own layers" if attention == ONE_ROW and is_known(self.model) else "transformers"
        return {"way": f"{way}, packed rows", "attention": attention}

    def states(self, packed: Packed) -> States:
        """The last hidden states where sampled tokens are predicted, and the tokens' log-probs and entropies.

        All are differentiable in the model's weights. Attention and positions keep the segments of a row
        apart, so they are those of each segment alone.
        """
        rows, arguments = self._arranged(packed)
        return States(rows, *through(self.model, self._read, rows, arguments))

    def routed(self, packed: Packed, *, with_probabilities: bool) -> "Routed":
        """As `states`, with the decisions of the routers of a model with experts."""
        rows, arguments = self._arranged(packed)
        assert self.experts is not None, "asked only of a model that has experts"
        routing = Routing(self.experts, with_probabilities)
        found = through(self.model, self._read, rows, arguments, routing)
        return Routed(rows, *found, routing)

    def hidden(self, packed: Packed) -> Hidden:
        """As `states`, without the log-probs and the pass through the LM head that they need."""
        rows, arguments = self._arranged(packed)
        return Hidden(rows, through(self.model, self._hidden, rows, arguments))

    def routing(self, packed: Packed) -> Routing:
        """The decisions of the routers alone."""
        rows, arguments = self._arranged(packed)
        assert self.experts is not None, "asked only of a model that has experts"
        routing = Routing(self.experts, reads_probabilities=False)
        through(self.model, self._hidden, rows, arguments, routing)
        return routing

    def _arranged(self, packed: Packed) -> tuple[Packed, Mapping[str, Any]]:
        dtype = self.placement.low or self.model.dtype
        return self.attention.arranged(packed, self.placement.device, dtype)

    def _read(
        self,
        model: PreTrainedModel,
        rows: Packed,
        arguments: Mapping[str, Any],
        routing: Routing | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden_ND = self._hidden(model, rows, arguments, routing)
        # The LM head runs on the N positions that predict a sampled token and nowhere else; outside
        # autocast, so that logits are float32.
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
        routing: Routing | None = None,
    ) -> Tensor:
        if GROUPS in arguments:
            return self._apart(model, arguments[GROUPS], routing)
        attend, attend_read = (arguments.get(f"turnwise_{name}") for name in ("attend", "attend_read"))
        if attend is not None and is_known(model):
            tokens, reads = (
                tokens_for(model, rows.token_ids_BL, self.placement.low),
                arguments.get("turnwise_reads"),
            )
            with self.placement.autocast():
                return read_states(model, rows, tokens, attend, attend_read, self.operators, reads)
        # One row has no padding.
        is_real_BL = None if attend is not None else rows.segment_ids_BL > 0
        told = {"position_ids": rows.position_ids_BL, **arguments}
        with replaying(model, rows.experts_BLW):
            hidden_BLD = self._by_transformers(model, rows.token_ids_BL, is_real_BL, told, routing)
        return hidden_BLD[rows.predict_row_N, rows.predict_position_N]

    def _apart(self, model: PreTrainedModel, groups: Groups, routing: Routing | None) -> Tensor:
        """[N, D] by the model's own layers, a segment a row."""
        parts = []
        for group in groups[0]:
            ids_BL = group.token_ids_BL
            # Of the padding too, since positions that begin again mean packed rows to transformers.
            positions_BL = torch.arange(ids_BL.shape[1], device=ids_BL.device).expand_as(ids_BL)
            told = {"position_ids": positions_BL}
            with replaying(model, group.experts_BLW):
                hidden_BLD = self._by_transformers(model, ids_BL, group.is_real_BL, told, routing)
            parts.append(hidden_BLD.flatten(0, 1).index_select(0, group.read_R))
        return torch.cat(parts).index_select(0, groups[1])

    def _by_transformers(
        self,
        model: PreTrainedModel,
        ids_BL: Tensor,
        is_real_BL: Tensor | None,
        told: Mapping[str, Any],
        routing: Routing | None,
    ) -> Tensor:
        """[B, L, D] last hidden states."""
        tokens = tokens_for(model, ids_BL, self.placement.low)
        with self.placement.autocast():
            if routing is None:
                found = model.model(**tokens, use_cache=False, **told)
            else:
                with routing.watching(model, is_real_BL):
                    found = model.model(**tokens, use_cache=False, **told, **routing.keywords)
        if routing is not None and routing.reads_probabilities:
            routing.add(found.router_logits, is_real_BL)
        hidden_BLD: Tensor = found.last_hidden_state
        return hidden_BLD

    def logprobs(self, packed: Packed) -> Tensor:
        """[N] log-probs of the sampled tokens, differentiable in the model's weights."""
        return self.states(packed).logprobs_N

    def score(self, segments: Sequence[Segment], keys: LoopKeys) -> list[NDArray[Any]]:
        """For each segment, the log-prob of each of its sampled tokens (nats), without gradient."""
        refuse_unknown(segments, self.model)
        return score_by(self.logprobs, segments, keys, self)

    def tries(self, segments: Sequence[Segment]) -> Tries | None:
        """The common beginnings of segments, if those are computed once."""
        return None if self.share_from is None else Tries.of(segments, self.share_from)

    def row_tokens(self, segments: Sequence[Segment], keys: LoopKeys, tries: Tries | None) -> int:
        """Width of a packed row: `row_tokens`, or the longest segment where that does not fit.

        A trie shares most in a row as long as a piece, of which each rank gets one.
        """
        width = keys.row_tokens
        if tries is not None and self.attention.rows_are_joined:
            share = keys.micro_batch
            if self.ranks.are_several:
                share = -(-tries.distinct // self.ranks.count)
            width = min(keys.micro_batch, max(width, share))
        return max(width, max(len(segment) for segment in segments))


def cut_pieces(segments: Sequence[Segment], keys: LoopKeys, scorer: Scorer) -> tuple[Packed, list[Packed]]:
    """Segments in packed rows, and these rows in pieces of one forward pass."""
    tries = scorer.tries(segments)
    width = scorer.row_tokens(segments, keys, tries)
    packed = pack_segments(segments, row_tokens=width, tries=tries)
    rows = scorer.ranks.rows_of_a_piece(len(packed.token_ids_BL), keys.micro_batch // width)
    return packed, list(cut_packed(packed, rows))


@torch.no_grad()  # inference mode would leave tensors in a sharded model that no backward pass takes
def read_pieces(
    segments: Sequence[Segment],
    forward: Callable[[Packed], Piece],
    columns: Callable[[Piece], tuple[Tensor, ...]],
    keys: LoopKeys,
    scorer: Scorer,
) -> list[list[NDArray[Any]]]:
    """For each [N] column of the pieces: for each segment, the numbers of its sampled tokens.

    All ranks make the `forward` pass of a piece at a time; `columns` reads the numbers, on the rank that
    gives them. Segments are packed as `scorer`'s are.
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
    """For each segment, the [N] log-probs (nats) that `policy` gives its sampled tokens."""
    return read_pieces(segments, policy, lambda logprobs_N: (logprobs_N,), keys, scorer)[0]


def refuse_unknown(segments: Sequence[Segment], model: PreTrainedModel) -> None:
    """Refuse tokens and experts that a model has not: the server of another one may send them.

    Raises:
        SegmentError: a segment has such ones; `rollout_ids` names the rollouts.
    """
    refuse_unknown_ids(segments, embedding_rows(model))
    refuse_unknown_experts(segments, count_experts(model))


def refuse_unknown_ids(segments: Sequence[Segment], rows: int) -> None:
    """Refuse ids that the model has no row for: a foreign server can send some long after it was probed."""
    unknown = [
        segment for segment in segments if ((segment.token_ids < 0) | (segment.token_ids >= rows)).any()
    ]
    if not unknown:
        return
    segment = unknown[0]
    index = int(((segment.token_ids < 0) | (segment.token_ids >= rows)).argmax())
    # A prompt is of the decision that comes after it.
    turn = next((int(span["decision"]) + 1 for span in segment.spans if span["end"] > index), None)
    error = SegmentError(
        f"token id {segment.token_ids[index]}, and the actor knows the ids 0 to {rows - 1}",
        where=place(segment.rollout_id, turn, index),
        hint="Who sampled it has another vocabulary than the actor.",
    )
    error.rollout_ids = tuple(dict.fromkeys(segment.rollout_id for segment in unknown))
    raise error


def refuse_unknown_experts(segments: Sequence[Segment], count: int) -> None:
    """A layer with `count` experts has none beyond them."""
    unknown = [
        segment for segment in segments if ((segment.experts >= count) & (segment.experts != UNKNOWN)).any()
    ]
    if not unknown:
        return
    error = SegmentError(
        f"its tokens name experts up to {unknown[0].experts[unknown[0].experts != UNKNOWN].max()}, and a "
        f"layer of the actor has {count}",
        where=place(unknown[0].rollout_id),
        hint="Who sampled it has other experts than the actor.",
    )
    error.rollout_ids = tuple(dict.fromkeys(segment.rollout_id for segment in unknown))
    raise error
