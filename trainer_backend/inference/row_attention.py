"""Compute the attention of our decoder over the rows of a `SlotCache`, on any device.

A row of the cache stores the keys and values of one request, with one column per token. A trunk stores the
first tokens that several rows have in common (`trunks`). The queries of all these rows attend to the trunk in
one matrix product. Separately, the queries of each row attend to the row's tokens after the trunk. Both
results are then joined (`models.part_attention`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from trainer_backend.inference.cache import SlotCache
from trainer_backend.inference.trunks import Trunk
from trainer_backend.models.cpu_kernels import CpuKernels
from trainer_backend.models.part_attention import attended, attended_under, folded, join, unfolded

Counts = NDArray[np.int64]
# The longest row that the CPU kernels prefill. They compute one query after the other, so torch is faster for
# longer rows.
SHORT_ROW = 192


@dataclass(frozen=True, slots=True)
class Span:
    """Adjacent rows whose queries attend in one call, padded to the longest row."""

    tokens: slice
    """The tokens of these rows, among all tokens of the forward pass."""
    rows: slice
    """The rows of the cache."""
    visible: int
    """The number of cache columns that the call reads."""
    width: int
    """The number of query tokens of each row, padding included."""
    places_N: Tensor | None
    """The index of each token among the rows * width padded tokens; None without padding."""
    mask: Tensor | None
    """The mask to add to the scores: [rows, 1, width, visible], or [rows * key-value heads, 1, visible] if
    each row has a single query token. None: attention is causal, since each row starts at column 0 and has
    its padding on the right."""


@dataclass(frozen=True, slots=True)
class Group:
    """The tokens of a pass whose rows refer to one trunk, as a slice or (if not adjacent) as indices."""

    trunk: Trunk
    tokens: slice | Tensor


@dataclass(frozen=True, slots=True)
class Tokens:
    positions_T: Tensor
    """The position of each token in its sequence; the trunk's tokens count too."""
    columns_T: Tensor
    """The cache column of each token: its position minus the length of the row's trunk."""
    heads_TK: Tensor
    """For each token and key-value head, the head's index among the heads of all rows: row * heads + head."""


