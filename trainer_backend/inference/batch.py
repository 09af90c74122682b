"""The running batch: which requests occupy which rows, their prefill, and one decode step for all of them."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer_backend.inference.cache import SlotCache
from trainer_backend.inference.prefixes import Prefixes, PrefixIndex
from trainer_backend.inference.protocol import SampledToken
from trainer_backend.inference.request import Request
from trainer_backend.inference.sampler import likeliest, sample, uniforms
from trainer_backend.models.layout import refuse_unsupported_attention
from trainer_backend.models.precision import tokens_for


class RunningBatch:
    """The rows of running requests. Row i of the cache belongs to `rows[i]`; there are no gaps.

    Not thread-safe: only the engine thread uses it, inside `torch.inference_mode()`. A call that raises
    (out of memory) changes nothing and may be repeated.
    """

    def __init__(self, model: PreTrainedModel, *, slots: int, max_len: int, kept_prefixes: int = 0) -> None:
        refuse_unsupported_attention(model.config, longest=max_len)
        self.model = model
        self.max_len = max_len
        # Stored, because `transformers` walks over all modules for each answer.
        self._device, self._dtype = model.device, model.dtype
        self._low = None if self._dtype == torch.float32 else self._dtype
        self._draws_on = drawing_device(model.device)
        self.rows: list[Request] = []
        self._cache = SlotCache(slots=slots, max_len=max_len, dtype=self._dtype)
        self.prefixes = Prefixes(self._cache, most=kept_prefixes)

    @property
    def free_slots(self) -> int:
        return self._cache.slots - len(self.rows)

    def to_prefill(self, request: Request) -> int:
        """Return how many of a prompt's tokens would need computation if it joined now."""
        return request.cached - self.prefixes.find(request.prefix).length

    def join(self, requests: Sequence[Request]) -> None:
        """Give rows to new requests: copy the cached part of their prompts, and prefill the rest.

        The last token of a prompt is left to the first decode step. So only one place samples, a prefill
        needs no logits, and no last positions of rows with different lengths have to be gathered.
        """
        matches = {request: self.prefixes.find(request.prefix) for request in requests}
        # Whole prompts first, then the longest remainders: each kind of prefill gets adjacent rows.
        in_order = sorted(requests, key=lambda request: _least_first(request, matches[request].length))
        self._cache.reserve(1 + max(request.cached for request in requests))
        for row, request in enumerate(in_order, start=len(self.rows)):
            request.reused = self.prefixes.fill(matches[request], row)
        fresh = sum(request.reused == 0 for request in in_order)
        self._prefill(in_order[:fresh], first_row=len(self.rows))
        partial = [request for request in in_order[fresh:] if request.reused < request.cached]
        self._prefill_rest(partial, first_row=len(self.rows) + fresh)
        for request in in_order:
            self.prefixes.runs(request.prefix, row=len(self.rows))
            self.rows.append(request)

    def step(self) -> list[SampledToken]:
        """Feed each row its next token; return the sampled next tokens, row by row."""
        logits_BV = self._decode().to(self._draws_on)
        samplings = [row.sampling for row in self.rows]
        keys_B = np.array([row.key for row in self.rows], dtype=np.uint64)
        counters_B = np.array([len(row.token_ids) for row in self.rows], dtype=np.uint64)
        truncates = any(sampling.is_truncated for sampling in samplings)
        # Without truncation both kinds are equal; they must not differ by a rounding that neighbours cause.
        processed = [row.extras.processed and row.sampling.is_truncated for row in self.rows]
        temperatures_B = self._column([sampling.temperature for sampling in samplings]).float()
        tokens_B, logprobs_B, mass_B = sample(
            logits_BV,
            temperatures_B=temperatures_B,
            top_ps_B=self._column([sampling.top_p for sampling in samplings]) if truncates else None,
            top_ks_B=self._column([sampling.top_k for sampling in samplings]) if truncates else None,
            uniforms_B=torch.from_numpy(uniforms(keys_B, counters_B)).to(self._draws_on),
            processed_B=self._column(processed) if any(processed) else None,
        )
        if mass_B is None:
            mass_B = torch.ones_like(logprobs_B, dtype=torch.float64)
        # Ids up to 2**53 and fp32 log-probs are exact in float64: one transfer from the device suffices.
        tokens, logprobs, masses = torch.stack((tokens_B.double(), logprobs_B.double(), mass_B)).tolist()
        counts = [row.extras.likeliest for row in self.rows]
        tops = likeliest(logits_BV, temperatures_B=temperatures_B, counts=counts) if any(counts) else None
        return [
            SampledToken(
                int(tokens[i]),
                logprobs[i],
                tops[i] if tops else (),
                max(0.0, 1.0 - masses[i]) if sampling.is_truncated and sampling.temperature > 0.0 else None,
            )
            for i, sampling in enumerate(samplings)
        ]

    def drop(self, index: int) -> None:
        """Free a row, keeping a copy of its prefix; the last row moves into the gap."""
        request = self.rows[index]
        self.prefixes.ends(request.prefix, index, request.cached_ids())
        last = self.rows.pop()
        if index < len(self.rows):
            self._cache.move_row(len(self.rows), index, last.cached)
            self.rows[index] = last
            self.prefixes.move(last.prefix, index)

    def drop_invalid(self, index: int) -> None:
        """Free a row with numbers that are not finite, and share none of it."""
        self.prefixes.unshare(self.rows[index].prefix)
        self._cache.clear_row(index)
        self.drop(index)

    def forget_prefixes(self) -> None:
        """Let no current row or copy seed a later request, because the weights change."""
        self.prefixes.forget(row.prefix for row in self.rows)

    def _prefill(self, requests: Sequence[Request], *, first_row: int) -> None:
        """Compute whole prompts, padded on the right to the longest."""
        length = max((request.cached for request in requests), default=0)
        if length == 0:
            return
        ids = [list(request.prompt_ids[:-1]) for request in requests]
        self._cache.begin_prefill(first_row=first_row, length=length)
        # No mask is needed: with padding on the right, causal attention never shows a pad to a token.
        self._forward(
            [row + [0] * (length - len(row)) for row in ids],
            position_ids=torch.arange(length, device=self._device)[None],
        )

    def _prefill_rest(self, requests: Sequence[Request], *, first_row: int) -> None:
        """Compute the part of each prompt after its cached prefix, padded on the right to the longest."""
        if not requests:
            return
        rests = [list(request.prompt_ids[request.reused : -1]) for request in requests]
        longest = max(map(len, rests))
        visible = 1 + max(request.cached for request in requests)
        starts_B = self._tensor([request.reused for request in requests])
        positions_BQ = starts_B[:, None] + torch.arange(longest, device=starts_B.device)
        # Pads go to a column without tokens: the one after the longest prompt.
        self._append(
            [rest + [0] * (longest - len(rest)) for rest in rests],
            positions_BQ.clamp(max=visible - 1),
            first_row=first_row,
            visible=visible,
        )

    def _decode(self) -> Tensor:
        return self._append(
            [[row.next_token] for row in self.rows],
            self._tensor([row.cached for row in self.rows])[:, None],
            first_row=0,
            visible=1 + max(row.cached for row in self.rows),
        )

    def _append(
        self, ids: Sequence[Sequence[int]], positions_BQ: Tensor, *, first_row: int, visible: int
    ) -> Tensor:
        """Feed Q tokens to each of B rows, with causal visibility.

        Return [B, V] logits of the last tokens.
        """
        columns_L = torch.arange(visible, device=positions_BQ.device)
        masked = torch.finfo(self._dtype).min
        mask_BQL = torch.where(columns_L <= positions_BQ[:, :, None], 0.0, masked).to(self._dtype)
        self._cache.begin_append(positions_BQ, first_row=first_row, visible=visible)
        return self._forward(ids, attention_mask=mask_BQL[:, None], position_ids=positions_BQ)

    def _forward(self, ids: Sequence[Sequence[int]], **positions: Tensor) -> Tensor:
        """Run the model; return [B, V] logits of each row's last token, and cache all keys and values."""
        low = self._low
        tokens = tokens_for(self.model, self._tensor(ids), low)
        with nullcontext() if low is None else torch.autocast(self._device.type, dtype=low):
            output = self.model(
                **tokens, **positions, past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
        logits_BV: Tensor = output.logits[:, -1]
        return logits_BV

    def _tensor(self, values: Sequence[object]) -> Tensor:
        return torch.tensor(values, device=self._device)

    def _column(self, values: Sequence[float]) -> Tensor:
        """Return one value per row on the sampling device."""
        return torch.tensor(values, device=self._draws_on)


def drawing_device(device: torch.device) -> torch.device:
    """Return the device for drawing tokens in float64: the model's, but the CPU for mps, which has none.

    There [B, V] logits travel to the CPU at each step: 0.6 MB per request for a vocabulary of 150,000.
    """
    return torch.device("cpu") if device.type == "mps" else device


def _least_first(request: Request, length: int) -> int:
    """Return a sort key: without a cached prefix first (by arrival), then by the length of the remainder."""
    return length - request.cached if length else -sys.maxsize


def first_of_siblings(requests: Sequence[Request], prefixes: Prefixes) -> tuple[list[Request], list[Request]]:
    """Split requests into those to prefill now, and those that can copy more from one of them afterwards."""
    first: list[Request] = []
    later: list[Request] = []
    index = PrefixIndex()
    for request in requests:
        if prefixes.enabled and index.longest(request.prefix).length > prefixes.find(request.prefix).length:
            later.append(request)
        else:
            first.append(request)
            index.add(request.prefix)
    return first, later
