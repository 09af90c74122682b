"""The engine thread: admit, prefill, step, deliver; orders and aborts between two steps."""

import math
from dataclasses import dataclass

import torch

from trainer_backend.errors import EngineStopped, InferenceError
from trainer_backend.inference.batch import RunningBatch
from trainer_backend.inference.inbox import Inbox
from trainer_backend.inference.request import Outcome, Request, deliver


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start, for metrics; written by the engine thread alone."""

    requests: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    steps: int = 0


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
        newcomers = self.inbox.admit(free_slots=self.batch.free_slots, prefill_tokens=self._prefill_tokens)
        if newcomers:
            self._join(newcomers)
        if self.batch.rows:
            deliver(self._step())

    def new_version(self, version: int) -> None:
        """The weights were replaced: what is sampled from now on is of this version."""
        self.version = version
        for request in self.batch.rows:
            request.sampled_by(version)

    def _join(self, newcomers: list[Request]) -> None:
        for request in newcomers:
            request.sampled_by(self.version)
            self.counters.prompt_tokens += len(request.prompt_ids)
        self.batch.join(newcomers)

    def _end_aborted(self) -> list[tuple[Request, Outcome]]:
        aborted = self.inbox.take_aborted()
        for request in aborted:
            if request in self.batch.rows:
                self.batch.drop(self.batch.rows.index(request))
            elif not request.versions:
                request.sampled_by(self.version)
        return [(request, request.ended("abort")) for request in aborted]

    def _step(self) -> list[tuple[Request, Outcome]]:
        sampled = self.batch.step()
        self.counters.steps += 1
        self.counters.sampled_tokens += len(sampled)
        ended: list[tuple[Request, Outcome]] = []
        # Backwards: dropping a row moves the last one, already seen, into its place.
        for index in reversed(range(len(sampled))):
            request = self.batch.rows[index]
            outcome = self._take(request, *sampled[index])
            if outcome is not None:
                self.batch.drop(index)
                ended.append((request, outcome))
        if ended:
            self.inbox.forget(request for request, _ in ended)
            self.counters.requests += len(ended)
        return ended

    def _take(self, request: Request, token: int, logprob: float) -> Outcome | None:
        """Record a sampled token; the outcome when it was the last, None while the request goes on."""
        if not math.isfinite(logprob):
            return InferenceError(
                f"the weights of policy version {self.version} give logits that are not finite"
            )
        request.take(token, logprob)
        if token in self._stop_ids:
            return request.ended("stop")
        return request.ended("length") if len(request.token_ids) == request.sampling.max_tokens else None

    def _fail_all(self, detail: str, reason: str) -> None:
        requests, orders = self.inbox.empty(reason)
        self.batch.rows.clear()
        deliver((request, EngineStopped(detail)) for request in requests)
        for order in orders:
            if order.done.set_running_or_notify_cancel():
                order.done.set_exception(EngineStopped(detail))