class RowAttention:
    """The `TokenAttention` of one forward pass. Its rows are adjacent, and so are the tokens of each row."""

    def __init__(
        self,
        cache: SlotCache,
        tokens: Tokens,
        spans: Sequence[Span],
        groups: Sequence[Group],
        kernels: CpuKernels | None = None,
    ) -> None:
        self.positions_T, self._kernels = tokens.positions_T, kernels
        self._cache, self._tokens, self._spans, self._groups = cache, tokens, spans, groups
        # The cache capacity for which `_places_in` computed its last result (0: none yet), and that result.
        self._places = 0, tokens.heads_TK
        self._layer: tuple[Tensor, Tensor]  # the layer that was written last

    def write(self, layer: int, keys_TKD: Tensor, values_TKD: Tensor) -> None:
        size = keys_TKD.shape[2]
        keys, values = self._cache.layer(layer, keys_TKD.transpose(0, 1), values_TKD.transpose(0, 1))
        self._layer = keys, values
        if self._kernels is not None:
            tokens = self._tokens
            self._kernels.store(keys_TKD, values_TKD, (keys, values), tokens.heads_TK, tokens.columns_T)
            return
        for tensor, new_TKD in zip(self._layer, (keys_TKD, values_TKD), strict=True):
            rounded_NKD = new_TKD.to(tensor.dtype).reshape(-1, size)
            tensor.view(-1, size).index_copy_(0, self._places_in(tensor.shape[2]), rounded_NKD)

    def _places_in(self, capacity: int) -> Tensor:
        """Return the indices of the tokens' vectors in a cache tensor of slots * heads * capacity vectors.

        The result, [T * key-value heads], is normally computed once per pass. If the cache ran out of memory
        while it grew, its tensors differ in capacity, and each capacity needs its own result.
        """
        if self._places[0] != capacity:
            tokens = self._tokens
            self._places = capacity, (tokens.heads_TK * capacity + tokens.columns_T[:, None]).view(-1)
        return self._places[1]

    def attend(self, layer: int, queries_THD: Tensor) -> Tensor:
        keys, values = self._layer
        queries_THD = queries_THD.to(keys.dtype)
        if self._groups:
            return self._attend_joined(layer, queries_THD)
        if not self._spans:
            return self._attend_own(queries_THD)[0]
        if len(self._spans) == 1:
            return _attend(self._spans[0], queries_THD, keys, values)
        return torch.cat([_attend(span, queries_THD[span.tokens], keys, values) for span in self._spans])

    def _attend_joined(self, layer: int, queries_THD: Tensor) -> Tensor:
        """Attend to each row's own tokens, then to each trunk, and join the results."""
        out_THD, lse_TH = self._attend_own(queries_THD)
        heads, scale = queries_THD.shape[1], queries_THD.shape[2] ** -0.5
        for group in self._groups:
            keys_KLD, values_KLD = group.trunk.layer(layer)
            part, lse = attended(
                folded(queries_THD[group.tokens], len(keys_KLD)), keys_KLD[None], values_KLD[None],
                None, False, scale,
            )  # fmt: skip
            own, own_lse = out_THD[group.tokens], lse_TH[group.tokens]
            join(own, own_lse, unfolded(part, heads), unfolded(lse[..., None], heads)[..., 0])
            if not isinstance(group.tokens, slice):
                out_THD[group.tokens] = own
        return out_THD

    def _attend_own(self, queries_THD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention to the rows' own tokens (those after the trunk), and its log-sum-exp."""
        if not self._spans:
            assert self._kernels is not None, "only they need no spans"
            return self._kernels.attend(
                queries_THD, self._layer, self._tokens.heads_TK, self._tokens.columns_T,
                scale=queries_THD.shape[2] ** -0.5,
            )  # fmt: skip
        parts = [_attend_part(span, queries_THD[span.tokens], *self._layer) for span in self._spans]
        out_THD, lse_TH = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return out_THD, lse_TH


class RowAttentions:
    """Creates a `RowAttention` for each forward pass over a cache, and reserves room for the pass's tokens.

    If memory runs out, the cache stays unchanged. `most_waste` limits padding (see `cut_spans`). `cpu` is a
    set of CPU kernels for decode steps and short rows; these kernels need no padding, and therefore no spans.
    """

    def __init__(
        self,
        cache: SlotCache,
        *,
        kv_heads: int,
        device: torch.device,
        most_waste: int,
        cpu: CpuKernels | None = None,
    ) -> None:
        self._cache, self._device, self._most_waste, self._cpu = cache, device, most_waste, cpu
        self._columns_L = torch.arange(cache.max_len, device=device)
        self._heads_K = torch.arange(kv_heads, device=device)
        self._hidden = torch.finfo(cache.dtype).min

    def decode(self, cached_B: Counts) -> RowAttention:
        """Return the `RowAttention` for a step that feeds one token to each of the first B rows.

        `cached_B` is the number of tokens of each row before the step.
        """
        count = len(cached_B)
        own_B = cached_B - self._cache.starts(range(count))
        longest = int(own_B.max()) + 1
        self._cache.reserve(longest)
        tokens = self._tokens(np.arange(count), cached_B, own_B)
        groups = self._groups(0, np.ones_like(cached_B))
        if self._cpu is not None:
            return RowAttention(self._cache, tokens, [], groups, self._cpu)
        waste = count * (longest - 1) - int(own_B.sum())
        cuts = [(0, count)]
        if waste > self._most_waste:
            cuts = cut_spans(own_B, np.ones_like(own_B), most_waste=self._most_waste)
        spans = [self._span_of_single(slice(*cut), own_B, tokens.columns_T) for cut in cuts]
        return RowAttention(self._cache, tokens, spans, groups)

    def prefill(self, *, first_row: int, starts_B: Counts, counts_B: Counts) -> RowAttention:
        """Return the `RowAttention` for a prefill of B new rows.

        Row `first_row` + i gets `counts_B[i]` tokens (at least 1), from position `starts_B[i]` on.
        """
        trunks_B = self._cache.starts(range(first_row, first_row + len(counts_B)))
        own_B = starts_B - trunks_B
        longest = int((own_B + counts_B).max())
        self._cache.reserve(longest)
        rows, positions = list_tokens(first_row, starts_B, counts_B)
        tokens = self._tokens(rows, positions, positions - np.repeat(trunks_B, counts_B))
        spans = []
        if self._cpu is None or longest > SHORT_ROW:
            cuts = cut_spans(own_B, counts_B, most_waste=self._most_waste)
            spans = [self._span_of_many(slice(*cut), first_row, own_B, counts_B) for cut in cuts]
        return RowAttention(self._cache, tokens, spans, self._groups(first_row, counts_B), self._cpu)

    def _tokens(self, rows_T: Counts, positions_T: Counts, columns_T: Counts) -> Tokens:
        rows, positions, columns = (
            torch.from_numpy(numbers).to(self._device) for numbers in (rows_T, positions_T, columns_T)
        )
        return Tokens(positions, columns, rows[:, None] * len(self._heads_K) + self._heads_K)

    def _groups(self, first_row: int, counts_B: Counts) -> list[Group]:
        """Return, for each trunk of the pass, the tokens of all rows that refer to the trunk.

        In the pass, row `first_row` + i has `counts_B[i]` tokens.
        """
        tokens: dict[Trunk, list[range]] = {}
        end = 0
        for row, count in enumerate(counts_B.tolist(), start=first_row):
            trunk = self._cache.trunks.get(row)
            if trunk is not None:
                tokens.setdefault(trunk, []).append(range(end, end + count))
            end += count
        return [Group(trunk, _index_tokens(found)) for trunk, found in tokens.items()]

    def _span_of_single(self, rows: slice, cached_B: Counts, positions_B: Tensor) -> Span:
        """Return the span of some rows of a decode step."""
        visible = int(cached_B[rows].max()) + 1
        mask_RL = self._mask(positions_B[rows, None], visible)
        mask_RKL = mask_RL[:, None].expand(-1, len(self._heads_K), -1)
        return Span(rows, rows, visible, 1, None, mask_RKL.reshape(-1, 1, visible))

    def _span_of_many(self, rows: slice, first_row: int, starts_B: Counts, counts_B: Counts) -> Span:
        """Return the span of some rows of a prefill."""
        starts_R, counts_R = starts_B[rows], counts_B[rows]
        width, visible = int(counts_R.max()), int((starts_R + counts_R).max())
        before, tokens = int(counts_B[: rows.start].sum()), int(counts_R.sum())
        places_N, mask_R1QL = None, None
        if tokens < width * len(counts_R):
            gaps_R = np.arange(len(counts_R)) * width - (counts_R.cumsum() - counts_R)
            places = np.arange(tokens) + np.repeat(gaps_R, counts_R)
            places_N = torch.from_numpy(places).to(self._device)
        if starts_R.any():
            last_RQ = torch.from_numpy(starts_R[:, None] + np.arange(width)).to(self._device)
            mask_R1QL = self._mask(last_RQ[:, :, None], visible)[:, None]
        cache_rows = slice(first_row + rows.start, first_row + rows.stop)
        return Span(slice(before, before + tokens), cache_rows, visible, width, places_N, mask_R1QL)

    def _mask(self, positions: Tensor, visible: int) -> Tensor:
        """Return the mask [..., L] to add to scores. Queries at `positions` [..., 1] see no later columns."""
        return (self._columns_L[:visible] > positions).to(self._cache.dtype).mul_(self._hidden)


def list_tokens(first_row: int, starts_B: Counts, counts_B: Counts) -> tuple[Counts, Counts]:
    """Return the row and the position of each token of a pass, [T] each, row by row.

    Row `first_row` + i has `counts_B[i]` tokens, from position `starts_B[i]` on.
    """
    rows_T = np.repeat(np.arange(first_row, first_row + len(counts_B)), counts_B)
    befores_B = counts_B.cumsum() - counts_B
    return rows_T, np.arange(len(rows_T)) + np.repeat(starts_B - befores_B, counts_B)


def cut_spans(starts_B: Counts, counts_B: Counts, *, most_waste: int) -> list[tuple[int, int]]:
    """Cut adjacent rows into spans [first, last), each of which attends in one padded call.

    A span contains at most `most_waste` (query, key) pairs of padding. A span of a prefill never mixes whole
    prompts, which start at position 0, with rests of prompts, which start later. `starts_B` are the first
    positions of the rows in the pass, and `counts_B` their numbers of tokens.
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


def _index_tokens(ranges: Sequence[range]) -> slice | Tensor:
    """Return an index of the tokens of ascending ranges: a slice if they are adjacent, else a tensor."""
    first, end = ranges[0].start, ranges[-1].stop
    if sum(map(len, ranges)) == end - first:
        return slice(first, end)
    return torch.tensor(list(chain.from_iterable(ranges)))


def _attend_part(span: Span, queries_NHD: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of `_attend` and the log-sum-exp of its scores, [N, H]; for float32 on a CPU only."""
    if span.width == 1 and span.mask is not None and span.mask.dim() == 3:
        scores_NGL, values_NLD = _scores_once(span, span.mask, queries_NHD, keys, values)
        most_NG1 = scores_NGL.amax(-1, keepdim=True)
        sums_NG1 = scores_NGL.sub_(most_NG1).exp_().sum(-1, keepdim=True)
        out_NGD = torch.bmm(scores_NGL, values_NLD).div_(sums_NG1)
        return out_NGD.view(queries_NHD.shape), most_NG1.add_(sums_NG1.log_()).view(queries_NHD.shape[:2])
    tensors, scale = _padded(span, queries_NHD, keys, values, each=True), queries_NHD.shape[2] ** -0.5
    if span.mask is None:
        out_BHQD, lse_BHQ = attended(*tensors, None, True, scale)
    else:
        out_BHQD, lse_BHQ = attended_under(span.mask, *tensors, scale)
    return _unpadded(span, out_BHQD), _unpadded(span, lse_BHQ[..., None])[..., 0]


def _attend(span: Span, queries_NHD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return the attention of a span's tokens over a layer of the cache, [N, H, D]."""
    if span.width == 1 and span.mask is not None and span.mask.dim() == 3:
        return _attend_once(span, span.mask, queries_NHD, keys, values)
    groups = queries_NHD.shape[1] // keys.shape[1]
    # No fused kernel supports both a mask and grouped query heads.
    tensors = _padded(span, queries_NHD, keys, values, each=span.mask is not None)
    mixed_BHQD = F.scaled_dot_product_attention(
        *tensors,
        attn_mask=span.mask,
        is_causal=span.mask is None,
        enable_gqa=span.mask is None and groups > 1,
    )
    return _unpadded(span, mixed_BHQD)


def _padded(
    span: Span, queries_NHD: Tensor, keys: Tensor, values: Tensor, *, each: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the padded queries, [rows, heads, width, D], and the keys and values that they read.

    If `each` is true, keys and values are repeated, so that each query head has its own.
    """
    rows, padded_NHD = span.rows.stop - span.rows.start, queries_NHD
    if span.places_N is not None:
        # Padding stays uninitialised: queries do not affect each other, and `_unpadded` drops its results.
        padded_NHD = queries_NHD.new_empty((rows * span.width, *queries_NHD.shape[1:]))
        padded_NHD.index_copy_(0, span.places_N, queries_NHD)
    groups = queries_NHD.shape[1] // keys.shape[1]
    keys, values = keys[span.rows, :, : span.visible], values[span.rows, :, : span.visible]
    if each and groups > 1:
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    return padded_NHD.view(rows, span.width, *queries_NHD.shape[1:]).transpose(1, 2), keys, values


def _unpadded(span: Span, mixed_BHQD: Tensor) -> Tensor:
    """Return the results of a span's tokens, [N, H, D], without padding."""
    mixed_NHD = mixed_BHQD.transpose(1, 2).flatten(0, 1)
    return mixed_NHD if span.places_N is None else mixed_NHD.index_select(0, span.places_N)


def _attend_once(span: Span, mask_N1L: Tensor, queries_BHD: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return the attention of one query token per row, [B, H, D].

    Query heads with the same key-value head are computed as the rows of one matrix.
    """
    if queries_BHD.dtype != torch.float32 or queries_BHD.device.type != "cpu":
        kv_heads, size = keys.shape[1], keys.shape[3]
        cache_rows = span.rows, slice(None), slice(span.visible)
        return F.scaled_dot_product_attention(
            queries_BHD.reshape(-1, kv_heads, queries_BHD.shape[1] // kv_heads, size),
            keys[cache_rows],
            values[cache_rows],
            attn_mask=mask_N1L.view(-1, kv_heads, 1, span.visible),
        ).reshape(queries_BHD.shape)
    scores_NGL, values_NLD = _scores_once(span, mask_N1L, queries_BHD, keys, values)
    return torch.bmm(scores_NGL.softmax(-1), values_NLD).view(queries_BHD.shape)


def _scores_once(
    span: Span, mask_N1L: Tensor, queries_BHD: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the scores of one query token per row, [N, G, L], and the values, [N, L, D], on a CPU.

    N is rows * key-value heads, and G the number of query heads per key-value head. This computation is 1.7
    times as fast as torch's CPU kernel for single queries.
    """
    kv_heads, size = keys.shape[1], keys.shape[3]
    first, number = span.rows.start * kv_heads, len(mask_N1L)
    keys_NLD, values_NLD = (
        tensor.flatten(0, 1).narrow(0, first, number).narrow(1, 0, span.visible) for tensor in (keys, values)
    )
    queries_NGD = queries_BHD.reshape(number, -1, size)
    return torch.baddbmm(mask_N1L, queries_NGD, keys_NLD.transpose(1, 2), alpha=size**-0.5), values_NLD
