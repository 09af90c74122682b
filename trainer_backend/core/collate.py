"""Segments to tensors: packed rows for the model, flat columns for the loss.

Convention: columns of sampled tokens are flat, [N], one segment after the other, in the order of rows.
`predict_row_N` and `predict_position_N` are the place of the token before each sampled one, where the model
predicts it. So the head runs on N hidden states, never on B * L of them:

    hidden_ND = hidden_BLD[packed.predict_row_N, packed.predict_position_N]

A row holds whole segments one after the other, or *tries* of segments in depth-first order: a shared prefix
is stored once, and one place may predict tokens of several segments. The parent of a token at position p is
the last token at p - 1 before it in its row, so positions determine the trie (`subtree_ends`). Segments share
a token only if they name the same experts for it and for all tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_backend.core.columns import Row
from trainer_backend.core.critic import CriticTargets, OfEpisode, read_column
from trainer_backend.core.segments import Segment, experts_by_token, joined_spans, positions
from trainer_backend.core.tries import Beginnings, Numbers, Tries, pack
from trainer_backend.core.value_loss import CriticColumns, critic_columns
from trainer_backend.errors import BatchError, place


@dataclass(frozen=True, slots=True)
class Packed:
    """What the model needs to score sampled tokens.

    token_ids_BL: int64, 0 in padding.
    position_ids_BL: int64, from 0 in each segment, or the depth in a trie; 0 in padding.
    segment_ids_BL: int64, of the segment or trie that a token is in, from 1 in each row; 0 is padding.
    predict_row_N, predict_position_N: int64, where each sampled token is predicted.
    target_N: int64, its id.
    temperature_N: float32, that of the softmax it is scored by (`core.segments.SPAN`).
    behaviour_logprob_N: float32, nats, as its sampler reported it.
    segment_N: int64, which of the segments given it lies in.
    first_N: bool, whether it is the first token of its decision.
    experts_BLW: int16, those of each token as its sampler chose them, below 0 where they are not known; None:
        of no token.
    """

    token_ids_BL: Tensor
    position_ids_BL: Tensor
    segment_ids_BL: Tensor
    predict_row_N: Tensor
    predict_position_N: Tensor
    target_N: Tensor
    temperature_N: Tensor
    behaviour_logprob_N: Tensor
    segment_N: Tensor
    first_N: Tensor
    experts_BLW: Tensor | None = None

    def to(self, device: torch.device) -> Packed:
        """Copy to a device without waiting; itself where it is there already."""
        if self.target_N.device == device:
            return self
        columns: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: Any = {
            name: x if x is None else x.to(device, non_blocking=True) for name, x in columns.items()
        }
        return Packed(**moved)


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows and the columns of the loss."""

    packed: Packed
    advantage_N: Tensor
    """float32, of the token, or of the decision that sampled it."""
    weight_N: Tensor
    """float32, how much the token counts, see `core.aggregation`."""
    proximal_logprob_N: Tensor
    """float32, nats: the learner's own before the step, the clip's denominator."""
    behaviour_weight_N: Tensor
    """float32, how much it counts by who sampled it, as a factor of that: `core.behaviour`."""
    unit_N: Tensor
    """int64, equal for tokens that share a ratio or a weight, see `number_units`; from 0, over the step."""
    policy_N: Tensor
    """int64, who sampled it: 0 for the policy that is trained, then the fixed ones of the job."""
    critic: CriticColumns | None = None
    """The columns of the value loss; None where there is no critic."""
    reference_logprob_N: Tensor | None = None
    """float32, nats: of what a KL term pulls towards; None where there is no such term."""
    unit_log_N: Tensor | None = None
    """What the tokens of an episode share, which may lie in several pieces (core.objective); None where
    nothing is shared so."""
    policy_logprob_N: Tensor | None = None
    """float32, nats: of the policy in training without dropout; None where the forward pass of the loss has
    none and gives them itself."""

    def to(self, device: torch.device) -> Batch:
        """Copy to a device; columns that are there already stay."""
        return self.each(self.packed.to(device), lambda column: column.to(device, non_blocking=True))

    def each(self, packed: Packed, of: Callable[[Tensor], Tensor]) -> Batch:
        """Apply `of` to every column, and exchange the rows."""
        columns: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = {name: of(column) for name, column in columns.items() if isinstance(column, Tensor)}
        critic = None if self.critic is None else self.critic.each(of)
        return Batch(**{**columns, **changed, "packed": packed, "critic": critic})


