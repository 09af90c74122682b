"""Converts segments to tensors: packed rows for the model, flat columns for the loss.

A *row* is a packed sequence; a *cell* is the slot of one token in a row. Columns with a value for each of the
N sampled tokens are flat, [N]: one segment after the other, in the order of the rows. The model predicts a
sampled token from the hidden state of the token before it. `predict_row_N` and `predict_position_N` contain
the cell of that hidden state, so the head runs on N hidden states instead of B * L:

    hidden_ND = hidden_BLD[packed.predict_row_N, packed.predict_position_N]

A row contains either whole segments one after the other, or prefix trees (*tries*) of segments. A trie stores
a shared prefix once, and its tokens are in depth-first order, so one cell may predict tokens of several
segments. The parent of a token at position p is the last earlier token of its row at position p - 1, so the
positions determine the trie (`subtree_ends`). Two segments share a token only if the experts chosen for that
token and for all tokens before it are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar

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

Columns = TypeVar("Columns")


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed rows, and the columns that are needed to compute log-probs of the sampled tokens."""

    token_ids_BL: Tensor
    """int64, 0 in padding."""
    position_ids_BL: Tensor
    """int64, the token's position in its segment, from 0; in a trie, its depth; 0 in padding."""
    segment_ids_BL: Tensor
    """int64, number of the token's segment or trie within its row, from 1; 0 in padding."""
    predict_row_N: Tensor
    predict_position_N: Tensor
    """int64, column of the cell whose hidden state predicts the token; `predict_row_N` is the cell's row."""
    target_N: Tensor
    """int64, id of the sampled token."""
    temperature_N: Tensor
    """float32, temperature of the softmax that gives the token's log-prob (`core.segments.SPAN`)."""
    behaviour_logprob_N: Tensor
    """float32, the log-prob (nats) that the sampler reported for the token."""
    segment_N: Tensor
    """int64, index of the token's segment in the sequence of segments that was packed."""
    first_N: Tensor
    """bool, whether the token is the first of its decision."""
    experts_BLW: Tensor | None = None
    """int16, experts that the sampler chose for the token, -1 if unknown; None: unknown for all tokens."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows, and the columns that the loss reads."""

    packed: Packed
    advantage_N: Tensor
    """float32, advantage of the token or of its decision."""
    weight_N: Tensor
    """float32, weight of the token in the loss, see `core.aggregation`."""
    proximal_logprob_N: Tensor
    """float32, log-prob (nats) under the learner's weights before the iteration's first update; the
    denominator of the clipped ratio."""
    behaviour_weight_N: Tensor
    """float32, truncated importance weight that corrects for the token's sampler, see `core.behaviour`."""
    unit_N: Tensor
    """int64, number of the token's unit, from 0 in the step. The tokens of a unit share a probability ratio
    or a behaviour weight, see `number_units`."""
    policy_N: Tensor
    """int64, policy that sampled the token: 0 is the actor, 1 and above are the job's fixed policies."""
    critic: CriticColumns | None = None
    """The columns of the value loss; None without a critic."""
    reference_logprob_N: Tensor | None = None
    """float32, log-prob (nats) under the reference policy; None if the loss contains no KL term."""
    unit_log_N: Tensor | None = None
    """float32, result of `Objective.unit_logs`; None if every unit lies in a single micro-batch."""
    policy_logprob_N: Tensor | None = None
    """float32, log-prob (nats) under the current policy without dropout; None if the forward pass of the loss
    itself runs without dropout."""


def map_tensors(given: Columns, of: Callable[[Tensor], Tensor]) -> Columns:
    """Apply `of` to each tensor of a dataclass, including nested dataclasses and tuples; keep the rest."""
    item: Any = given
    if isinstance(item, Tensor):
        item = of(item)
    elif type(item) is tuple:  # not a named tuple, which is built in another way
        item = tuple(map_tensors(part, of) for part in item)
    elif is_dataclass(item) and not isinstance(item, type):
        item = replace(item, **{f.name: map_tensors(getattr(item, f.name), of) for f in fields(item)})
    found: Columns = item
    return found


def to_device(given: Columns, device: torch.device) -> Columns:
    """Copy a dataclass's tensors to a device with `non_blocking`; do not copy tensors already there."""
    return map_tensors(given, lambda tensor: tensor.to(device, non_blocking=True))


def pack_segments(segments: Sequence[Segment], *, row_tokens: int, tries: Tries | None = None) -> Packed:
    """Pack segments into B rows of at most `row_tokens` tokens, padded to the length of the longest row.

    With `tries`, which must be built from these segments, a row stores a shared prefix once. A row then also
    has at most `row_tokens` sampled tokens. Each segment must contain a sampled token. Raises BatchError
    without segments, or if a segment is longer than `row_tokens`.

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
        first_N=torch.from_numpy(_find_first_tokens(spans, np.repeat(first_S, spans_S))),
        experts_BLW=_place_experts(packed, cells),
    )


def _place_experts(segments: Sequence[Segment], cells: _Cells) -> Tensor | None:
    """Return the experts of each cell's token, [B, L, W], -1 if unknown; None: unknown for all tokens."""
    experts = experts_by_token(segments)
    if experts is None:
        return None
    own = [experts_LW[shared:] for experts_LW, shared in zip(experts, cells.shared_S, strict=True)]
    # UNKNOWN is -1 as int16. Cells of padding are filled with 0, so the numbers are shifted by 1.
    return cells.filled(np.concatenate(own).astype(np.int16) + np.int16(1)) - 1


