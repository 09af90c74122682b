"""Manage the running batch: one cache row per request, the prefill of prompts, and joint decode steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from trainer_backend.inference.actor import SampledToken
from trainer_backend.inference.cache import RowCache
from trainer_backend.inference.layer_runner import LayerRunner
from trainer_backend.inference.paged_runner import BY_DEVICE, Likeliest, PagedRunner, PageLimits, Step
from trainer_backend.inference.pages import choose_victim
from trainer_backend.inference.prefixes import NOTHING, Prefix, Prefixes, PrefixIndex, mark_at
from trainer_backend.inference.request import Request
from trainer_backend.inference.row_columns import Columns
from trainer_backend.inference.runner import DecoderRunner, TransformersRunner, choose_runner
from trainer_backend.inference.sampler import TEMPERATURE, RowSettings, likeliest, sample, uniforms
from trainer_backend.inference.small_pass import SmallPass
from trainer_backend.models.kinds import refuse_rotations_by_length
from trainer_backend.models.routers import Routers


class RunningBatch:
    """The batch of running requests. The request `rows[i]` has row i of the cache.

    Rows are numbered without gaps. Only the engine thread uses the batch, inside
    `torch.inference_mode()`. A call that raises because memory ran out changes nothing and may be repeated.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        max_len: int,
        kept_prefixes: int = 0,
        pages: PageLimits = BY_DEVICE,
        routers: Routers | None = None,
    ) -> None:
        refuse_rotations_by_length(model.config, longest=max_len)
        self.max_len = max_len
        self._draws_on = drawing_device(model.device)
        self.rows: list[Request] = []
        self._columns = Columns()
        self._settings: RowSettings | None = None  # None: the rows have changed since the last step
        self._runner = choose_runner(
            model, slots=slots, max_len=max_len, kept=kept_prefixes, pages=pages, routers=routers
        )
        self.cache: RowCache = self._runner.cache
        # Whether a request that does not fit in memory now may fit once other rows have ended.
        self.can_wait = isinstance(self._runner, PagedRunner)
        can_go_on = not isinstance(self._runner, LayerRunner) or self._runner.goes_on
        self.prefixes = Prefixes(self.cache, most=kept_prefixes if can_go_on else 0)
        self._is_full = False

    @property
    def free_slots(self) -> int:
        """Return how many new requests may join. After `wait`, the number is 0 until a row ends."""
        return 0 if self._is_full else self.cache.slots - len(self.rows)

    def to_prefill(self, request: Request) -> int:
        """Return how many prompt tokens would have to be prefilled if the request joined now."""
        return request.cached - self.prefixes.find(request.prefix).length

    def join(self, requests: Sequence[Request]) -> None:
        """Give rows to new requests: copy the cached part of each prompt, and prefill its other tokens.

        The last token of a prompt is not prefilled: the next decode step feeds it to the model, like a
        sampled token. So a prefill computes no logits, and only decode steps sample.
        """
        matches = {request: self.prefixes.find(request.prefix) for request in requests}

        def order(request: Request) -> tuple[bool, bool, int]:
            """Return a sort key: cached part (none, some, all), then the tokens to prefill, most first."""
            length = matches[request].length
            return length == request.cached, length > 0, length - request.cached

        in_order = sorted(requests, key=order)
        first_row = len(self.rows)
        try:
            for row, request in enumerate(in_order, start=first_row):
                match = matches[request]
                request.reused = self.prefixes.fill(match, row, room=1 + request.cached)
                request.lost = match.length + match.lost - request.reused
                request.begin_experts(match.prefix)
                request.marks |= {match.mark} - {0}
            if isinstance(self._runner, LayerRunner):
                self._runner.prefill(in_order, first_row=first_row, keep=self._mark)
            else:
                self._runner.prefill(in_order, first_row=first_row)
        except RuntimeError:
            for row in range(first_row, first_row + len(in_order)):
                self.cache.close_row(row)
            raise
        for request in in_order:
            self.prefixes.start_row(request.prefix, row=len(self.rows))
            self._columns.set(len(self.rows), request)
            self.rows.append(request)
        self._settings = None

    def _mark(self, request: Request, length: int, row: int) -> None:
        self.prefixes.mark(Prefix(request.cached_ids()[:length], request.experts), row)

    def step(self) -> "SampledTokens | None":
        """Feed each row its next token, and return the sampled tokens.

        A paged runner launches this step, but returns the tokens of the previous step, or None if there was
        no previous step. Some of these tokens may belong to rows that have ended since.
        """
        if isinstance(self._runner, PagedRunner):
            return self._read(self._runner.step(self.rows, self._columns))
        return self._step_now(self._runner)

    def settle(self) -> "SampledTokens | None":
        """Wait for the step that a paged runner has launched; return its tokens, or None without a step."""
        return self._read(self._runner.settle()) if isinstance(self._runner, PagedRunner) else None

    def _read(self, step: Step | None) -> "SampledTokens | None":
        if step is None:
            return None
        return SampledTokens.of(step.requests, step.launched.read(), step.likeliest, step.truncated_B)

    def _step_now(self, runner: DecoderRunner | TransformersRunner | LayerRunner) -> "SampledTokens":
        count, columns = len(self.rows), self._columns
        uniforms_B = uniforms(columns.keys[:count], columns.counters[:count])
        if isinstance(runner, DecoderRunner) and runner.small is not None and self._is_plain():
            return self._draw_small(runner.small, uniforms_B)
        logits_BV = runner.decode(columns.ids[:count], columns.cached[:count]).to(self._draws_on)
        if self._settings is None:
            processed = columns.processed[:count] if columns.truncated[:count].any() else None
            self._settings = RowSettings.lean(columns.options[:count], processed, device=self._draws_on)
        draw = sample(logits_BV, self._settings, torch.from_numpy(uniforms_B).to(self._draws_on))
        # Ids up to 2**53 and fp32 log-probs are exact in float64: one transfer from the device suffices.
        parts = [draw.tokens_B.double(), draw.logprobs_B.double()]
        host = torch.stack(parts if draw.mass_B is None else [*parts, draw.mass_B], 1).cpu().numpy()
        counts = [row.extras.likeliest for row in self.rows]
        tops = likeliest(logits_BV, self._settings, counts=counts) if any(counts) else None
        if not isinstance(runner, DecoderRunner):  # models that DecoderRunner supports have no experts
            for request, experts_1W in zip(self.rows, runner.experts(), strict=False):
                request.note_experts(experts_1W)
        columns.ids[:count] = host[:, 0]
        columns.advance(slice(count))
        return SampledTokens.of(list(self.rows), host, tops, columns.truncated[:count])

    def _is_plain(self) -> bool:
        """Return whether every row samples without truncation and reports only the sampled tokens."""
        is_truncated = self._columns.truncated[: len(self.rows)].any()
        return not is_truncated and not any(row.extras.likeliest for row in self.rows)

    def _draw_small(self, passes: SmallPass, uniforms_B: NDArray[np.float64]) -> "SampledTokens":
        count, columns = len(self.rows), self._columns
        temperatures_B = np.ascontiguousarray(columns.options[:count, TEMPERATURE])
        ids_B, logprobs_B = passes.step(
            columns.ids[:count], columns.cached[:count], temperatures_B, uniforms_B
        )
        columns.ids[:count] = ids_B
        columns.advance(slice(count))
        return SampledTokens(list(self.rows), ids_B.tolist(), logprobs_B.tolist(), None, None)

    def drop(self, index: int) -> None:
        """Free a row and move the last row into the gap. The freed row may be copied for later prompts."""
        request = self.rows[index]
        self.prefixes.end_row(request.prefix, index, request.cached_ids())
        self.cache.close_row(index)
        self._is_full = False
        last = self.rows.pop()
        self._settings = None
        if index < len(self.rows):
            self.cache.move_row(len(self.rows), index, last.cached)
            self._columns.move(len(self.rows), index)
            self.rows[index] = last
            self.prefixes.move(last.prefix, index)

    def wait(self) -> None:
        """Set `free_slots` to 0 until a row ends, because memory is short. Without rows, change nothing."""
        self._is_full = bool(self.rows)

    def preempt(self) -> Request | None:
        """Free the row of the youngest request and return the request, which must be computed again.

        Return None if fewer than two requests run.
        """
        index = choose_victim([request.arrival for request in self.rows])
        if index is None:
            return None
        request = self.rows[index]
        self.prefixes.unshare(request.prefix)
        self.drop(index)
        request.begin_again()
        self.wait()
        return request

    def release(self) -> list[Request]:
        """Free all memory of a paged cache and return the requests that ran; they must be computed again.

        Without a paged cache, do nothing and return [].
        """
        if not isinstance(self._runner, PagedRunner):
            return []
        self._runner.settle()
        self.prefixes.forget(row.prefix for row in self.rows)
        requests = list(self.rows)
        for request in requests:
            self.drop(len(self.rows) - 1)
            request.begin_again()
        self._runner.cache.release()
        return requests

    def drop_invalid(self, index: int) -> None:
        """Free a row that contains non-finite numbers. No other request reuses any part of the row."""
        self.prefixes.unshare(self.rows[index].prefix)
        self.cache.clear_row(index)
        self.drop(index)

    def take_weights(self) -> None:
        """Use the weights that were written to the model. New requests reuse no older keys and values."""
        self._runner.take_weights()
        self.prefixes.forget(row.prefix for row in self.rows)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of one decode step, one per request. Each field is a column over the requests.

    An object per token would take more time than the sampling. `likeliest` is None if no row requested it,
    and `lost_masses` is None if no row truncates; see `SampledToken` for both.
    """

    requests: list[Request]
    ids: list[int]
    logprobs: list[float]
    likeliest: Likeliest | None
    lost_masses: list[float | None] | None

    @classmethod
    def of(
        cls, requests: list[Request], host_BN: NDArray[np.float64], likeliest: Likeliest | None,
        truncated_B: NDArray[np.bool_],
    ) -> "SampledTokens":  # fmt: skip
        """Build the tokens from the array `host_BN`.

        Its columns are the ids, the log-probs and, if a row truncates, the probability mass that was kept.
        """
        lost: list[float | None] | None = None
        if truncated_B.any():
            rows = zip(truncated_B.tolist(), host_BN[:, 2].tolist(), strict=True)
            lost = [max(0.0, 1.0 - mass) if is_truncated else None for is_truncated, mass in rows]
        return cls(requests, host_BN[:, 0].astype(np.int64).tolist(), host_BN[:, 1].tolist(), likeliest, lost)

    def token(self, row: int) -> SampledToken:
        tops = self.likeliest[row] if self.likeliest else ()
        lost = self.lost_masses[row] if self.lost_masses else None
        return SampledToken(self.ids[row], self.logprobs[row], tops, lost)


def drawing_device(device: torch.device) -> torch.device:
    """Return the device that draws tokens: the model's device, or the CPU for mps, which has no float64.

    With mps, each step copies the logits [B, V] to the CPU: 0.6 MB per request for a vocabulary of 150,000.
    """
    return torch.device("cpu") if device.type == "mps" else device


def first_of_siblings(requests: Sequence[Request], prefixes: Prefixes) -> tuple[list[Request], list[Request]]:
    """Split requests into those to prefill now, and those that can copy a part of their prompts afterwards.

    A request of the second list shares a longer beginning with a request of the first list than with any
    cached prefix. If rows cannot be cut to any length (`RowCache.cuts`), the state near the end of that
    beginning is needed for the copy. The request of the first list is therefore marked to keep this state.
    """
    first: list[Request] = []
    later: list[Request] = []
    index = PrefixIndex()
    computed: dict[Prefix, Request] = {}
    for request in requests:
        shared = index.longest(request.prefix) if prefixes.enabled else NOTHING
        known = prefixes.find(request.prefix).length
        length = shared.length
        if shared.prefix is not None and not prefixes.cuts:
            length = mark_at(shared, request.prefix)
        if shared.prefix is not None and length > known:
            later.append(request)
            if not prefixes.cuts and length < len(shared.prefix.ids):
                computed[shared.prefix].marks.add(length)
        else:
            first.append(request)
            index.add(request.prefix)
            computed[request.prefix] = request
    return first, later