def pack_segments(segments: Sequence[Segment], *, row_tokens: int, tries: Tries | None = None) -> Packed:
    """Pack segments into rows of at most `row_tokens` tokens; B rows, as wide as the fullest.

    With the segments' `tries`, a row stores a shared prefix once. Each segment has at least one sampled token
    (`build_segments` makes no other); a row has at most `row_tokens` sampled tokens. Raises BatchError where
    there is no segment, or one that is longer than a row.
    Source: DESIGN.md, stop 11 of the route.
    """
    if not segments:
        raise BatchError("no segment to pack")
    for segment in segments:
        if len(segment) > row_tokens:
            raise BatchError(
                f"a segment of {len(segment)} tokens, but row_tokens is {row_tokens}",
                where=place(segment.rollout_id),
            )
    rows = [] if tries is None else tries.rows(row_tokens)
    if not any(any(row.shared) for row in rows):
        rows = [Beginnings(members) for members in pack([len(segment) for segment in segments], row_tokens)]
    order = list(chain.from_iterable(row.members for row in rows))
    packed = [segments[index] for index in order]
    cells = _Cells.of([len(segment) for segment in packed], rows)
    spans = joined_spans(packed)
    spans_S = [len(segment.spans) for segment in packed]
    count_K = spans["end"] - spans["start"]
    number_N = np.repeat(np.repeat(np.arange(len(packed)), spans_S), count_K)
    position_N = positions(spans)
    ids_P = np.concatenate(
        [segment.token_ids[shared:] for segment, shared in zip(packed, cells.shared_S, strict=True)]
    ).astype(np.int64)
    predict_N = cells.places(number_N, position_N - 1)
    targets = np.concatenate([segment.token_ids for segment in packed])
    first_S = np.cumsum([0, *map(len, packed[:-1])])
    count_S = [len(segment.logprobs) for segment in packed]
    return Packed(
        token_ids_BL=cells.filled(ids_P),
        position_ids_BL=cells.filled(cells.position_P),
        segment_ids_BL=cells.filled(cells.number_P),
        predict_row_N=torch.from_numpy(cells.row_P[predict_N]),
        predict_position_N=torch.from_numpy(cells.column_P[predict_N]),
        target_N=torch.from_numpy(targets[first_S[number_N] + position_N].astype(np.int64)),
        temperature_N=torch.from_numpy(np.repeat(spans["temperature"].astype(np.float32), count_K)),
        behaviour_logprob_N=_flat([segment.logprobs for segment in packed], torch.float32),
        segment_N=torch.from_numpy(np.repeat(order, count_S)),
        first_N=torch.from_numpy(_begin(spans, np.repeat(first_S, spans_S))),
        experts_BLW=_experts(packed, cells),
    )


def _experts(segments: Sequence[Segment], cells: _Cells) -> Tensor | None:
    """[B, L, W] experts of the tokens in their cells, -1 where unknown; None: unknown for all."""
    experts = experts_by_token(segments)
    if experts is None:
        return None
    own = [experts_LW[shared:] for experts_LW, shared in zip(experts, cells.shared_S, strict=True)]
    # UNKNOWN is -1 of int16. Padding is 0 in a cell, so numbers are one more there.
    return cells.filled(np.concatenate(own).astype(np.int16) + np.int16(1)) - 1


def subtree_ends(position_L: Numbers) -> Numbers:
    """[L] for each token of a row, the place after the last token that sees it; from positions alone."""
    ends_L = np.full(len(position_L), len(position_L))
    path: list[int] = []  # places of the tokens from position 0 to the present one
    for place_, position in enumerate(position_L.tolist()):
        ends_L[path[position:]] = place_
        path[position:] = [place_]
    return ends_L


def _begin(spans: NDArray[Any], first_K: Numbers) -> NDArray[np.bool_]:
    """[N] whether a token is the first of its decision: it begins a span that continues no other span."""
    start_K, end_K = (spans[name].astype(np.int64) + first_K for name in ("start", "end"))
    count_K = end_K - start_K
    first_N = np.zeros(count_K.sum(), dtype=np.bool_)
    goes_on_K = (start_K[1:] == end_K[:-1]) & (spans["decision"][1:] == spans["decision"][:-1])
    first_N[count_K.cumsum() - count_K] = np.concatenate([[True], ~goes_on_K])
    return first_N