def subtree_ends(position_L: Numbers) -> Numbers:
    """Return for each token of a row, [L], 1 + the index of the last token that attends to it."""
    ends_L = np.full(len(position_L), len(position_L))
    path: list[int] = []  # indices of the tokens from position 0 to the current token
    for place_, position in enumerate(position_L.tolist()):
        ends_L[path[position:]] = place_
        path[position:] = [place_]
    return ends_L


def _find_first_tokens(spans: NDArray[Any], first_K: Numbers) -> NDArray[np.bool_]:
    """Return for each sampled token, [N], whether it is the first of its decision.

    The first token of a decision begins a span that does not continue the span before it.
    """
    start_K, end_K = (spans[name].astype(np.int64) + first_K for name in ("start", "end"))
    count_K = end_K - start_K
    first_N = np.zeros(count_K.sum(), dtype=np.bool_)
    goes_on_K = (start_K[1:] == end_K[:-1]) & (spans["decision"][1:] == spans["decision"][:-1])
    first_N[count_K.cumsum() - count_K] = np.concatenate([[True], ~goes_on_K])
    return first_N


@dataclass(frozen=True, slots=True)
class _Cells:
    """Locates the cells of packed segments. P is the number of stored tokens, ordered by row and column.

    The columns are numpy arrays, because torch would start threads for a few thousand numbers.
    """

    shared_S: Numbers
    """Length of the prefix that the segment shares with the segment before it."""
    first_S: Numbers
    """Index in [P] of the first token that the segment does not share with the segment before it."""
    row_P: Numbers
    column_P: Numbers
    position_P: Numbers
    """Position of the token within its segment, from 0."""
    number_P: Numbers
    """Number of the token's segment or trie within its row, from 1."""
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
        """Return the [N] indices in [P] of the tokens at these positions of these segments.

        A shared token is stored by the first of the segments that share it.
        """
        segment_N = segment_N.copy()
        while len(others := np.flatnonzero(position_N < self.shared_S[segment_N])):
            segment_N[others] -= 1
        return self.first_S[segment_N] + position_N - self.shared_S[segment_N]

    def filled(self, value_P: NDArray[Any]) -> Tensor:
        """Copy [P] values to their cells of a [B, L] tensor, or [P, W] to [B, L, W]; padding is 0."""
        cells_BL = np.zeros((*self.shape, *value_P.shape[1:]), dtype=value_P.dtype)
        cells_BL[self.row_P, self.column_P] = value_P
        return torch.from_numpy(cells_BL)


def _flat(rows: Sequence[Row], dtype: torch.dtype) -> Tensor:
    """Concatenate all rows into one tensor."""
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
    """Build all tensors of one optimizer step.

    Args:
        segments: all segments of the step.
        advantages: rollout id -> [T] advantages of the decisions, or advantages of the sampled tokens.
        weights: for each segment, [N] from `core.aggregation`.
        proximal: for each segment, [N] log-probs (nats) from `by_segment`.
        behaviour: for each segment, [N] from `core.behaviour`.
        units: for each segment, [N] from `core.aggregation.number_units`.
        policies: for each segment, the number of the policy that sampled it, see `Batch.policy_N`.
        row_tokens: maximum number of tokens in a row.
        tries: as in `pack_segments`.
        critic: rollout id -> values and value targets of the episode; None: no critic.
        reference: for each segment, [N] log-probs (nats) from `by_segment`; None: no KL term.

    Raises:
        BatchError: as `pack_segments`; if a sampled token has no finite advantage, value or return; if a
            column and its segment's sampled tokens differ in number.

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
    """Split [N] values of sampled tokens into one array per segment, in the order given to `pack_segments`.

    `packed` must be whole, not a result of `cut_packed`.
    """
    rows = split_by_number(packed, values_N)
    return [rows[index] for index in range(len(rows))]


def split_by_number(packed: Packed, values_N: Tensor) -> dict[int, NDArray[Any]]:
    """Split [N] values of sampled tokens by segment; the keys are segment numbers (`Packed.segment_N`)."""
    number_N = packed.segment_N.cpu().numpy()
    first_S = np.flatnonzero(np.diff(number_N, prepend=-1))
    rows = np.split(values_N.detach().cpu().numpy(), first_S[1:])
    return dict(zip(number_N[first_S].tolist(), rows, strict=True))


def cut_packed(packed: Packed, max_rows: int) -> Iterator[Packed]:
    """Yield micro-batches of at most `max_rows` rows, each as wide as its longest row."""
    for cut, _ in _cuts(packed, max_rows):
        yield cut


def cut_batch(batch: Batch, max_rows: int) -> Iterator[Batch]:
    """Yield micro-batches of at most `max_rows` rows.

    The weights stay the same, so the losses of the micro-batches sum to the loss of the batch.
    """
    for cut, tokens in _cuts(batch.packed, max_rows):
        yield replace(map_tensors(batch, itemgetter(tokens)), packed=cut)


def block_mask(position_ids_BL: Tensor) -> Tensor:
    """Build the attention mask [B, 1, L, L] on the CPU: True if query i may attend to key j.

    A token attends to itself and to its ancestors in the trie; in a segment that shares no token, the mask is
    causal. A cell of padding attends to itself, because the softmax of a query without keys is NaN, and would
    make the whole gradient NaN. `position_ids_BL` is the field of `Packed`. The mask needs
    `attn_implementation="sdpa"`, which `learner.support` sets; eager attention would silently *add* the
    booleans to its scores.
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
