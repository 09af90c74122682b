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
    """An action that the engine thread runs between two steps."""

    action: Callable[[], None]
    future: Future[None] = field(default_factory=Future)

    def carry_out(self) -> None:
        """Run the action. An InferenceError goes to the caller; any other error ends the engine for all."""
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
    """The queue, the requests by id, aborts, and two kinds of orders.

    A *command* runs at the next turn. A *swap* waits until no request runs; meanwhile the inbox admits only
    requests that have begun and were put back. The inbox is closed before the start and after the end of the
    engine; callers get the reason.
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
        """Refuse all calls from now on; the first reason is kept. The engine thread ends at its next turn."""
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
        """Ask for the end of a request; return False if the inbox does not hold the request."""
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
        """Wait for work; return False if the engine thread must end."""

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
        """Take the requests to abort; waiting requests leave the queue."""
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
        """Take the oldest requests that fit; while new weights wait, only those that already have tokens."""
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
        """Return whether a request waits that has begun and was put back; a swap must wait for its end."""
        with self._change:
            return any(request.token_ids for request in self._queue)

    def put_back(self, request: Request) -> None:
        """Let an admitted request wait again, before the requests that came after it."""
        with self._change:
            place = sum(other.arrival < request.arrival for other in self._queue)
            self._queue.insert(place, request)

    def forget(self, requests: Iterable[Request]) -> None:
        with self._change:
            for request in requests:
                del self._requests[request.request_id]

    def empty(self, reason: str) -> tuple[list[Request], list[Order]]:
        """Close the inbox and return the requests and orders that will not be carried out."""
        with self._change:
            self._closed_because = reason
            requests, orders = list(self._requests.values()), [*self._commands, *self._swaps]
            for line in (self._queue, self._requests, self._aborts, self._commands, self._swaps):
                line.clear()
        return requests, orders