@dataclass(frozen=True, slots=True)
class _Cells:
    """The cells of the P tokens of packed segments, in the order of the rows; shared tokens have one cell.

    In numpy: torch would wake threads for a few thousand numbers.

    shared_S: of each segment, how many first tokens are those of the one before it.
    first_S: the number of each segment's first token that is its own.
    row_P, column_P: its place; position_P: within its segment; number_P: of its segment in the row, from 1.
    shape: of the rows.
    """

    shared_S: Numbers
    first_S: Numbers
    row_P: Numbers
    column_P: Numbers
    position_P: Numbers
    number_P: Numbers
    shape: tuple[int, int]

    @classmethod
    def of(cls, lengths: Sequence[int], rows: Sequence[Beginnings]) -> _Cells:
        segments_B = np.array([len(row.members) for row in rows])
        shared_S = np.concatenate([row.shared or np.zeros(len(row.members), np.int64) for row in rows])
        own_S = np.array(lengths) - shared_S
        first_S = own_S.cumsum() - own_S
        first_of_rows_B = segments_B.cumsum() - segments_B
        row_S = np.repeat(np.arange(len(segments_B)), segments_B)
        tokens_B = np.add.reduceat(own_S, first_of_rows_B)
        first_of_row_S = (tokens_B.cumsum() - tokens_B)[row_S]
        tries_S = (shared_S == 0).cumsum()
        number_S = tries_S - tries_S[first_of_rows_B][row_S] + 1
        number_P = np.arange(own_S.sum())
        return cls(
            shared_S=shared_S,
            first_S=first_S,
            row_P=np.repeat(row_S, own_S),
            column_P=number_P - np.repeat(first_of_row_S, own_S),
            position_P=number_P - np.repeat(first_S - shared_S, own_S),
            number_P=np.repeat(number_S, own_S),
            shape=(len(segments_B), int(tokens_B.max())),
        )

    def places(self, segment_N: Numbers, position_N: Numbers) -> Numbers:
        """[N] the cell of a segment's position: its own, or that of the earlier segment that it shares."""
        segment_N = segment_N.copy()
        while len(others := np.flatnonzero(position_N < self.shared_S[segment_N])):
            segment_N[others] -= 1
        return self.first_S[segment_N] + position_N - self.shared_S[segment_N]

    def filled(self, value_P: NDArray[Any]) -> Tensor:
        """Spread [P] values over [B, L] cells, or [P, W] over [B, L, W]; 0 in padding."""
        cells_BL = np.zeros((*self.shape, *value_P.shape[1:]), dtype=value_P.dtype)
        cells_BL[self.row_P, self.column_P] = value_P
        return torch.from_numpy(cells_BL)


def _flat(rows: Sequence[Row], dtype: torch.dtype) -> Tensor:
    """All numbers of all rows."""
    return torch.from_numpy(np.concatenate([np.asarray(row) for row in rows])).to(dtype)


def collate(
    segments: Sequence[Segment],
    *,
    advantages: Mapping[str, OfEpisode],
    weights: Sequence[Row],
    proximal: Sequence[Row],
    behaviour: Sequence[Row],
    units: Sequence[Row],
    policies: Sequence[int],
    row_tokens: int,
    tries: Tries | None = None,
    critic: Mapping[str, CriticTargets] | None = None,
    reference: Sequence[Row] | None = None,
) -> Batch:
    """All tensors of one optimizer step.

    Args:
        segments: all segments of the step.
        advantages: rollout id -> [T] advantage of each decision, or that of each sampled token.
        weights: for each segment, [N] as `core.aggregation` gives them.
        proximal: for each segment, [N] log-probs (nats) as `by_segment` gives them.
        behaviour: for each segment, [N] as `core.behaviour` gives them.
        units: for each segment, [N] as `core.aggregation.number_units` gives them.
        policies: for each segment, the number of who sampled it.
        row_tokens: most tokens in a row.
        tries: as in `pack_segments`.
        critic: rollout id -> what its values were and are to become; None: no critic.
        reference: for each segment, [N] log-probs (nats) as `by_segment` gives them; None: no KL term.

    Raises:
        BatchError: see `pack_segments`; a sampled token without a finite advantage, value or return; a column
            that does not fit its segment's sampled tokens.

    Source: DESIGN.md 4.8, 4.9, 4.13.
    """
    packed = pack_segments(segments, row_tokens=row_tokens, tries=tries)
    order = list(dict.fromkeys(packed.segment_N.tolist()))
    return Batch(
        packed=packed,
        advantage_N=_column(
            [read_column(segment, advantages, "advantage") for segment in segments], segments, order
        ),
        weight_N=_column(weights, segments, order),
        proximal_logprob_N=_column(proximal, segments, order),
        behaviour_weight_N=_column(behaviour, segments, order),
        unit_N=_column(units, segments, order, dtype=torch.int64),
        policy_N=torch.tensor(policies, dtype=torch.int64)[packed.segment_N],
        critic=None if critic is None else critic_columns(segments, critic, order),
        reference_logprob_N=None if reference is None else _column(reference, segments, order),
    )


