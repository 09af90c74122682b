"""Attention within the segments of one row, by torch's causal attention, which runs on every device.

For attention, segments of similar length are copied to a batch and padded at their ends. Causal attention
ignores padding at the end, so no mask is needed. A mask would grow with the square of the row's length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trainer_backend.core.collate import Packed

# (q [L, H, D], k and v [L, H_kv, D], scale) -> [L, H, D]: causal attention of each query in its own segment.
# The function is bound to the segments of one batch.
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True, slots=True)
class SegmentBounds:
    starts_S: Tensor
    """int32, [S + 1]: index of the first token of each segment, followed by the number of tokens."""
    longest: int
    """Number of tokens of the longest segment."""


def one_row(packed: Packed) -> tuple[Packed, SegmentBounds]:
    """Join packed rows to one row without padding; return the row and the bounds of its segments.

    Columns of sampled tokens keep their order. Segments are numbered from 1 over the whole row. `packed` must
    be on the CPU, because the shapes of the result depend on its values.
    """
    # Computed by numpy, because torch would start its threads even for a few thousand numbers.
    kept_BL = packed.segment_ids_BL.numpy() > 0
    column_BL = kept_BL.cumsum().reshape(kept_BL.shape) - 1
    positions_L = packed.position_ids_BL.numpy()[kept_BL]
    begins_L = positions_L == 0
    starts_S = np.append(begins_L.nonzero()[0], len(positions_L))
    row = replace(
        packed,
        token_ids_BL=torch.from_numpy(packed.token_ids_BL.numpy()[kept_BL])[None],
        position_ids_BL=torch.from_numpy(positions_L)[None],
        segment_ids_BL=torch.from_numpy(begins_L.cumsum())[None],
        predict_row_N=torch.zeros_like(packed.predict_row_N),
        predict_position_N=torch.from_numpy(
            column_BL[packed.predict_row_N.numpy(), packed.predict_position_N.numpy()]
        ),
        experts_BLW=None
        if packed.experts_BLW is None
        else packed.experts_BLW[torch.from_numpy(kept_BL)][None],
    )
    return row, SegmentBounds(torch.from_numpy(starts_S.astype(np.int32)), int(np.diff(starts_S).max()))


# A segment shorter than this share of a group's longest segment begins a new group; this bounds the padding.
SHORTEST_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Groups:
    """Maps the tokens of a row to cells, which are the slots of padded batches, and back.

    Each batch contains segments of similar length. Cells are numbered through all P cells of all batches.
    """

    token_P: Tensor
    """int64, index of the token in each cell; a padding cell has the index of the segment's last token."""
    place_L: Tensor
    """int64, index of the cell of each token."""
    shapes: tuple[tuple[int, int], ...]
    """For each batch in order: its number of segments, and their padded length."""


def group_by_length(bounds: SegmentBounds) -> Groups:
    """Assign all tokens to cells of batches with segments of similar length, longest segments first."""
    return _join_groups(list(group_alike(bounds.starts_S.tolist())))


@dataclass(frozen=True, slots=True)
class PaddedGroup:
    """A padded batch of segments of similar length, and the cells whose hidden states predict tokens."""

    token_ids_BL: Tensor
    """int64, token ids; padding repeats the last token of the segment."""
    is_real_BL: Tensor
    """bool, False in the padding."""
    read_R: Tensor
    """int64, the cells whose hidden states are read, as indices into the flattened batch, [B * L]."""
    experts_BLW: Tensor | None = None
    """The experts that the sampler chose for each cell, as in `Packed`."""


def padded_groups(row: Packed, bounds: SegmentBounds) -> tuple[list[PaddedGroup], Tensor]:
    """Copy the segments of a joined row to padded batches; return the batches and an index tensor, [N].

    `row` and `bounds` are the result of `one_row`. Each batch lists the cells whose hidden states are read.
    If these states are concatenated over the batches, the index tensor selects from them the state of each
    sampled token, in the order of the row's columns.
    """
    groups = group_by_length(bounds)
    read_N, order_N = groups.place_L[row.predict_position_N].sort()
    ids_P = row.token_ids_BL[0][groups.token_P]
    is_real_P = torch.zeros(len(ids_P), dtype=torch.bool)
    is_real_P[groups.place_L] = True
    padded, first = [], 0
    for segments, places in groups.shapes:
        end = first + segments * places
        here = slice(*torch.searchsorted(read_N, torch.tensor([first, end])).tolist())
        ids_BL, is_real_BL = (column[first:end].view(segments, places) for column in (ids_P, is_real_P))
        experts_BLW = None
        if row.experts_BLW is not None:
            experts_BLW = row.experts_BLW[0][groups.token_P[first:end]].view(segments, places, -1)
        padded.append(PaddedGroup(ids_BL, is_real_BL, read_N[here] - first, experts_BLW))
        first = end
    return padded, order_N.argsort()


