"""Run forward passes of the running batch, by our own decoder or, for other models, by `transformers`."""

from collections.abc import Iterator, Sequence

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from trainer_backend.inference.cache import SlotCache
from trainer_backend.inference.decoder import Decoder, unsupported_because
from trainer_backend.inference.layer_runner import LayerRunner, Pass
from trainer_backend.inference.paged_runner import BY_DEVICE, PagedRunner, PageLimits
from trainer_backend.inference.request import Request, read_rests
from trainer_backend.inference.row_attention import RowAttentions
from trainer_backend.inference.small_pass import small_pass
from trainer_backend.models.cpu_kernels import kernels_for
from trainer_backend.models.kinds import read_head_dim, why_not_by_position
from trainer_backend.models.part_attention import why_no_parts
from trainer_backend.models.routers import Routers

log = structlog.get_logger(__name__)

# On a CPU, prompts are prefilled together up to this number of tokens, so that activations stay in the CPU's
# cache.
CHUNK_TOKENS = 512
# A call of attention costs as much time as reading this many elements of keys and values (measured on a CPU).
# Rows attend in one call, padded to the longest row, unless the padding costs more than another call.
CALL_NUMBERS = 2**18


def choose_runner(
    model: PreTrainedModel,
    *,
    slots: int,
    max_len: int,
    kept: int = 0,
    pages: PageLimits = BY_DEVICE,
    routers: Routers | None = None,
) -> "DecoderRunner | TransformersRunner | LayerRunner | PagedRunner":
    """Return the runner of a model: our own decoder if it supports the model, else `transformers`.

    If `transformers` is used, the reason is logged, and the runner records the experts that `routers` choose.
    A paged cache has room for `slots` rows and `kept` copies of prefixes.
    """
    layers = why_not_by_position(model, longest=max_len)
    if layers is not None:
        runner = LayerRunner(model, slots=slots, max_len=max_len, routers=routers)
        _log_choice(model, f"its {layers}", cache="by layer", cost=runner.cost)
        return runner
    reason = unsupported_because(model)
    if reason is None and pages.wanted_on(model.device):
        return PagedRunner(model, slots=slots, max_len=max_len, kept=kept, most_bytes=pages.most_bytes)
    if reason is None:
        return DecoderRunner(model, slots=slots, max_len=max_len)
    _log_choice(model, reason, cache="by position", cost="rows are padded to the longest")
    return TransformersRunner(model, slots=slots, max_len=max_len, routers=routers)


def _log_choice(model: PreTrainedModel, reason: str, **facts: str) -> None:
    log.warning("engine_decodes_by_transformers", model=type(model).__name__, reason=reason, **facts)


