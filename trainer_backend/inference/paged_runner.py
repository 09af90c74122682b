"""Run forward passes of the running batch with our own decoder and a paged cache.

The results of a step are read only after the next step is launched.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from trainer_backend.inference.decoder import Decoder
from trainer_backend.inference.page_memory import PageMemory, page_bytes, whole_slabs
from trainer_backend.inference.page_tiles import Group, group_rows
from trainer_backend.inference.paged_attention import kernels_are_here, tile_rows
from trainer_backend.inference.paged_cache import PagedCache, find_slots
from trainer_backend.inference.paged_pass import PrefillAttention
from trainer_backend.inference.pages import pages_for
from trainer_backend.inference.request import Request, read_rests
from trainer_backend.inference.row_columns import Columns
from trainer_backend.inference.sampler import RowSettings, likeliest, uniforms
from trainer_backend.inference.static_step import Launched, StaticStep
from trainer_backend.models.folder import is_out_of_memory

log = structlog.get_logger(__name__)

Likeliest = list[tuple[tuple[int, float], ...]]


class PageLimits(NamedTuple):
    """Settings of the paged cache.

    `paged` decides whether the cache is paged; if it is None, the cache is paged on devices that run the
    kernels. `most_bytes` is the largest size of the cache; None: no limit.
    """

    paged: bool | None
    most_bytes: int | None

    def wanted_on(self, device: torch.device) -> bool:
        return kernels_are_here(device) if self.paged is None else self.paged


BY_DEVICE = PageLimits(None, None)


class Step(NamedTuple):
    """A launched step, and the data with which the host reads its results."""

    requests: list[Request]
    launched: Launched
    truncated_B: NDArray[np.bool_]
    likeliest: Likeliest | None


class PagedRunner:
    """Runs our own decoder over a paged cache, for models that the decoder supports.

    `step` launches a step and returns the previous step, so that the host can process the tokens of the
    previous step while the device computes the next step. If a row turns out to have ended, the next step has
    already sampled one token too many. This token is not read, and comes after all tokens that are kept.

    The cache has pages for `slots` rows and `kept` prefixes of `max_len` tokens each. If these exceed
    `most_bytes`, the cache has fewer pages, but at least enough for one row.
    """

    def __init__(
        self, model: PreTrainedModel, *, slots: int, max_len: int, kept: int, most_bytes: int | None = None
    ) -> None:
        self._by_kernel = kernels_are_here(model.device)
        self._decoder = Decoder(model, max_len=max_len, by_kernel=self._by_kernel)
        heads = self._decoder.heads
        device = model.device
        limit = (slots + kept) * pages_for(max_len)
        if most_bytes is not None:
            size = page_bytes(len(self._decoder.layers), heads.keys, heads.size, model.dtype)
            limit = max(pages_for(max_len), whole_slabs(size, min(limit, most_bytes // size)))
        memory = PageMemory(
            layers=len(self._decoder.layers), heads=heads.keys, dim=heads.size, dtype=model.dtype,
            device=device, limit=limit, least=pages_for(max_len),
        )  # fmt: skip
        self.cache = PagedCache(memory, slots=slots, max_len=max_len, limit=limit)
        self._heads, self._memory = heads.queries, memory
        self.tile_rows = tile_rows(memory, heads.queries) if self._by_kernel else 1
        self._static = StaticStep(
            self._decoder, memory, slots=slots, pages=pages_for(max_len), graphs=device.type == "cuda",
            by_kernel=self._by_kernel, tile_rows=self.tile_rows,
        )  # fmt: skip
        # The cache's version and the rows for which `last_groups` was found.
        self._grouped: tuple[int, bytes] | None = None
        self.last_groups: list[Group] = []  # the groups of the last launched step
        self._pending: Step | None = None

    def prefill(self, requests: Sequence[Request], *, first_row: int) -> None:
        """Compute and cache all known tokens of each request except its last token.

        The requests have the rows from `first_row` on.
        """
        rows = [row for row, request in enumerate(requests) if request.reused < request.cached]
        if not rows:
            return
        ids_T, starts_B, counts_B = read_rests([requests[row] for row in rows])
        attention = PrefillAttention(
            self._memory,
            self.cache.tables[first_row + np.array(rows)],
            starts_B=starts_B,
            counts_B=counts_B,
            heads=self._heads,
            by_kernel=self._by_kernel,
        )
        ids = torch.from_numpy(ids_T).to(self._memory.device)
        self._decoder.prefill(ids, attention.positions_T, attention)

    def take_weights(self) -> None:
        """Use the model's new weights, which must lie at the addresses that captured CUDA graphs contain."""
        self._decoder.assert_in_place()

    def step(self, requests: Sequence[Request], columns: Columns) -> Step | None:
        """Launch a step of all rows that may sample another token; return the previous step, or None."""
        count = len(requests)
        rows = np.flatnonzero(columns.counters[:count] < columns.limits[:count])
        launched = self._launch(rows, requests, columns) if len(rows) else None
        due, self._pending = self._pending, launched
        return due

    def settle(self) -> Step | None:
        """Return the step that was launched last, if `step` has not returned it yet; otherwise None."""
        due, self._pending = self._pending, None
        return due

    def _launch(self, rows: NDArray[np.int64], requests: Sequence[Request], columns: Columns) -> Step:
        positions = columns.cached[rows]
        self.cache.extend(rows, positions + 1)
        truncated_B, options_BN = columns.truncated[rows], columns.options[rows]
        slots_B = find_slots(self.cache.tables, rows, positions)
        ints_B4 = np.stack((columns.ids[rows], columns.sources[rows], positions, slots_B), axis=1)
        uniforms_B = uniforms(columns.keys[rows], columns.counters[rows])
        floats = (uniforms_B[:, None], columns.processed[rows][:, None], options_BN)
        floats_BN = np.concatenate(floats, axis=1, dtype=np.float64)
        tables_BP = self.cache.tables[rows]
        launched = self._static.launch(
            ints_B4, floats_BN, tables_BP, truncates=bool(truncated_B.any()),
            groups=self._find_groups(rows, positions),
        )  # fmt: skip
        columns.sources[rows] = np.arange(len(rows))
        columns.advance(rows)
        of_rows = [requests[row] for row in rows]
        return Step(of_rows, launched, truncated_B, self._likeliest(of_rows, options_BN))

    def _find_groups(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> list[Group]:
        """Return the groups of the step's rows that share pages.

        The groups are found again only when the running rows have changed.
        """
        key = self.cache.version, rows.tobytes()
        if key != self._grouped:
            pairs = zip(rows.tolist(), positions.tolist(), strict=True)
            pages_B = [self.cache.full_pages(row, position) for row, position in pairs]
            self.last_groups, self._grouped = group_rows(pages_B, tile_rows=self.tile_rows), key
        return self.last_groups

    def _likeliest(self, requests: Sequence[Request], options_BN: NDArray[np.float64]) -> Likeliest | None:
        """Return the most likely tokens of each row, or None if no request asks for them.

        They must be read before the next step, which overwrites the logits. The step cannot be repeated, so
        if memory runs out, each row gets ().
        """
        counts = [request.extras.likeliest for request in requests]
        if not any(counts):
            return None
        try:
            settings = RowSettings.lean(options_BN, None, device=self._memory.device)
            return likeliest(self._static.logits(len(requests)), settings, counts=counts)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        log.warning("engine_leaves_out_likeliest_tokens", rows=len(requests), reason="out of memory")
        return [()] * len(requests)