def _join_groups(groups: Sequence[Tensor]) -> Groups:
    """Assign tokens to the cells of padded batches.

    Each of `groups` is a [2, segments] tensor: the first token of each segment, and the token after its last.
    """
    tokens, is_real, shapes = [], [], []
    for first_G, end_G in groups:
        longest = int((end_G - first_G).max())
        wanted_GW = first_G[:, None] + torch.arange(longest)
        tokens.append(torch.minimum(wanted_GW, end_G[:, None] - 1).flatten())
        is_real.append((wanted_GW < end_G[:, None]).flatten())
        shapes.append((len(first_G), longest))
    token_P, is_real_P = torch.cat(tokens), torch.cat(is_real)
    place_L = torch.empty(int(is_real_P.sum()), dtype=torch.int64)
    place_L[token_P[is_real_P]] = is_real_P.nonzero()[:, 0]
    return Groups(token_P, place_L, tuple(shapes))


# If at most this share of the tokens is read, masked attention for their queries alone is cheaper than causal
# attention for all queries. (Causal attention computes only half of the scores.)
MOST_QUERIES = 0.5


@dataclass(frozen=True, slots=True)
class Reads:
    """The tokens of a row whose attention is needed; the other tokens provide only keys and values."""

    queries: Groups
    """The cells of the queries. A token's index here counts only the tokens with queries, from 0. Each batch
    contains the same segments as the batch of keys at the same place."""
    masks: tuple[Tensor, ...]
    """For each batch, a mask [segments, 1, queries, keys] to add to scores: -inf for later keys, else 0."""


def plan_reads(bounds: SegmentBounds, position_N: Tensor, dtype: torch.dtype) -> Reads | None:
    """Plan attention for only some tokens of a row; return None if attention for all tokens is cheaper.

    `position_N` contains the int64 indices of these tokens in ascending order, at least one per segment.
    `dtype` is the dtype of the queries.
    """
    groups, masks = [], []
    for ends_2G in group_alike(bounds.starts_S.tolist()):
        first_G, end_G = torch.searchsorted(position_N, ends_2G)
        queries, keys = int((end_G - first_G).max()), int(ends_2G[1, 0] - ends_2G[0, 0])
        if queries > MOST_QUERIES * keys:
            return None
        query_GQ = torch.minimum(first_G[:, None] + torch.arange(queries), end_G[:, None] - 1)
        place_GQ = position_N[query_GQ] - ends_2G[0][:, None]
        hidden_GQK = torch.arange(keys) > place_GQ[:, :, None]
        mask_GQK = torch.zeros(hidden_GQK.shape, dtype=dtype).masked_fill_(hidden_GQK, float("-inf"))
        groups.append(torch.stack((first_G, end_G)))
        masks.append(mask_GQK[:, None])
    return Reads(_join_groups(groups), tuple(masks))


def attend_by_length(groups: Groups, q_LHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, scale: float) -> Tensor:
    """Compute causal attention of all tokens, each within its segment, [L, H, D]."""
    attended = [
        _causal(q, k, v, scale)
        for q, k, v in zip(*(_spread(tensor, groups) for tensor in (q_LHD, k_LHD, v_LHD)), strict=True)
    ]
    return _gathered(attended, groups)


def attend_reads(
    groups: Groups, reads: Reads, q_NHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, scale: float
) -> Tensor:
    """Compute causal attention for the tokens of `reads`, each within its segment, [N, H, D]."""
    columns = _spread(q_NHD, reads.queries), _spread(k_LHD, groups), _spread(v_LHD, groups), reads.masks
    attended = [_masked(q, k, v, mask, scale) for q, k, v, mask in zip(*columns, strict=True)]
    return _gathered(attended, reads.queries)


