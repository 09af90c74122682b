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
from trainer_backend.inference.protocol import Sampled
from trainer_backend.inference.request import Request
from trainer_backend.inference.sampler import likeliest, sample, uniforms
from trainer_backend.models.layout import refuse_unsupported_attention
from trainer_backend.models.precision import tokens_for


class RunningBatch:
    """Row i of the cache belongs to `rows[i]`; rows are always compact, so a step works on slices.

    Not thread-safe: the engine thread alone uses it, inside `torch.inference_mode()`. A call that raises
    (out of memory) leaves everything as it was, and may be repeated.
    """

    def __init__(self, model: PreTrainedModel, *, slots: int, max_len: int, kept_prefixes: int = 0) -> None:
        refuse_unsupported_attention(model.config, longest=max_len)
        self.model = model
        self.max_len = max_len
        # Asked once: `transformers` walks over all modules each time.
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
        """How many of a prompt's tokens would have to be computed if it joined now."""
        return request.cached - self.prefixes.find(request.held).length

    def join(self, requests: Sequence[Request]) -> None:
        """Give rows to new requests: copy what is known of their prompts, and prefill the rest.

        The last token of a prompt is left for the first decode step. So sampling has one home, a prefill
        needs no logits, and rows of different lengths need no gathering of their last positions.
        """
        known = {request: self.prefixes.find(request.held) for request in requests}
        # Whole prompts first, then those with most to add: each kind of prefill has rows beside one another.
        ordered = sorted(requests, key=lambda request: _least_first(request, known[request].length))
        self._cache.reserve(1 + max(request.cached for request in requests))
        for row, request in enumerate(ordered, start=len(self.rows)):
            request.reused = self.prefixes.fill(known[request], row)
        fresh = sum(request.reused == 0 for request in ordered)
        self._prefill(ordered[:fresh], first_row=len(self.rows))
        partly_known = [request for request in ordered[fresh:] if request.reused < request.cached]
        self._prefill_rest(partly_known, first_row=len(self.rows) + fresh)
        for request in ordered:
            self.prefixes.runs(request.held, row=len(self.rows))
            self.rows.append(request)

    def step(self) -> list[Sampled]:
        """Feed each row its next token; returns the token sampled after it, row by row."""
        logits_BV = self._decode().to(self._draws_on)
        samplings = [row.sampling for row in self.rows]
        keys_B = np.array([row.key for row in self.rows], dtype=np.uint64)
        counters_B = np.array([len(row.token_ids) for row in self.rows], dtype=np.uint64)
        truncates = any(sampling.is_truncated for sampling in samplings)
        # Of an untruncated row both are the same, and must not differ by a rounding with its neighbours.
        processed = [row.extras.processed and row.sampling.is_truncated for row in self.rows]
        temperatures_B = self._column([sampling.temperature for sampling in samplings]).float()
        tokens_B, logprobs_B, kept_B = sample(
            logits_BV,
            temperatures_B=temperatures_B,
            top_ps_B=self._column([sampling.top_p for sampling in samplings]) if truncates else None,
            top_ks_B=self._column([sampling.top_k for sampling in samplings]) if truncates else None,
            uniforms_B=torch.from_numpy(uniforms(keys_B, counters_B)).to(self._draws_on),
            processed_B=self._column(processed) if any(processed) else None,
        )
        if kept_B is None:
            kept_B = torch.ones_like(logprobs_B, dtype=torch.float64)
        # Ids up to 2**53 and fp32 log-probs are exact in float64: one transfer from the device for all.
        tokens, logprobs, kept = torch.stack((tokens_B.double(), logprobs_B.double(), kept_B)).tolist()
        wanted = [row.extras.likeliest for row in self.rows]
        tops = likeliest(logits_BV, temperatures_B=temperatures_B, wanted=wanted) if any(wanted) else None
        return [
            Sampled(
                int(tokens[i]),
                logprobs[i],
                tops[i] if tops else (),
                max(0.0, 1.0 - kept[i]) if sampling.is_truncated and sampling.temperature > 0.0 else None,
            )
            for i, sampling in enumerate(samplings)
        ]

    def drop(self, index: int) -> None:
        """Free a row, keeping a copy of its prefix; the last row moves into the gap."""
        request = self.rows[index]
        self.prefixes.ends(request.held, index, request.cached_ids())
        last = self.rows.pop()
        if index < len(self.rows):
            self._cache.move_row(len(self.rows), index, last.cached)
            self.rows[index] = last
            self.prefixes.moved(last.held, index)

    def drop_broken(self, index: int) -> None:
        """Free a row whose numbers are not finite; nothing of them stays for anyone."""
        self.prefixes.unshare(self.rows[index].held)
        self._cache.clear_row(index)
        self.drop(index)

    def forget_prefixes(self) -> None:
        """The weights change: no row or copy of now may seed a later request."""
        self.prefixes.forget(row.held for row in self.rows)

    def _prefill(self, requests: Sequence[Request], *, first_row: int) -> None:
        """Whole prompts, padded on the right to the longest."""
        length = max((request.cached for request in requests), default=0)
        if length == 0:
            return
        ids = [list(request.prompt_ids[:-1]) for request in requests]
        self._cache.begin_prefill(first_row=first_row, length=length)
        # No mask: with padding on the right, causal attention never shows a pad to a token.
        self._forward(
            [row + [0] * (length - len(row)) for row in ids],
            position_ids=torch.arange(length, device=self._device)[None],
        )

    def _prefill_rest(self, requests: Sequence[Request], *, first_row: int) -> None:
        """What follows the known part of each prompt, padded on the right to the longest such rest."""
        if not requests:
            return
        rests = [list(request.prompt_ids[request.reused : -1]) for request in requests]
        longest = max(map(len, rests))
        visible = 1 + max(request.cached for request in requests)
        starts_B = self._tensor([request.reused for request in requests])
        positions_BQ = starts_B[:, None] + torch.arange(longest, device=starts_B.device)
        # Pads are written where no prompt has a token: in the column after the longest of them.
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
        """Feed Q tokens to each of B rows, each seeing its row up to itself; [B, V] logits of the last."""
        columns_L = torch.arange(visible, device=positions_BQ.device)
        hidden = torch.finfo(self._dtype).min
        mask_BQL = torch.where(columns_L <= positions_BQ[:, :, None], 0.0, hidden).to(self._dtype)
        self._cache.begin_append(positions_BQ, first_row=first_row, visible=visible)
        return self._forward(ids, attention_mask=mask_BQL[:, None], position_ids=positions_BQ)

    def _forward(self, ids: Sequence[Sequence[int]], **positions: Tensor) -> Tensor:
        """[B, V] logits of each row's last token; keys and values of all go into the cache."""
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
        """What sampling needs of each row."""
        return torch.tensor(values, device=self._draws_on)


def drawing_device(device: torch.device) -> torch.device:
    """Where tokens are drawn, in float64: on the device, but for mps, which has none.

    There [B, V] logits travel to the CPU at each step: 0.6 MB a request of a vocabulary of 150,000.
    """
    return torch.device("cpu") if device.type == "mps" else device


def _least_first(request: Request, known: int) -> int:
    """Sorts into: nothing known (in order of arrival), then the longest rest first, nothing left last."""
    return known - request.cached if known else -sys.maxsize


def first_of_siblings(requests: Sequence[Request], prefixes: Prefixes) -> tuple[list[Request], list[Request]]:
    """Those to prefill now, and those who can copy more from one of them than is known before."""
    first: list[Request] = []
    later: list[Request] = []
    coming = PrefixIndex()
    for request in requests:
        if prefixes.enabled and coming.longest(request.held).length > prefixes.find(request.held).length:
            later.append(request)
        else:
            first.append(request)
            coming.add(request.held)
    return first, later
