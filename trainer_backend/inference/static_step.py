"""Run a decode step and its sampling over buffers with fixed addresses, so that a CUDA graph can replay both.

The host launches a step and reads its tokens later. The device itself feeds the sampled tokens to the next
step. So the host may launch the next step before it reads the tokens, and the device does not wait for the
host.

Batches are padded to a bucket size. Padding rows write nothing to the cache and attend to nothing, and their
samples are discarded. There is a graph for each bucket size, with and without truncation, and with and
without shared pages (`page_tiles`). A graph is captured when a step first needs it. If the capture fails, the
log says why, and the step runs without a graph, as on a CPU. If memory was short, a later step tries to
capture the graph again.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_backend.inference.decoder import Decoder
from trainer_backend.inference.page_memory import PageMemory
from trainer_backend.inference.page_tiles import Group, Tiles, fill_tiles, most_tiles
from trainer_backend.inference.paged_pass import DecodeAttention
from trainer_backend.inference.pages import PAGE
from trainer_backend.inference.sampler import OPTIONS, PLAIN_OPTIONS, RowSettings, sample
from trainer_backend.models.folder import is_out_of_memory

log = structlog.get_logger(__name__)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_STEP = 8
# The number of columns of `floats_BN`: the uniform number, whether log-probs are processed, the options.
_FLOATS = 2 + len(OPTIONS)
# After a capture ran out of memory, the number of steps before the next capture. By then, requests may have
# ended.
PATIENCE = 256


def buckets(slots: int) -> list[int]:
    """Return the bucket sizes: 1, 2, 4, the multiples of 8 below `slots`, and `slots`."""
    return sorted({bucket for bucket in (1, 2, 4, *range(_STEP, slots, _STEP)) if bucket < slots} | {slots})


class _Kind(NamedTuple):
    """The key of a graph: the bucket size, whether any row truncates, and whether rows share pages."""

    rows: int
    truncates: bool
    shares: bool


@dataclass(frozen=True, slots=True)
class Launched:
    rows: int
    host: Tensor
    done: torch.cuda.Event | None

    def read(self) -> NDArray[np.float64]:
        """Wait for the step, and return each row's id, log-prob and mass that truncation kept, [B, 3].

        The array is a view of a host buffer; the second launch after the launch of this step overwrites it.
        """
        if self.done is not None:
            self.done.synchronize()
        return self.host[: self.rows].numpy()


class _Buffers:
    """One set of host buffers. For a GPU they are pinned, so that copies overlap with the host's work."""

    def __init__(self, slots: int, pages: int, tile_rows: int, *, pinned: bool) -> None:
        self.ints = torch.zeros((slots, 4), dtype=torch.int64, pin_memory=pinned)
        self.floats = torch.zeros((slots, _FLOATS), dtype=torch.float64, pin_memory=pinned)
        self.tables = torch.zeros((slots, pages), dtype=torch.int32, pin_memory=pinned)
        self.tiles = _tiles(slots, tile_rows, torch.device("cpu"), pinned=pinned)
        self.out = torch.zeros((slots, 3), dtype=torch.float64, pin_memory=pinned)

    def fill(self, ints_B4: Ints, floats_BN: Floats, tables_BP: NDArray[np.int32], bucket: int) -> None:
        count, ints, floats = len(ints_B4), self.ints.numpy(), self.floats.numpy()
        ints[:count], floats[:count], self.tables.numpy()[:count] = ints_B4, floats_BN, tables_BP
        ints[count:bucket] = (0, -1, -1, -1)
        floats[count:bucket] = (0.0, 0.0, *PLAIN_OPTIONS)


def _tiles(slots: int, tile_rows: int, device: torch.device, *, pinned: bool = False) -> Tiles:
    rows_NM, shared_B = (
        torch.zeros(shape, dtype=torch.int32, device=device, pin_memory=pinned)
        for shape in ((most_tiles(slots), tile_rows), (slots,))
    )
    return Tiles(rows_NM, shared_B)


