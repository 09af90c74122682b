"""Attention of our decoder over the rows of a `SlotCache`, on any device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from trainer_backend.inference.cache import SlotCache

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """Adjacent rows that attend in one call, padded to the longest.

    tokens: their tokens in the pass.
    rows: their rows of the cache.
    visible: columns that the call reads.
    width: tokens of each row with its padding.
    places_N: of each token in the padded [rows * width]; None where nothing is padded.
    mask_BQL: what to add to the scores; None: each row starts at position 0, and its padding is on the right.
    """

    tokens: slice
    rows: slice
    visible: int
    width: int
    places_N: Tensor | None
    mask_BQL: Tensor | None


class RowAttention:
    """`TokenAttention` of a pass over adjacent rows: token by token, row after row.

    Its constructors reserve the room. They may run out of memory, which leaves the cache as it was.
    """

    def __init__(self, cache: SlotCache, rows_T: Tensor, positions_T: Tensor, spans: Sequence[Span]) -> None:
        self.positions_T = positions_T
        self._cache, self._rows_T, self._spans = cache, rows_T, spans
        self._places_N: Tensor | None = None
        self._layer: tuple[Tensor, ...] = ()  # the one that was written last

    @classmethod
    def decode(
        cls, cache: SlotCache, cached_B: Counts, *, device: torch.device, most_waste: int
    ) -> "RowAttention":
        """Feed one token to each of the first B rows, which have `cached` tokens; see `spans_of`."""
        rows = len(cached_B)
        longest = int(cached_B.max()) + 1
        cache.reserve(longest)
        positions_T = torch.from_numpy(cached_B).to(device)
        is_even = longest * rows - int(cached_B.sum()) - rows <= most_waste
        ones_B = np.ones_like(cached_B)
        cuts = [(0, rows)] if is_even else spans_of(cached_B, ones_B, most_waste=most_waste)
        spans = [
            Span(
                slice(first, last),
                slice(first, last),
                visible := int(cached_B[first:last].max()) + 1,
                1,
                None,
                _mask(positions_T[first:last, None], visible, cache.dtype),
            )
            for first, last in cuts
        ]
        return cls(cache, torch.arange(rows, device=device), positions_T, spans)

    @classmethod
    def prefill(
        cls,
        cache: SlotCache,
        *,
        first_row: int,
        starts_B: Counts,
        counts_B: Counts,
        device: torch.device,
        most_waste: int,
    ) -> "RowAttention":
        """Feed each of B rows, `first_row` and on, its tokens from position `start` on.

        Args:
            counts_B: how many, at least 1; all before `start` are cached.
            most_waste: see `spans_of`.
        """
        cache.reserve(int((starts_B + counts_B).max()))
        befores_B = counts_B.cumsum() - counts_B
        rows_T = np.repeat(np.arange(first_row, first_row + len(counts_B)), counts_B)
        positions_T = np.arange(len(rows_T)) + np.repeat(starts_B - befores_B, counts_B)
        spans = [
            _span(slice(first, last), first_row, starts_B, counts_B, cache.dtype, device)
            for first, last in spans_of(starts_B, counts_B, most_waste=most_waste)
        ]
        return cls(
            cache, torch.from_numpy(rows_T).to(device), torch.from_numpy(positions_T).to(device), spans
        )

    def write(self, layer: int, keys_TKD: Tensor, values_TKD: Tensor) -> None:
        heads, size = keys_TKD.shape[1:]
        self._layer = self._cache.layer(layer, keys_TKD.transpose(0, 1), values_TKD.transpose(0, 1))
        if self._places_N is None:
            first_T = self._rows_T * (heads * self._cache.capacity) + self.positions_T
            heads_K = torch.arange(heads, device=keys_TKD.device) * self._cache.capacity
            self._places_N = (first_T[:, None] + heads_K).flatten()
        for tensor, new_TKD in zip(self._layer, (keys_TKD, values_TKD), strict=True):
            tensor.view(-1, size).index_copy_(0, self._places_N, new_TKD.to(tensor.dtype).reshape(-1, size))

    def attend(self, layer: int, queries_THD: Tensor) -> Tensor:
        keys, values = self._layer
        queries_THD = queries_THD.to(keys.dtype)
        parts = [
            _attend(
                span,
                queries_THD[span.tokens],
                keys[span.rows, :, : span.visible],
                values[span.rows, :, : span.visible],
            )
            for span in self._spans
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _span(
    rows: slice, first_row: int, starts_B: Counts, counts_B: Counts, dtype: torch.dtype, device: torch.device
) -> Span:
    """Some rows of a prefill."""
    starts_R, counts_R = starts_B[rows], counts_B[rows]
    width, visible = int(counts_R.max()), int((starts_R + counts_R).max())
    before, tokens = int(counts_B[: rows.start].sum()), int(counts_R.sum())
    places_N, mask_RQL = None, None
    if tokens < width * len(counts_R):
        gaps_R = np.arange(len(counts_R)) * width - (counts_R.cumsum() - counts_R)
        places_N = torch.from_numpy(np.arange(tokens) + np.repeat(gaps_R, counts_R)).to(device)
    if starts_R.any() or width == 1:
        last_RQ = torch.from_numpy(starts_R[:, None] + np.arange(width)).to(device)
        mask_RQL = _mask(last_RQ, visible, dtype)
    return Span(
        slice(before, before + tokens),
        slice(first_row + rows.start, first_row + rows.stop),
        visible,
        width,
        places_N,
        mask_RQL,
    )


def _mask(positions_BQ: Tensor, visible: int, dtype: torch.dtype) -> Tensor:
    """[B, Q, L] what to add to scores: each token sees the columns up to its own position."""
    columns_L = torch.arange(visible, device=positions_BQ.device)
    return torch.where(columns_L <= positions_BQ[:, :, None], 0.0, torch.finfo(dtype).min).to(dtype)


def spans_of(starts_B: Counts, counts_B: Counts, *, most_waste: int) -> list[tuple[int, int]]:
    """Cut rows into spans [first, last): whole prompts apart from others, and like lengths together.

    Args:
        starts_B, counts_B: each row's first position, and its tokens in the pass.
        most_waste: (query, key) pairs of padding that a span may have.
    """
    spans: list[tuple[int, int]] = []
    first, width, visible, pairs = 0, 0, 0, 0
    is_prefill = counts_B.max() > 1
    for row, (start, count) in enumerate(zip(starts_B.tolist(), counts_B.tolist(), strict=True)):
        own = count * (start + count)
        padded = (row - first + 1) * max(width, count) * max(visible, start + count)
        other_kind = is_prefill and row > 0 and (start > 0) != (starts_B[row - 1] > 0)
        if row > first and (other_kind or padded - pairs - own > most_waste):
            spans.append((first, row))
            first, width, visible, pairs = row, 0, 0, 0
        width, visible, pairs = max(width, count), max(visible, start + count), pairs + own
    return [*spans, (first, len(starts_B))]


def _attend(span: Span, queries_NHD: Tensor, keys_BKLD: Tensor, values_BKLD: Tensor) -> Tensor:
    """[N, H, D] of a span's tokens."""
    rows, groups = len(keys_BKLD), queries_NHD.shape[1] // keys_BKLD.shape[1]
    if span.width == 1:
        return _attend_once(span, queries_NHD, keys_BKLD, values_BKLD)
    padded_NHD = queries_NHD
    if span.places_N is not None:
        padded_NHD = queries_NHD.new_zeros((rows * span.width, *queries_NHD.shape[1:]))
        padded_NHD.index_copy_(0, span.places_N, queries_NHD)
    mixed_BHQD = F.scaled_dot_product_attention(
        padded_NHD.unflatten(0, (rows, span.width)).transpose(1, 2),
        keys_BKLD,
        values_BKLD,
        attn_mask=None if span.mask_BQL is None else span.mask_BQL[:, None],
        is_causal=span.mask_BQL is None,
        enable_gqa=groups > 1,
    )
    mixed_NHD = mixed_BHQD.transpose(1, 2).flatten(0, 1)
    return mixed_NHD if span.places_N is None else mixed_NHD.index_select(0, span.places_N)


