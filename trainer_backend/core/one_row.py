"""Packed rows as one row without padding: what a variable-length attention kernel takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer_backend.core.collate import Packed


@dataclass(frozen=True, slots=True)
class SegmentBounds:
    """Where the segments of one row lie.

    starts_S: int32, [S + 1] the first token of each segment, then the number of all tokens.
    longest: tokens of the longest segment.
    """

    starts_S: Tensor
    longest: int

    def to(self, device: torch.device) -> SegmentBounds:
        return replace(self, starts_S=self.starts_S.to(device, non_blocking=True))


def one_row(packed: Packed) -> tuple[Packed, SegmentBounds]:
    """The same tokens in the same order, all in one row, the padding left out.

    Flat columns keep their order, so a `Batch` of `packed` still fits. Segments are numbered from 1 over the
    whole row.

    Args:
        packed: B rows, on the CPU: the shapes of the result depend on what is in it, and a device would have
            to be waited for.

    Returns:
        [1, tokens] packed, and the bounds of its segments.
    """
    kept_BL = packed.segment_ids_BL > 0
    column_BL = kept_BL.flatten().cumsum(0).view_as(kept_BL) - 1
    positions_L = packed.position_ids_BL[kept_BL]
    starts_S = torch.cat([(positions_L == 0).nonzero()[:, 0], torch.tensor([len(positions_L)])])
    row = replace(
        packed,
        token_ids_BL=packed.token_ids_BL[kept_BL][None],
        position_ids_BL=positions_L[None],
        segment_ids_BL=(positions_L == 0).cumsum(0)[None],
        predict_row_N=torch.zeros_like(packed.predict_row_N),
        predict_position_N=column_BL[packed.predict_row_N, packed.predict_position_N],
    )
    return row, SegmentBounds(starts_S.to(torch.int32), int(starts_S.diff().max()))