def by_segment(packed: Packed, values_N: Tensor) -> list[NDArray[Any]]:
    """Split [N] values of all sampled tokens by segment; `packed` is whole, not a cut."""
    rows = split_by_number(packed, values_N)
    return [rows[index] for index in range(len(rows))]


def split_by_number(packed: Packed, values_N: Tensor) -> dict[int, NDArray[Any]]:
    """[N_segment] values of the sampled tokens of each segment here, by its number, in order."""
    number_N = packed.segment_N.cpu().numpy()
    first_S = np.flatnonzero(np.diff(number_N, prepend=-1))
    rows = np.split(values_N.detach().cpu().numpy(), first_S[1:])
    return dict(zip(number_N[first_S].tolist(), rows, strict=True))


def cut_packed(packed: Packed, max_rows: int) -> Iterator[Packed]:
    """The same rows, at most `max_rows` at a time, each cut as wide as its fullest row."""
    for cut, _ in _cuts(packed, max_rows):
        yield cut


def cut_batch(batch: Batch, max_rows: int) -> Iterator[Batch]:
    """The same batch, at most `max_rows` rows at a time. Weights stay as they are, so losses add up."""
    for cut, tokens in _cuts(batch.packed, max_rows):
        yield batch.each(cut, itemgetter(tokens))


def block_mask(position_ids_BL: Tensor) -> Tensor:
    """Who may attend to whom: [B, 1, L, L] bool, True where query i may look at key j.

    Causal, and along a path of the row's tries only; a segment that shares nothing is one path. Padding sees
    itself: a query that may look at nothing has a softmax of NaNs, whose gradient would be NaN everywhere.
    The positions, those of `Packed`, are on the CPU.

    For `attn_implementation="sdpa"`, with the positions. Eager attention would *add* the
    booleans to its scores without a word; `learner.support` therefore sets sdpa.
    """
    ends_BL = torch.from_numpy(np.stack([subtree_ends(row) for row in position_ids_BL.numpy()]))
    query_L = torch.arange(ends_BL.shape[1])
    return ((query_L[:, None] >= query_L) & (query_L[:, None] < ends_BL[:, None, :])).unsqueeze(1)


def _cuts(packed: Packed, max_rows: int) -> Iterator[tuple[Packed, slice]]:
    if max_rows < 1:
        raise BatchError(f"max_rows must be at least 1, got {max_rows}")
    for start in range(0, len(packed.token_ids_BL), max_rows):
        rows = slice(start, start + max_rows)
        bounds = torch.tensor([start, start + max_rows], device=packed.predict_row_N.device)
        tokens = slice(*torch.searchsorted(packed.predict_row_N, bounds).tolist())
        width = int((packed.segment_ids_BL[rows] > 0).sum(dim=1).max())
        cells = {name: getattr(packed, name)[rows, :width] for name in _CELLS}
        flat = {name: getattr(packed, name)[tokens] for name in _FLAT}
        flat["predict_row_N"] = flat["predict_row_N"] - start
        experts_BLW = None if packed.experts_BLW is None else packed.experts_BLW[rows, :width]
        yield Packed(**cells, **flat, experts_BLW=experts_BLW), tokens


_CELLS = [f.name for f in fields(Packed) if f.name.endswith("_BL")]
_FLAT = [f.name for f in fields(Packed) if f.name.endswith("_N")]


def _column(
    values: Sequence[Row],
    segments: Sequence[Segment],
    order: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    for segment, row in zip(segments, values, strict=True):
        if len(row) != len(segment.logprobs):
            raise BatchError(
                f"{len(row)} values for {len(segment.logprobs)} sampled tokens",
                where=place(segment.rollout_id),
            )
    return _flat([values[i] for i in order], dtype)