class DecoderRunner:
    """Runs our own decoder over flat lists of tokens.

    A call that raises because memory ran out changes no running row, and may be repeated.
    """

    def __init__(self, model: PreTrainedModel, *, slots: int, max_len: int) -> None:
        cpu = kernels_for(
            model.device, in_float32=model.dtype == torch.float32, head_dim=read_head_dim(model.config)
        )
        self._decoder = Decoder(model, max_len=max_len, cpu=cpu)
        self._device = model.device
        shares = self._device.type == "cpu" and model.dtype == torch.float32
        if shares and (reason := why_no_parts()) is not None:
            shares = False
            log.warning("engine_shares_no_trunks", reason=reason)
        self.cache = SlotCache(slots=slots, max_len=max_len, dtype=model.dtype, shares=shares)
        heads = self._decoder.heads
        self._attentions = RowAttentions(
            self.cache,
            kv_heads=heads.keys,
            device=self._device,
            most_waste=CALL_NUMBERS // (2 * heads.keys * heads.size),
            cpu=cpu,
        )
        self.small = small_pass(self._decoder, self.cache, cpu)

    def prefill(self, requests: Sequence[Request], *, first_row: int) -> None:
        """Compute keys and values of each prompt except its last token, in the rows from `first_row` on.

        Each row already contains the first `reused` tokens of its prompt. The requests must be sorted: first
        requests without reused tokens, then requests with some, then requests that need no computation.
        """
        for chunk in self._chunks(_to_compute(requests)):
            ids_T, starts_B, counts_B = read_rests(chunk)
            if self.small is not None and self.small.pays(starts_B, counts_B):
                self.small.prefill(ids_T, first_row=first_row, starts_B=starts_B, counts_B=counts_B)
                first_row += len(chunk)
                continue
            attention = self._attentions.prefill(first_row=first_row, starts_B=starts_B, counts_B=counts_B)
            self._decoder.prefill(self._on_device(ids_T), attention.positions_T, attention)
            first_row += len(chunk)

    def decode(self, ids_B: NDArray[np.int64], cached_B: NDArray[np.int64]) -> Tensor:
        """Feed one token to each of the first B rows and return logits [B, V].

        `cached_B` is the number of tokens of each row before this call.
        """
        if self.small is not None:
            return torch.from_numpy(self.small.logits(ids_B, cached_B))
        attention = self._attentions.decode(cached_B)
        return self._decoder.logits(self._on_device(ids_B), attention.positions_T, attention)

    def take_weights(self) -> None:
        """Compute with the model's new weights from now on."""
        self._decoder.assert_in_place()
        self.cache.forget_trunks()
        if self.small is not None:
            self.small.take_weights()

    def _chunks(self, requests: Sequence[Request]) -> Iterator[Sequence[Request]]:
        most = CHUNK_TOKENS if self._device.type == "cpu" else sum(request.cached for request in requests)
        first, tokens = 0, 0
        for number, request in enumerate(requests):
            needed = request.cached - request.reused
            if tokens + needed > most and number > first:
                yield requests[first:number]
                first, tokens = number, 0
            tokens += needed
        if requests:
            yield requests[first:]

    def _on_device(self, numbers: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(numbers).to(self._device)


class TransformersRunner:
    """Runs models with full attention by `transformers`, in padded rows; used like `DecoderRunner`."""

    def __init__(
        self, model: PreTrainedModel, *, slots: int, max_len: int, routers: Routers | None = None
    ) -> None:
        self._pass = Pass(model, routers)
        self.experts = self._pass.experts  # of each row; they may end with those of padding tokens
        self._device, self._dtype = self._pass.device, self._pass.dtype
        self.cache = SlotCache(slots=slots, max_len=max_len, dtype=self._dtype)

    def prefill(self, requests: Sequence[Request], *, first_row: int) -> None:
        requests = _to_compute(requests)
        whole = sum(request.reused == 0 for request in requests)
        if whole:
            self._prefill_whole(requests[:whole], first_row=first_row)
            self._note_experts(requests[:whole])
        if requests[whole:]:
            self._prefill_rest(requests[whole:], first_row=first_row + whole)
            self._note_experts(requests[whole:])

    def _note_experts(self, requests: Sequence[Request]) -> None:
        for request, experts_LW in zip(requests, self.experts(), strict=False):
            if experts_LW is not None:
                request.note_experts(experts_LW[: request.cached - request.reused])

    def decode(self, ids_B: NDArray[np.int64], cached_B: NDArray[np.int64]) -> Tensor:
        ids_B1, positions_B1 = (torch.from_numpy(x)[:, None].to(self._device) for x in (ids_B, cached_B))
        return self._append(ids_B1, positions_B1, first_row=0, visible=1 + int(cached_B.max()))

    def take_weights(self) -> None:
        """Do nothing: a pass reads the model's own weights."""

    def _prefill_whole(self, requests: Sequence[Request], *, first_row: int) -> None:
        """Prefill prompts without a cached prefix, padded on the right to the longest one."""
        length = max(request.cached for request in requests)
        ids_BL = self._padded([request.prompt_ids[:-1] for request in requests])
        self.cache.begin_prefill(first_row=first_row, length=length)
        # No mask is needed: with padding on the right, causal attention hides the padding from all tokens.
        self._pass(ids_BL, self.cache, position_ids=torch.arange(length, device=self._device)[None])

    def _prefill_rest(self, requests: Sequence[Request], *, first_row: int) -> None:
        """Prefill the part of each prompt after its cached prefix, padded on the right to the longest one."""
        ids_BQ = self._padded([request.prompt_ids[request.reused : -1] for request in requests])
        visible = 1 + max(request.cached for request in requests)
        starts_B1 = torch.tensor([[request.reused] for request in requests], device=self._device)
        positions_BQ = starts_B1 + torch.arange(ids_BQ.shape[1], device=self._device)
        # Padding is written to a column without tokens: the column after the longest prompt.
        self._append(ids_BQ, positions_BQ.clamp(max=visible - 1), first_row=first_row, visible=visible)

    def _append(self, ids_BQ: Tensor, positions_BQ: Tensor, *, first_row: int, visible: int) -> Tensor:
        """Feed Q tokens to each of B rows with a causal mask; return the logits [B, V] of the last tokens."""
        columns_L = torch.arange(visible, device=positions_BQ.device)
        masked = torch.finfo(self._dtype).min
        mask_BQL = torch.where(columns_L <= positions_BQ[:, :, None], 0.0, masked).to(self._dtype)
        self.cache.begin_append(positions_BQ, first_row=first_row, visible=visible)
        return self._pass(ids_BQ, self.cache, attention_mask=mask_BQL[:, None], position_ids=positions_BQ)

    def _padded(self, rows: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, rows))
        return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self._device)


def _to_compute(requests: Sequence[Request]) -> list[Request]:
    return [request for request in requests if request.reused < request.cached]
