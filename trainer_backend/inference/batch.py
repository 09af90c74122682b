"""The running batch: which requests occupy which rows, their prefill, and one decode step for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from trainer_backend.inference.prefixes import Prefixes, PrefixIndex
from trainer_backend.inference.protocol import SampledToken
from trainer_backend.inference.request import Request
from trainer_backend.inference.runner import runner_of
from trainer_backend.inference.sampler import RowSettings, likeliest, sample, uniforms
from trainer_backend.models.layout import refuse_unsupported_attention


class RunningBatch:
    """The rows of running requests. Row i of the cache belongs to `rows[i]`; there are no gaps.

    Not thread-safe: only the engine thread uses it, inside `torch.inference_mode()`. A call that raises
    (out of memory) changes nothing and may be repeated.
    """

    def __init__(self, model: PreTrainedModel, *, slots: int, max_len: int, kept_prefixes: int = 0) -> None:
        refuse_unsupported_attention(model.config, longest=max_len)
        self.max_len = max_len
        self._draws_on = drawing_device(model.device)
        self.rows: list[Request] = []
        self._columns = _Columns()
        self._settings: RowSettings | None = None  # made when the rows have changed
        self._runner = runner_of(model, slots=slots, max_len=max_len)
        self._cache = self._runner.cache
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
        in_order = sorted(requests, key=lambda request: _by_remainder(request, matches[request].length))
        self._cache.reserve(1 + max(request.cached for request in requests))
        for row, request in enumerate(in_order, start=len(self.rows)):
            request.reused = self.prefixes.fill(matches[request], row)
        self._runner.prefill(in_order, first_row=len(self.rows))
        for request in in_order:
            self.prefixes.runs(request.prefix, row=len(self.rows))
            self._columns.set(len(self.rows), request)
            self.rows.append(request)
        self._settings = None

    def step(self) -> "SampledTokens":
        """Feed each row its next token; return the sampled next tokens, row by row."""
        count, columns = len(self.rows), self._columns
        logits_BV = self._runner.decode(columns.ids[:count], columns.cached[:count]).to(self._draws_on)
        if self._settings is None:
            self._settings = self._row_settings()
        uniforms_B = uniforms(columns.keys[:count], columns.counters[:count])
        draw = sample(logits_BV, self._settings, torch.from_numpy(uniforms_B).to(self._draws_on))
        # Ids up to 2**53 and fp32 log-probs are exact in float64: one transfer from the device suffices.
        parts = [draw.tokens_B.double(), draw.logprobs_B.double()]
        host = torch.stack(parts if draw.mass_B is None else [*parts, draw.mass_B]).cpu().numpy()
        counts = [row.extras.likeliest for row in self.rows]
        tops = likeliest(logits_BV, self._settings, counts=counts) if any(counts) else None
        columns.advance(host[0])
        return SampledTokens(
            host[0].astype(np.int64).tolist(),
            host[1].tolist(),
            tops,
            None if draw.mass_B is None else self._lost_masses(host[2].tolist()),
        )

    def drop(self, index: int) -> None:
        """Free a row, keeping a copy of its prefix; the last row moves into the gap."""
        request = self.rows[index]
        self.prefixes.ends(request.prefix, index, request.cached_ids())
        last = self.rows.pop()
        self._settings = None
        if index < len(self.rows):
            self._cache.move_row(len(self.rows), index, last.cached)
            self._columns.move(len(self.rows), index)
            self.rows[index] = last
            self.prefixes.move(last.prefix, index)

    def drop_invalid(self, index: int) -> None:
        """Free a row with numbers that are not finite, and share none of it."""
        self.prefixes.unshare(self.rows[index].prefix)
        self._cache.clear_row(index)
        self.drop(index)

    def take_weights(self) -> None:
        """Compute with new weights: no current row or copy seeds a later request."""
        self._runner.take_weights()
        self.prefixes.forget(row.prefix for row in self.rows)

    def _row_settings(self) -> RowSettings:
        return RowSettings.of(
            [row.sampling for row in self.rows],
            processed=[row.extras.processed for row in self.rows],
            device=self._draws_on,
        )

    def _lost_masses(self, masses: list[float]) -> list[float | None]:
        """Return what truncation removed from each row; None for rows that it does not touch."""
        return [
            max(0.0, 1.0 - mass) if row.sampling.is_truncated and row.sampling.temperature > 0.0 else None
            for row, mass in zip(self.rows, masses, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One sampled token of each row, by columns: an object for each would cost more than the sampling.

    `likeliest` and `lost_masses` (see `SampledToken`) are None where no row has any.
    """

    ids: list[int]
    logprobs: list[float]
    likeliest: list[tuple[tuple[int, float], ...]] | None
    lost_masses: list[float | None] | None

    def token(self, row: int) -> SampledToken:
        """Return the token of a row."""
        return SampledToken(
            self.ids[row],
            self.logprobs[row],
            self.likeliest[row] if self.likeliest else (),
            self.lost_masses[row] if self.lost_masses else None,
        )


class _Columns:
    """What a step reads of the requests, by rows, so that no step builds it from the requests anew."""

    def __init__(self) -> None:
        self.ids, self.cached = np.zeros(64, dtype=np.int64), np.zeros(64, dtype=np.int64)
        self.keys, self.counters = np.zeros(64, dtype=np.uint64), np.zeros(64, dtype=np.uint64)

    def set(self, row: int, request: Request) -> None:
        if row == len(self.ids):
            self.ids, self.cached = np.resize(self.ids, 2 * row), np.resize(self.cached, 2 * row)
            self.keys, self.counters = np.resize(self.keys, 2 * row), np.resize(self.counters, 2 * row)
        self.ids[row], self.cached[row] = request.prompt_ids[-1], request.cached
        self.keys[row], self.counters[row] = request.key, len(request.token_ids)

    def move(self, source: int, target: int) -> None:
        for column in (self.ids, self.cached, self.keys, self.counters):
            column[target] = column[source]

    def advance(self, ids_B: NDArray[np.float64]) -> None:
        """Each row has one token more in the cache, and feeds the next id."""
        count = len(ids_B)
        self.ids[:count] = ids_B
        self.cached[:count] += 1
        self.counters[:count] += np.uint64(1)


def drawing_device(device: torch.device) -> torch.device:
    """Return the device for drawing tokens in float64: the model's, but the CPU for mps, which has none.

    There [B, V] logits travel to the CPU at each step: 0.6 MB per request for a vocabulary of 150,000.
    """
    return torch.device("cpu") if device.type == "mps" else device


def _by_remainder(request: Request, length: int) -> tuple[bool, bool, int]:
    """Return a sort key: whole prompts, those with a cached prefix, those that are cached; the longest first.

    Rows of like lengths are adjacent then, and attention pads them to the longest of few.
    """
    return length == request.cached, length > 0, length - request.cached


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
