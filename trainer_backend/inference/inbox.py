"""Hold the state that callers' threads share with the engine thread, behind one lock."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count, islice

from service_kit.boundary import describe_error
from trainer_backend.errors import BadChatRequest, EngineBusy, EngineStopped, InferenceError
from trainer_backend.inference.request import Request


@dataclass(frozen=True, slots=True)
class Order:
    """An action that the engine thread runs between two steps, and a future for its outcome."""

    action: Callable[[], None]
    future: Future[None] = field(default_factory=Future)

    def carry_out(self) -> None:
        """Run the action and complete the future.

        An InferenceError reaches only the caller, through the future. Any other error is also raised here,
        which ends the engine.
        """
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.action()
        except InferenceError as error:
            self.future.set_exception(error)
        except BaseException as error:
            self.future.set_exception(EngineStopped(describe_error(error)))
            raise
        else:
            self.future.set_result(None)


class Inbox:
    """The queue of waiting requests, all requests by id, the ids to abort, and two kinds of orders.

    A *command* runs at the next turn of the engine thread. A *swap* replaces the weights; it waits until no
    request runs, unless the engine is paused. While a swap waits, the inbox admits only requests that already
    have sampled tokens and were put back. Before the start and after the end of the engine, the inbox is
    closed: calls raise EngineStopped with the reason.
    """

    def __init__(self, *, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._change = threading.Condition()
        self._queue: deque[Request] = deque()
        self._requests: dict[str, Request] = {}
        self._arrivals = count()
        self._aborts: set[str] = set()
        self._commands: list[Order] = []
        self._swaps: list[Order] = []
        self._closed_because: str | None = "it was not started"

    # ---------------------------------------------------------------- callers

    def open(self) -> None:
        with self._change:
            self._closed_because = None

    def close(self, reason: str) -> None:
        """Refuse all calls from now on. The engine thread ends at its next turn.

        If the inbox is closed already, the earlier reason is kept.
        """
        with self._change:
            self._closed_because = self._closed_because or reason
            self._change.notify_all()

    def submit(self, request: Request) -> None:
        with self._change:
            self._refuse_when_closed()
            if request.request_id in self._requests:
                raise BadChatRequest(f"request id {request.request_id!r} is in use", where="request_id")
            if len(self._queue) >= self._max_waiting:
                raise EngineBusy(f"{len(self._queue)} requests wait already", hint="Try again later.")
            request.arrival = next(self._arrivals)
            self._requests[request.request_id] = request
            self._queue.append(request)
            self._change.notify()

    def abort(self, request_id: str) -> bool:
        """Ask the engine thread to end a request. Return False if no unfinished request has this id."""
        with self._change:
            if request_id not in self._requests:
                return False
            self._aborts.add(request_id)
            self._change.notify()
            return True

    def command(self, action: Callable[[], None]) -> Future[None]:
        return self._order(self._commands, action)

    def swap(self, action: Callable[[], None]) -> Future[None]:
        return self._order(self._swaps, action)

    def _order(self, line: list[Order], action: Callable[[], None]) -> Future[None]:
        order = Order(action)
        with self._change:
            self._refuse_when_closed()
            line.append(order)
            self._change.notify()
        return order.future

    def _refuse_when_closed(self) -> None:
        if self._closed_because is not None:
            raise EngineStopped(f"the engine does not run: {self._closed_because}")

    # ---------------------------------------------------------------- the engine thread

    def wait(self, *, running: bool, paused: bool) -> bool:
        """Block until the engine thread has work. Return False if the thread must end."""

        def has_work() -> bool:
            can_step = not paused and (running or bool(self._queue))
            return bool(can_step or self._aborts or self._commands or self._swaps or self._closed_because)

        with self._change:
            self._change.wait_for(has_work)
            return self._closed_because is None

    def take_commands(self) -> list[Order]:
        with self._change:
            due = self._commands[:]
            self._commands.clear()
        return due

    def take_swaps(self) -> list[Order]:
        with self._change:
            due = self._swaps[:]
            self._swaps.clear()
        return due

    def take_aborts(self) -> list[Request]:
        """Remove the requests to abort from the inbox and return them. Waiting ones also leave the queue."""
        with self._change:
            requests = [self._requests.pop(name) for name in self._aborts if name in self._requests]
            self._aborts.clear()
            for request in requests:
                if request in self._queue:
                    self._queue.remove(request)
        return requests

    def admit(
        self, *, free_slots: int, prefill_tokens: int, to_prefill: Callable[[Request], int]
    ) -> list[Request]:
        """Remove the oldest requests from the queue, as many as can run now, and return them.

        At most `free_slots` requests can run. Their tokens to prefill, padded to the longest, may not exceed
        `prefill_tokens`; a longer request is admitted alone. While a swap waits, only requests that already
        have sampled tokens are admitted.
        """
        newcomers: list[Request] = []
        longest = 0
        with self._change:
            line = (request for request in self._queue if request.token_ids or not self._swaps)
            for request in islice(line, free_slots):
                longest = max(longest, to_prefill(request))
                if newcomers and longest * (len(newcomers) + 1) > prefill_tokens:
                    break
                newcomers.append(request)
            for request in newcomers:
                self._queue.remove(request)
        return newcomers

    def holds_begun(self) -> bool:
        """Return whether the queue contains a request that already has sampled tokens.

        Such a request was put back, and a swap must wait until it has ended.
        """
        with self._change:
            return any(request.token_ids for request in self._queue)

    def put_back(self, request: Request) -> None:
        """Put an admitted request back into the queue, before the requests that arrived after it."""
        with self._change:
            place = sum(other.arrival < request.arrival for other in self._queue)
            self._queue.insert(place, request)

    def forget(self, requests: Iterable[Request]) -> None:
        with self._change:
            for request in requests:
                del self._requests[request.request_id]

    def empty(self, reason: str) -> tuple[list[Request], list[Order]]:
        """Close and empty the inbox. Return the unfinished requests and the orders that did not run."""
        with self._change:
            self._closed_because = reason
            requests, orders = list(self._requests.values()), [*self._commands, *self._swaps]
            for line in (self._queue, self._requests, self._aborts, self._commands, self._swaps):
                line.clear()
        return requests, orders