def _attend_once(span: Span, queries_BHD: Tensor, keys_BKLD: Tensor, values_BKLD: Tensor) -> Tensor:
    """[B, H, D] where each row has one token: the queries of a key-value head are one matrix."""
    assert span.mask_BQL is not None, "a row of one token is masked like any other"
    rows, kv_heads, _, size = keys_BKLD.shape
    queries_NGD = queries_BHD.unflatten(1, (kv_heads, -1)).flatten(0, 1)
    if queries_BHD.dtype != torch.float32 or queries_BHD.device.type != "cpu":
        mixed = F.scaled_dot_product_attention(
            queries_NGD.unflatten(0, (rows, kv_heads)),
            keys_BKLD,
            values_BKLD,
            attn_mask=span.mask_BQL[:, None],
        )
        return mixed.flatten(1, 2)
    # Faster than the CPU's kernel for single queries by 1.7.
    mask_N1L = span.mask_BQL.repeat_interleave(kv_heads, 0) if kv_heads > 1 else span.mask_BQL
    scores_NGL = torch.baddbmm(
        mask_N1L, queries_NGD, keys_BKLD.flatten(0, 1).transpose(1, 2), alpha=size**-0.5
    )
    mixed_NGD = scores_NGL.softmax(-1) @ values_BKLD.flatten(0, 1)
    return mixed_NGD.view(queries_BHD.shape)