# Up to this number of keys, two matrix products and a softmax are faster on a CPU than torch's kernel, which
# works in blocks: 1.5 times as fast with 54 keys and queries, 3 times as fast with 8 queries.
_SHORT = 128


def _is_short(q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor) -> bool:
    """Return whether to compute attention by matrix products and a softmax, because there are few keys.

    Keys must also have as many heads and the same dtype as queries. Dtypes differ under autocast, which
    would round the scores.
    """
    alike = q_BHLD.shape[1] == k_BHLD.shape[1] and q_BHLD.dtype == v_BHLD.dtype
    return alike and k_BHLD.shape[2] <= _SHORT


def _causal(q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, scale: float) -> Tensor:
    if not _is_short(q_BHLD, k_BHLD, v_BHLD):
        return causal_attention(q_BHLD, k_BHLD, v_BHLD, scale=scale)
    length = q_BHLD.shape[2]
    mask_LL = torch.full((length, length), float("-inf"), dtype=q_BHLD.dtype, device=q_BHLD.device).triu_(1)
    return _masked(q_BHLD, k_BHLD, v_BHLD, mask_LL, scale)


def _masked(q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, mask: Tensor, scale: float) -> Tensor:
    if not _is_short(q_BHLD, k_BHLD, v_BHLD):
        grouped = q_BHLD.shape[1] != k_BHLD.shape[1]
        return scaled_dot_product_attention(
            q_BHLD, k_BHLD, v_BHLD, attn_mask=mask, scale=scale, enable_gqa=grouped
        )
    scores_BHLK = (q_BHLD * scale) @ k_BHLD.transpose(-1, -2)
    return scores_BHLK.add_(mask).softmax(dim=-1) @ v_BHLD


def _spread(tokens_LHD: Tensor, groups: Groups) -> list[Tensor]:
    """Copy token vectors [L, H, D] to padded batches, each [segments, H, length, D]."""
    sizes = [segments * places for segments, places in groups.shapes]
    places_PHD: Tensor = _Spread.apply(tokens_LHD, groups)  # type: ignore[no-untyped-call]
    parts = zip(torch.split(places_PHD, sizes), groups.shapes, strict=True)
    return [part_PHD.view(*shape, *part_PHD.shape[1:]).transpose(1, 2) for part_PHD, shape in parts]


def _gathered(attended: Sequence[Tensor], groups: Groups) -> Tensor:
    """Copy the vectors of padded batches, each [segments, H, length, D], back to tokens, [L, H, D]."""
    parts = [part_GHPD.transpose(1, 2).flatten(0, 1) for part_GHPD in attended]
    gathered: Tensor = _Gather.apply(torch.cat(parts), groups)  # type: ignore[no-untyped-call]
    return gathered


def causal_attention(q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, *, scale: float) -> Tensor:
    """Compute causal attention of each row, [B, H, L, D]; keys and values may have fewer heads."""
    grouped = q_BHLD.shape[1] != k_BHLD.shape[1]
    return scaled_dot_product_attention(
        q_BHLD, k_BHLD, v_BHLD, is_causal=True, scale=scale, enable_gqa=grouped
    )


def group_alike(starts_S: Sequence[int]) -> Iterator[Tensor]:
    """Yield groups of segments of similar length, those with the longest segments first.

    A group is a [2, segments] tensor: the first token of each segment, and the token after its last.
    `starts_S` contains the first token of each segment, followed by the number of all tokens.
    """
    segments = sorted(pairwise(starts_S), key=lambda segment: segment[0] - segment[1])
    start = 0
    for index, (first, end) in enumerate(segments):
        longest = segments[start][1] - segments[start][0]
        if end - first < SHORTEST_SHARE * longest:
            yield torch.tensor(segments[start:index]).T.contiguous()
            start = index
    yield torch.tensor(segments[start:]).T.contiguous()


class _Spread(torch.autograd.Function):
    """Copies token vectors to cells; the backward pass ignores the gradients of padding.

    These gradients are not needed, because outputs of padding are never read.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return tokens.index_select(0, groups.token_P)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, ctx.groups.place_L), None


class _Gather(torch.autograd.Function):
    """Copies vectors from cells back to tokens, and drops those of padding."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return places.index_select(0, groups.place_L)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        spread = gradients[0].new_zeros((len(ctx.groups.token_P), *gradients[0].shape[1:]))
        return spread.index_copy_(0, ctx.groups.place_L, gradients[0]), None
