"""Run the engine thread: it admits requests, prefills them, runs decode steps and delivers results.

Between two steps, it carries out aborts and the orders of other threads, such as a swap of weights.
"""

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import structlog
import torch

from service_kit.boundary import describe_error
from trainer_backend.errors import EngineOutOfMemory, EngineStopped, InferenceError
from trainer_backend.inference.actor import Generation
from trainer_backend.inference.batch import RunningBatch, SampledTokens, first_of_siblings
from trainer_backend.inference.inbox import Inbox
from trainer_backend.inference.request import Outcome, Request, deliver
from trainer_backend.models.folder import is_out_of_memory, out_of_memory

log = structlog.get_logger(__name__)

Result = TypeVar("Result")


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start, for metrics; only the engine thread writes them."""

    requests: int = 0
    preempted: int = 0
    """How often a request lost its row to an older request, waited, and was computed again."""
    prompt_tokens: int = 0
    prompt_tokens_reused: int = 0
    prompt_tokens_recomputed: int = 0
    """Cached prompt tokens that were computed again, because no recurrent state was kept for them."""
    sampled_tokens: int = 0
    steps: int = 0
    truncated_tokens: int = 0
    """Tokens that were sampled under truncation."""
    lost_mass: float = 0.0
    """The sum, over `truncated_tokens`, of the probability mass that truncation removed."""


class EngineWorker:
    """Does the work of the engine thread. Other threads only read its counters."""

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
        # The version whose weights are only partly loaded, or None. While it is set, no request is served.
        self.half_loaded: int | None = None
        self.counters = EngineCounters()
        self.breakdown: Future[str] = Future()
        self._stop_ids = stop_ids
        self._prefill_tokens = prefill_tokens

    def run(self, torch_threads: int) -> None:
        """Run until the inbox is closed. After an error, all waiting callers get an EngineStopped."""
        reason = "it was stopped"
        try:
            torch.set_num_threads(torch_threads)
            with torch.inference_mode():
                while self.inbox.wait(running=bool(self.batch.rows), paused=self.paused):
                    self.turn()
        except BaseException as error:
            reason = f"its thread ended on {describe_error(error)}"
            log.exception("engine_thread_ended")
            self.breakdown.set_result(reason)
        requests, orders = self.inbox.empty(reason)
        self.batch.rows.clear()
        stopped = f"the engine does not run: {reason}"
        deliver((request, EngineStopped(stopped)) for request in requests)
        for order in orders:
            if order.future.set_running_or_notify_cancel():
                order.future.set_exception(EngineStopped(stopped))

    def turn(self) -> None:
        for order in self.inbox.take_commands():
            order.carry_out()
        # A swap waits for an empty batch, except during a pause, when the batch would never become empty.
        if self.paused or not (self.batch.rows or self.inbox.holds_begun()):
            swaps = self.inbox.take_swaps()
            if swaps:
                deliver(self._record_tokens(self.batch.settle()))  # under the weights that sampled them
            for order in swaps:
                order.carry_out()
        deliver(self._end_aborts())
        if self.paused:
            return
        if self.half_loaded is not None:
            self._refuse_all(self.half_loaded)
            return
        newcomers = self.inbox.admit(
            free_slots=self.batch.free_slots,
            prefill_tokens=self._prefill_tokens,
            to_prefill=self.batch.to_prefill,
        )
        # Siblings join after the first one of them, because they copy the prompt that it has computed.
        for wave in first_of_siblings(newcomers, self.batch.prefixes):
            self._join(wave)
        if self.batch.rows:
            self.counters.steps += 1
            deliver(self._record_tokens(self._sample()))

    def swap(self, version: int, copy: Callable[[], None]) -> None:
        """Call `copy`, which writes the weights of a version, and sample with this version from now on.

        If memory runs out in `copy`, some weights are new and some old, so the engine samples nothing until a
        later swap succeeds. `copy` raises other InferenceErrors only before its first write, so the old
        weights stay in use. Any other error ends the engine.
        """
        try:
            self._with_room(copy, f"loading version {version}", relief=self._free_all)
        except EngineOutOfMemory:
            self.half_loaded = version
            raise
        self.half_loaded = None
        self.new_version(version)

    def new_version(self, version: int) -> None:
        self.version = version
        self.batch.take_weights()
        for request in self.batch.rows:
            request.set_version(version)

    def release(self) -> None:
        """Free the memory of a paged cache. Running requests wait, and are computed again."""
        deliver(self._record_tokens(self.batch.settle()))
        for request in self.batch.release():
            self.inbox.put_back(request)

    def _join(self, newcomers: list[Request]) -> None:
        if not newcomers:
            return
        if len(newcomers) > self.batch.free_slots:  # newer requests must not overtake
            for request in newcomers:
                self.inbox.put_back(request)
            return
        for request in newcomers:
            request.set_version(self.version)
        longest = max(len(request.prompt_ids) for request in newcomers)
        try:
            self._with_room(lambda: self.batch.join(newcomers), f"prefilling a prompt of {longest} tokens")
        except EngineOutOfMemory as error:
            if len(newcomers) == 1:
                if self.batch.can_wait and self.batch.rows:
                    self.batch.wait()
                    self.inbox.put_back(newcomers[0])
                else:
                    self._give_up(newcomers, error)
                return
            # Join one by one: a short prompt must not fail together with a long prompt.
            for request in newcomers:
                self._join([request])
            return
        for request in newcomers:
            if not request.token_ids:  # else the request has joined before
                self.counters.prompt_tokens += len(request.prompt_ids)
                self.counters.prompt_tokens_reused += request.reused
                self.counters.prompt_tokens_recomputed += request.lost

    def _end_aborts(self) -> list[tuple[Request, Outcome]]:
        requests = self.inbox.take_aborts()
        for request in requests:
            if request in self.batch.rows:
                self.batch.drop(self.batch.rows.index(request))
            elif not request.versions:
                request.set_version(self.version)
        return [(request, request.generation("abort")) for request in requests]

    def _record_tokens(self, sampled: SampledTokens | None) -> list[tuple[Request, Outcome]]:
        """Record sampled tokens and end complete requests; return the outcomes to deliver."""
        if sampled is None:
            return []
        outcomes: list[tuple[Request, Outcome]] = []
        ended: list[tuple[Request, Generation | InferenceError]] = []
        running = set(self.batch.rows)
        for index, request in enumerate(sampled.requests):
            if request not in running:  # the request has ended since this step was launched
                continue
            end = self._record_token(request, sampled, index)
            if end is not None:
                ended.append((request, end))
            elif request.extras.on_token is not None:
                outcomes.append((request, sampled.token(index)))
        # Drop rows only now: dropping a row moves another row, whose token must be recorded first. Drop
        # the last row first, so that only running rows are moved: a moved row that had ended could leave
        # non-finite numbers in its old slot.
        for request, end in reversed(ended):
            row = self.batch.rows.index(request)
            (self.batch.drop_invalid if isinstance(end, InferenceError) else self.batch.drop)(row)
        if ended:
            self.inbox.forget(request for request, _ in ended)
        self.counters.requests += len(ended)
        return [*outcomes, *ended]

    def _sample(self) -> SampledTokens | None:
        """Decode one step. If memory runs out, free a row and repeat. Return None if there are no tokens.

        With a paged cache, the youngest request loses its row, waits, and is computed again. Without pages,
        the longest request fails, because its length determines how much memory all rows take.
        """
        while self.batch.rows:
            try:
                return self._with_room(self.batch.step, "decoding")
            except EngineOutOfMemory as error:
                waiting = self.batch.preempt() if self.batch.can_wait else None
                if waiting is not None:
                    self.counters.preempted += 1
                    self.inbox.put_back(waiting)
                    continue
                longest = max(self.batch.rows, key=lambda request: request.cached)
                self.batch.prefixes.unshare(longest.prefix)
                self.batch.drop(self.batch.rows.index(longest))
                self._give_up([longest], error)
        # Discard the launched step, because its rows are gone. A request that joins again samples its token
        # again.
        self.batch.settle()
        return None

    def _with_room(
        self, action: Callable[[], Result], task: str, relief: Callable[[], None] | None = None
    ) -> Result:
        """Run an action; if memory runs out, call `relief` (default: drop kept prefixes) and try again."""
        for _ in range(2):
            try:
                return action()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            # Outside the handler, because the error and the tensors of its frames are then freed.
            (relief or self.batch.prefixes.drop_copies)()
        raise out_of_memory(task, running=len(self.batch.rows), max_model_len=self.batch.max_len)

    def _free_all(self) -> None:
        """Free copies of prefixes and a paged cache; requests in this cache wait and are computed again."""
        self.batch.prefixes.drop_copies()
        self.release()

    def _refuse_all(self, version: int) -> None:
        """Fail running and waiting requests; while a swap waits, let requests without tokens wait for it."""
        requests = list(self.batch.rows)
        for request in reversed(requests):
            self.batch.prefixes.unshare(request.prefix)
            self.batch.drop(len(self.batch.rows) - 1)
        requests += self.inbox.admit(
            free_slots=self.batch.free_slots, prefill_tokens=self._prefill_tokens, to_prefill=lambda _: 0
        )
        error = EngineOutOfMemory(
            f"memory ran out while version {version} was loaded, and some weights are of an earlier one: the "
            "engine samples nothing until it has loaded a whole version",
            hint="Resume the run, or lower inference.max_running or inference.max_model_len.",
        )
        self._give_up(requests, error)

    def _give_up(self, requests: list[Request], error: EngineOutOfMemory) -> None:
        self.inbox.forget(requests)
        deliver((request, error) for request in requests)

    def _record_token(
        self, request: Request, sampled: SampledTokens, row: int
    ) -> Generation | InferenceError | None:
        """Record a row's sampled token; return the request's outcome if the token ends it, else None."""
        token, logprob = sampled.ids[row], sampled.logprobs[row]
        self.counters.sampled_tokens += 1
        lost = None if sampled.lost_masses is None else sampled.lost_masses[row]
        if lost is not None:
            self.counters.truncated_tokens += 1
            self.counters.lost_mass += lost
        if not math.isfinite(logprob):
            return InferenceError(
                f"the weights of policy version {self.version} give logits that are not finite"
            )
        request.take(token, logprob)
        if request.extras.likeliest and sampled.likeliest is not None:
            request.likeliest.append(sampled.likeliest[row])
        if token in self._stop_ids:
            return request.generation("stop")
        stop = request.extras.stop
        if stop is not None and (stop_string := stop.take(token)) is not None:
            return request.generation("stop", stop_string=stop_string)
        return request.generation("length") if len(request.token_ids) == request.sampling.max_tokens else None
