"""The engine thread: admit, prefill, step, deliver; orders and aborts between two steps."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import structlog
import torch

from trainer_backend.errors import EngineOutOfMemory, EngineStopped, InferenceError
from trainer_backend.inference.batch import RunningBatch, first_of_siblings
from trainer_backend.inference.inbox import Inbox
from trainer_backend.inference.protocol import Generation, Sampled
from trainer_backend.inference.request import Outcome, Request, deliver
from trainer_backend.models.folder import is_out_of_memory, out_of_memory

log = structlog.get_logger(__name__)

Result = TypeVar("Result")


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start, for metrics; written by the engine thread alone.

    Attributes:
        truncated_tokens: of those sampled, how many under top_p or top_k.
        lost_mass: the sum over these of the probability that was taken away.
    """

    requests: int = 0
    prompt_tokens: int = 0
    prompt_tokens_reused: int = 0
    sampled_tokens: int = 0
    steps: int = 0
    truncated_tokens: int = 0
    lost_mass: float = 0.0


class EngineWorker:
    """What the thread runs. Its attributes belong to that thread; other threads only read the counters."""

    def __init__(
        self,
        batch: RunningBatch,
        inbox: Inbox,
        *,
        stop_ids: frozenset[int],
        prefill_tokens: int,
        version: int,
    ) -> None:
        self.batch = batch
        self.inbox = inbox
        self.version = version
        self.paused = False
        self.counters = EngineCounters()
        self.breakdown: Future[str] = Future()
        self._stop_ids = stop_ids
        self._prefill_tokens = prefill_tokens

    def run(self, torch_threads: int) -> None:
        """The thread's life and its boundary: whatever ends it reaches everyone who waits."""
        reason = "it was stopped"
        try:
            torch.set_num_threads(torch_threads)
            with torch.inference_mode():
                while self.inbox.wait(running=bool(self.batch.rows), paused=self.paused):
                    self.turn()
        except BaseException as error:
            reason = f"its thread ended on {type(error).__name__}: {error}"
            log.exception("engine_thread_ended")
            self.breakdown.set_result(reason)
        self._fail_all(f"the engine does not run: {reason}", reason)

    def turn(self) -> None:
        for order in self.inbox.take_commands():
            order.carry_out()
        # A paused batch would never drain, so a pause lets the swap through.
        if self.paused or not self.batch.rows:
            for order in self.inbox.take_swaps():
                order.carry_out()
        deliver(self._end_aborted())
        if self.paused:
            return
        newcomers = self.inbox.admit(
            free_slots=self.batch.free_slots,
            prefill_tokens=self._prefill_tokens,
            to_prefill=self.batch.to_prefill,
        )
        # Siblings second: they copy what the first of them has computed.
        for wave in first_of_siblings(newcomers, self.batch.prefixes):
            self._join(wave)
        if self.batch.rows:
            deliver(self._step())

    def new_version(self, version: int) -> None:
        """Note that the weights were replaced: tokens sampled from now on have this version."""
        self.version = version
        self.batch.forget_prefixes()
        for request in self.batch.rows:
            request.sampled_by(version)

    def _join(self, newcomers: list[Request]) -> None:
        if not newcomers:
            return
        for request in newcomers:
            request.sampled_by(self.version)
        longest = max(len(request.prompt_ids) for request in newcomers)
        try:
            self._with_room(lambda: self.batch.join(newcomers), f"prefilling a prompt of {longest} tokens")
        except EngineOutOfMemory as error:
            if len(newcomers) == 1:
                self._give_up(newcomers, error)
                return
            # One by one: a short prompt must not fail with a long one that came beside it.
            for request in newcomers:
                self._join([request])
            return
        for request in newcomers:
            self.counters.prompt_tokens += len(request.prompt_ids)
            self.counters.prompt_tokens_reused += request.reused

    def _end_aborted(self) -> list[tuple[Request, Outcome]]:
        aborted = self.inbox.take_aborted()
        for request in aborted:
            if request in self.batch.rows:
                self.batch.drop(self.batch.rows.index(request))
            elif not request.versions:
                request.sampled_by(self.version)
        return [(request, request.ended("abort")) for request in aborted]

    def _step(self) -> list[tuple[Request, Outcome]]:
        sampled = self._sampled()
        self.counters.steps += 1
        self.counters.sampled_tokens += len(sampled)
        for item in sampled:
            if item.lost_mass is not None:
                self.counters.truncated_tokens += 1
                self.counters.lost_mass += item.lost_mass
        outcomes: list[tuple[Request, Outcome]] = []
        ended: list[Request] = []
        # Backwards: dropping a row moves the last one, already seen, into its place.
        for index in reversed(range(len(sampled))):
            request = self.batch.rows[index]
            end = self._take(request, sampled[index])
            if end is None:
                if request.extras.on_token is not None:
                    outcomes.append((request, sampled[index]))
                continue
            if isinstance(end, InferenceError):
                self.batch.drop_broken(index)
            else:
                self.batch.drop(index)
            outcomes.append((request, end))
            ended.append(request)
        if ended:
            self.inbox.forget(ended)
            self.counters.requests += len(ended)
        return outcomes

    def _sampled(self) -> list[Sampled]:
        """A decode step; where it does not fit, the longest request gives way, one after the other."""
        while self.batch.rows:
            try:
                return self._with_room(self.batch.step, "decoding")
            except EngineOutOfMemory as error:
                longest = max(self.batch.rows, key=lambda request: request.cached)
                self.batch.prefixes.unshare(longest.held)
                self.batch.drop(self.batch.rows.index(longest))
                self._give_up([longest], error)
        return []

    def _with_room(self, action: Callable[[], Result], doing: str) -> Result:
        """Once more without the kept prefixes where memory runs out."""
        for _ in range(2):
            try:
                return action()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            # Out here the error, and with it the tensors of its frames, is gone.
            self.batch.prefixes.drop_kept()
        raise out_of_memory(doing, running=len(self.batch.rows), max_model_len=self.batch.max_len)

    def _give_up(self, requests: list[Request], error: EngineOutOfMemory) -> None:
        self.inbox.forget(requests)
        deliver((request, error) for request in requests)

    def _take(self, request: Request, sampled: Sampled) -> Generation | InferenceError | None:
        """Record a sampled token; the outcome when it was the last, None while the request goes on."""
        if not math.isfinite(sampled.logprob):
            return InferenceError(
                f"the weights of policy version {self.version} give logits that are not finite"
            )
        request.take(sampled)
        if sampled.token_id in self._stop_ids:
            return request.ended("stop")
        stop = request.extras.stop
        if stop is not None and (found := stop.take(sampled.token_id)) is not None:
            return request.ended("stop", stop_string=found)
        return request.ended("length") if len(request.token_ids) == request.sampling.max_tokens else None

    def _fail_all(self, detail: str, reason: str) -> None:
        requests, orders = self.inbox.empty(reason)
        self.batch.rows.clear()
        deliver((request, EngineStopped(detail)) for request in requests)
        for order in orders:
            if order.done.set_running_or_notify_cancel():
                order.done.set_exception(EngineStopped(detail))
