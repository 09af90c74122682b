"""Implement `decoder.TokenAttention` for a paged cache, for decode steps and for prefills."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trainer_backend.inference.page_memory import PageMemory
from trainer_backend.inference.page_tiles import Tiles
from trainer_backend.inference.paged_attention import attend, gather, store
from trainer_backend.inference.paged_cache import find_slots
from trainer_backend.inference.row_attention import Counts, list_tokens


class DecodeAttention:
    """The attention of a decode step, which computes one token per row.

    The keys and values of these tokens are written to the slots `slots_B` (int64, on the device).
    """

    def __init__(
        self,
        memory: PageMemory,
        slots_B: Tensor,
        table_BP: Tensor,
        lengths_B: Tensor,
        tiles: Tiles | None = None,
    ) -> None:
        self._memory, self._slots_B = memory, slots_B
        self._table_BP, self._lengths_B, self._tiles = table_BP, lengths_B, tiles

    def write(self, layer: int, keys_TKD: Tensor, values_TKD: Tensor) -> None:
        store(self._memory, layer, self._slots_B, keys_TKD, values_TKD)

    def attend(self, layer: int, queries_THD: Tensor) -> Tensor:
        scale = self._memory.dim**-0.5
        return attend(
            self._memory, layer, queries_THD, self._table_BP, self._lengths_B, scale=scale, tiles=self._tiles
        )


class PrefillAttention:
    """The attention of a prefill, which computes several tokens per row; the tokens of a row are adjacent.

    `tables_BP` (int32) lists the pages of B rows. `starts_B` is the position of the first computed token of
    each row; all tokens before it are cached. `counts_B` is the number of computed tokens of each row, at
    least 1. `heads` is the number of query heads.
    """

    def __init__(
        self,
        memory: PageMemory,
        tables_BP: NDArray[np.int32],
        *,
        starts_B: Counts,
        counts_B: Counts,
        heads: int,
        by_kernel: bool,
    ) -> None:
        self._memory = memory
        self._firsts_B = counts_B.cumsum() - counts_B
        self._starts_B, self._counts_B = starts_B, counts_B
        rows_T, positions_T = list_tokens(0, starts_B, counts_B)
        slots_T = find_slots(tables_BP, rows_T, positions_T)
        self.positions_T, self._slots_T = self._on_device(positions_T), self._on_device(slots_T)
        self._tables_BP, self._blocks_N4 = tables_BP, torch.empty(0)
        self._by_kernel = by_kernel
        if by_kernel:
            self._tables = self._on_device(tables_BP)
            self._blocks_N4 = self._on_device(self._blocks(heads // memory.heads))

    def write(self, layer: int, keys_TKD: Tensor, values_TKD: Tensor) -> None:
        store(self._memory, layer, self._slots_T, keys_TKD, values_TKD)

    def attend(self, layer: int, queries_THD: Tensor) -> Tensor:
        scale = self._memory.dim**-0.5
        if self._by_kernel:
            from trainer_backend.inference.paged_kernel import attend_blocks

            return attend_blocks(self._memory, layer, queries_THD, self._tables, self._blocks_N4, scale)
        ends_B = (self._firsts_B + self._counts_B).tolist()
        parts = [
            self._attend_row(layer, row, queries_THD[first:end], scale)
            for row, (first, end) in enumerate(zip(self._firsts_B.tolist(), ends_B, strict=True))
        ]
        return torch.cat(parts)

    def _attend_row(self, layer: int, row: int, q_QHD: Tensor, scale: float) -> Tensor:
        """Return the attention output of one row, [Q, H, D], computed by torch."""
        start, count = int(self._starts_B[row]), int(self._counts_B[row])
        slots = find_slots(self._tables_BP, row, np.arange(start + count))
        k_LKD, v_LKD = gather(self._memory, layer, self._on_device(slots))
        visible_QL = torch.ones(count, start + count, dtype=torch.bool, device=q_QHD.device).tril(start)
        q_HQD, k_KLD, v_KLD = (
            tensor.transpose(0, 1)[None] for tensor in (q_QHD.to(k_LKD.dtype), k_LKD, v_LKD)
        )
        out_1HQD = scaled_dot_product_attention(
            q_HQD, k_KLD, v_KLD, attn_mask=visible_QL, scale=scale, enable_gqa=True
        )
        return out_1HQD[0].transpose(0, 1)

    def _blocks(self, group: int) -> NDArray[np.int32]:
        """Return the blocks for `paged_kernel.attend_blocks`, [N, 4].

        Blocks whose queries attend to the most keys come first.
        """
        from trainer_backend.inference.paged_kernel import block_rows

        size = block_rows(self._memory, group) // group
        blocks = [
            (first + at, min(size, count - at), row, start + at)
            for row, (first, count, start) in enumerate(
                zip(self._firsts_B.tolist(), self._counts_B.tolist(), self._starts_B.tolist(), strict=True)
            )
            for at in range(0, count, size)
        ]
        return np.array(sorted(blocks, key=lambda block: -block[3]), dtype=np.int32)

    def _on_device(self, numbers: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(self._memory.device)