class StaticStep:
    """Runs decode steps of up to `slots` rows with at most `pages` pages each, for the engine thread only.

    `graphs` says whether to capture graphs, which needs a CUDA device. `by_kernel` says whether to sample by
    Triton kernels (`kernels_are_here`) if no row truncates. `tile_rows` is the size of a tile (`page_tiles`).
    """

    def __init__(
        self,
        decoder: Decoder,
        memory: PageMemory,
        *,
        slots: int,
        pages: int,
        graphs: bool,
        by_kernel: bool,
        tile_rows: int = 1,
    ) -> None:
        device = memory.device
        self._by_kernel = by_kernel
        self._decoder, self._memory = decoder, memory
        # The kinds of sampling, without and with truncation, for which graphs are captured.
        self._graphs = {False, True} if graphs else set[bool]()
        self._buckets = buckets(slots)
        on_gpu = device.type == "cuda"
        # Two sets: one is filled while the copies from the other may still run.
        self._hosts = [_Buffers(slots, pages, tile_rows, pinned=on_gpu) for _ in range(2)]
        self._events = [torch.cuda.Event() if on_gpu else None for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 0
        self._ints_SN = torch.zeros((slots, 4), dtype=torch.int64, device=device)
        self._floats_SN = torch.zeros((slots, _FLOATS), dtype=torch.float64, device=device)
        self._tables_SP = torch.zeros((slots, pages), dtype=torch.int32, device=device)
        self._tiles = _tiles(slots, tile_rows, device)
        self._tokens_S = torch.zeros(slots, dtype=torch.int64, device=device)
        self._out_SN = torch.zeros((slots, 3), dtype=torch.float64, device=device)
        self._captured: dict[_Kind, torch.cuda.CUDAGraph] = {}
        self._without = 0  # steps to run before the next attempt to capture
        self._logits_SV: Tensor | None = None  # of the step launched last
        self._pool: Any = None  # the memory pool that the graphs share

    def launch(
        self,
        ints_B4: Ints,
        floats_BN: Floats,
        tables_BP: NDArray[np.int32],
        *,
        truncates: bool,
        groups: Sequence[Group] = (),
    ) -> Launched:
        """Launch a step. At most two launched steps, this one included, may be unread.

        Args:
            ints_B4: the columns are: the token to feed; the row of the last step whose sampled token is fed
                instead (-1: none); the position of the token; the slot for its keys and values.
            floats_BN: the columns are: a uniform number in [0, 1); whether log-probs are taken after
                truncation; one column for each of OPTIONS.
            tables_BP: the pages of each row.
            truncates: whether any row truncates.
            groups: the groups of rows that share pages (`page_tiles.group_rows`).
        """
        bucket = self._buckets[bisect_left(self._buckets, len(ints_B4))]
        host, event = self._hosts[self._turn], self._events[self._turn]
        host.fill(ints_B4, floats_BN, tables_BP, bucket)
        for device, source in (
            (self._ints_SN, host.ints),
            (self._floats_SN, host.floats),
            (self._tables_SP, host.tables),
        ):
            device[:bucket].copy_(source[:bucket], non_blocking=True)
        if groups:
            fill_tiles(groups, *(tensor.numpy() for tensor in host.tiles), page=PAGE)
            for tensor, filled in zip(self._tiles, host.tiles, strict=True):
                tensor.copy_(filled, non_blocking=True)
        self._run(_Kind(bucket, truncates, bool(groups)))
        host.out[:bucket].copy_(self._out_SN[:bucket], non_blocking=True)
        if event is not None:
            event.record()
        self._turn ^= 1  # only now: after a failed launch, the next one must not overwrite an unread step
        return Launched(len(ints_B4), host.out, event)

    def logits(self, rows: int) -> Tensor:
        """Return the logits [B, V] of the last launched step."""
        assert self._logits_SV is not None, "no step was launched"
        return self._logits_SV[:rows]

    def _run(self, kind: _Kind) -> None:
        self._without = max(0, self._without - 1)
        if kind not in self._captured and kind.truncates in self._graphs and not self._without:
            self._try_to_capture(kind)
        if kind in self._captured:
            self._captured[kind].replay()
        else:
            self._compute(kind)

    def _compute(self, kind: _Kind) -> None:
        bucket, truncates = kind.rows, kind.truncates
        ids, sources, positions, slots = self._ints_SN[:bucket].unbind(1)
        floats = self._floats_SN[:bucket]
        uniforms_B = floats[:, 0].contiguous()
        fed_B = torch.where(sources >= 0, self._tokens_S[sources.clamp(min=0)], ids)
        tiles = None
        if kind.shares:
            tiles = Tiles(self._tiles.rows_NM[: most_tiles(bucket)], self._tiles.shared_B[:bucket])
        attention = DecodeAttention(
            self._memory, slots.contiguous(), self._tables_SP[:bucket], (positions + 1).int(), tiles
        )
        logits_BV = self._decoder.logits(fed_B, positions.clamp(min=0), attention)
        settings = RowSettings.of(floats[:, 2:], floats[:, 1] > 0.0 if truncates else None)
        if self._by_kernel and not truncates:
            from trainer_backend.inference.sampler_kernel import draw_tokens

            draw = draw_tokens(logits_BV, settings, uniforms_B)
        else:
            draw = sample(logits_BV, settings, uniforms_B)
        self._keep(logits_BV)
        self._tokens_S[:bucket] = draw.tokens_B
        # Ids up to 2**53 and fp32 log-probs are exact in float64: one transfer suffices.
        self._out_SN[:bucket, 0] = draw.tokens_B.double()
        self._out_SN[:bucket, 1] = draw.logprobs_B.double()
        if draw.mass_B is not None:
            self._out_SN[:bucket, 2] = draw.mass_B

    def _keep(self, logits_BV: Tensor) -> None:
        """Copy logits to a buffer that all graphs share, so that the graphs need no buffers of their own.

        Each step runs once before its capture, so the buffer is never allocated during a capture.
        """
        if self._logits_SV is None:
            self._logits_SV = logits_BV.new_empty((self._buckets[-1], logits_BV.shape[1]))
        self._logits_SV[: len(logits_BV)] = logits_BV

    def _try_to_capture(self, kind: _Kind) -> None:
        """Capture the graph of a step, or log why the capture fails.

        If memory is short, a later step tries again. After any other failure, no further graph is captured
        for steps with the same `truncates`.
        """
        tokens_S = self._tokens_S.clone()
        try:
            self._captured[kind] = self._capture(kind, tokens_S)
        except RuntimeError as error:
            self._tokens_S.copy_(tokens_S)
            reason = str(error).partition("\n")[0]
            log.warning("engine_runs_without_graph", reason=reason, **kind._asdict())
            if is_out_of_memory(error):
                self._without = PATIENCE
            else:
                self._graphs.discard(kind.truncates)

    def _capture(self, kind: _Kind, tokens_S: Tensor) -> torch.cuda.CUDAGraph:
        """Run a step once, so that everything is compiled, and then capture it in a graph.

        The first run overwrites the tokens that it feeds. They are restored from `tokens_S` for the replay.
        """
        self._compute(kind)
        self._tokens_S.copy_(tokens_S)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as a learner's, may allocate memory during the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._compute(kind)
        self._pool = self._pool or graph.pool()
        return graph
