"""Attention over the segments of one row by torch's causal kernel, which every device has.

Within attention, segments of similar length form a batch, padded at their ends, where causal attention hides
the padding. There is no mask, so a row may be as long as memory allows.
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

# (q [L, H, D], k and v [L, H_kv, D], scale) -> [L, H, D]: causal, each query in its own segment of one batch.
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True, slots=True)
class SegmentBounds:
    starts_S: Tensor
    """int32, [S + 1] the first token of each segment, then the number of all tokens."""
    longest: int
    """Tokens of the longest segment."""


def one_row(packed: Packed) -> tuple[Packed, SegmentBounds]:
    """Join packed rows to one row without padding; return it with the bounds of its segments.

    Flat columns keep their order. Segments are numbered from 1 over the whole row. `packed` must be on the
    CPU, because the shapes of the result depend on its values, and would require waiting for a device.
    """
    # In numpy, because torch would wake threads for a few thousand numbers.
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


# Segments shorter than this share of a group's longest begin a new group; it bounds the padding.
SHORTEST_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Groups:
    """The cells (places in padded batches) of all or some tokens of a row; segments are batched by length."""

    token_P: Tensor
    """int64, the token in each cell; in padding, the last token of the segment."""
    place_L: Tensor
    """int64, the cell of each token."""
    shapes: tuple[tuple[int, int], ...]
    """Number of segments, and their padded length, of each group in order."""


def group_by_length(bounds: SegmentBounds) -> Groups:
    """Group segments by similar length, longest first."""
    return _join_groups(list(group_alike(bounds.starts_S.tolist())))


@dataclass(frozen=True, slots=True)
class PaddedGroup:
    """Segments of similar length, one per row, and the cells whose hidden states are read."""

    token_ids_BL: Tensor
    """int64; in padding, the last token of the segment."""
    is_real_BL: Tensor
    """bool, False in the padding."""
    read_R: Tensor
    """int64, the cells that are read, as indices into the flattened rows."""
    experts_BLW: Tensor | None = None
    """As in `Packed`."""


def padded_groups(row: Packed, bounds: SegmentBounds) -> tuple[list[PaddedGroup], Tensor]:
    """Lay out the segments of `one_row` one per row, by length; return groups and an [N] index.

    The index sorts the concatenated reads of the groups into the order of the flat columns.
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
    """Build the cells of groups, each given as [2, segments]: first tokens and ends of segments."""
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


# Up to this share of queries, masked attention of these queries alone is cheaper than causal attention of all
# queries, which computes half of the scores.
MOST_QUERIES = 0.5


@dataclass(frozen=True, slots=True)
class Reads:
    """Some of a row's tokens, whose queries attend; the other tokens only have keys and values."""

    queries: Groups
    """The cells of these tokens, numbered from 0, in the groups of all tokens."""
    masks: tuple[Tensor, ...]
    """For each group, [segments, 1, queries, keys] to add to scores: 0, or -inf for later keys."""


def plan_reads(bounds: SegmentBounds, position_N: Tensor, dtype: torch.dtype) -> Reads | None:
    """Plan the reads of one row; None if they are not cheaper than the queries of all tokens.

    `position_N` are int64 indices of the tokens in ascending order, at least one per segment; `dtype` is that
    of the queries.
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
    """Compute [L, H, D] causal attention, each query within its segment."""
    attended = [
        _causal(q, k, v, scale)
        for q, k, v in zip(*(_spread(tensor, groups) for tensor in (q_LHD, k_LHD, v_LHD)), strict=True)
    ]
    return _gathered(attended, groups)


def attend_reads(
    groups: Groups, reads: Reads, q_NHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, scale: float
) -> Tensor:
    """Compute [N, H, D] causal attention for the queries of some tokens."""
    columns = _spread(q_NHD, reads.queries), _spread(k_LHD, groups), _spread(v_LHD, groups), reads.masks
    attended = [_masked(q, k, v, mask, scale) for q, k, v, mask in zip(*columns, strict=True)]
    return _gathered(attended, reads.queries)


# Up to this number of keys, plain products are faster on a CPU than torch's kernel, which works in blocks:
# 1.5 times with 54 keys and queries, 3 times with 8 queries.
_SHORT = 128


def _is_short(q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor) -> bool:
    """Whether to use plain products: not for shared heads, nor under autocast, which would round scores."""
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
    """Copy tokens to the cells of each group, [segments, H, length, D]."""
    sizes = [segments * places for segments, places in groups.shapes]
    places_PHD: Tensor = _Spread.apply(tokens_LHD, groups)  # type: ignore[no-untyped-call]
    parts = zip(torch.split(places_PHD, sizes), groups.shapes, strict=True)
    return [part_PHD.view(*shape, *part_PHD.shape[1:]).transpose(1, 2) for part_PHD, shape in parts]


def _gathered(attended: Sequence[Tensor], groups: Groups) -> Tensor:
    """Copy the cells of each group, [segments, H, length, D], back to tokens, [L, H, D]."""
    parts = [part_GHPD.transpose(1, 2).flatten(0, 1) for part_GHPD in attended]
    gathered: Tensor = _Gather.apply(torch.cat(parts), groups)  # type: ignore[no-untyped-call]
    return gathered


def causal_attention(q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, *, scale: float) -> Tensor:
    """Compute [B, H, L, D] causal attention of each row; keys may have fewer heads."""
    grouped = q_BHLD.shape[1] != k_BHLD.shape[1]
    return scaled_dot_product_attention(
        q_BHLD, k_BHLD, v_BHLD, is_causal=True, scale=scale, enable_gqa=grouped
    )


def group_alike(starts_S: Sequence[int]) -> Iterator[Tensor]:
    """Yield groups of segments of similar length, longest first, each as [2, segments]: starts and ends.

    `starts_S` has the start of every segment, then the number of tokens.
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
    """Copies tokens to cells. Padding has no gradient, because no output that is read depends on it."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return tokens.index_select(0, groups.token_P)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, ctx.groups.place_L), None


class _Gather(torch.autograd.Function):
    """Copies values from cells to tokens and drops those of the padding."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return places.index_select(0, groups.place_L)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        spread = gradients[0].new_zeros((len(ctx.groups.token_P), *gradients[0].shape[1:]))
        return spread.index_copy_(0, ctx.groups.place_L, gradients[0]), None
