"""Where callers' threads and the engine thread meet: everything that both touch, behind one lock."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from trainer_backend.errors import BadChatRequest, EngineBusy, EngineStopped, InferenceError
from trainer_backend.inference.request import Request


@dataclass(frozen=True, slots=True)
class Order:
    """Something to do on the engine thread between two steps."""

    action: Callable[[], None]
    done: Future[None] = field(default_factory=Future)

    def carry_out(self) -> None:
        """Carry out a call. Our own errors go to the caller; any other error ends the engine for all."""
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.action()
        except InferenceError as error:
            self.done.set_exception(error)
        except BaseException as error:
            self.done.set_exception(EngineStopped(f"{type(error).__name__}: {error}"))
            raise
        else:
            self.done.set_result(None)


class Inbox:
    """The waiting line, the requests by id, aborts, and two kinds of orders.

    A *command* is carried out at the next turn; a *swap* waits until no request runs, and while it waits no
    request is admitted. Closed from the beginning and again at the end, with the reason that callers get.
    """

    def __init__(self, *, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._known: dict[str, Request] = {}
        self._aborts: set[str] = set()
        self._commands: list[Order] = []
        self._swaps: list[Order] = []
        self._closed_because: str | None = "it was not started"

    # ---------------------------------------------------------------- callers

    def open(self) -> None:
        with self._changed:
            self._closed_because = None

    def close(self, reason: str) -> None:
        """Refuse everything from now on; the first reason stays. The engine thread ends at its next turn."""
        with self._changed:
            self._closed_because = self._closed_because or reason
            self._changed.notify_all()

    def submit(self, request: Request) -> None:
        with self._changed:
            self._refuse_when_closed()
            if request.request_id in self._known:
                raise BadChatRequest(f"request id {request.request_id!r} is in use", where="request_id")
            if len(self._waiting) >= self._max_waiting:
                raise EngineBusy(f"{len(self._waiting)} requests wait already", hint="Try again later.")
            self._known[request.request_id] = request
            self._waiting.append(request)
            self._changed.notify()

    def abort(self, request_id: str) -> bool:
        """Ask for a request's end; False when it is not (or no longer) here."""
        with self._changed:
            if request_id not in self._known:
                return False
            self._aborts.add(request_id)
            self._changed.notify()
            return True

    def command(self, action: Callable[[], None]) -> Future[None]:
        return self._order(self._commands, action)

    def swap(self, action: Callable[[], None]) -> Future[None]:
        return self._order(self._swaps, action)

    def _order(self, line: list[Order], action: Callable[[], None]) -> Future[None]:
        order = Order(action)
        with self._changed:
            self._refuse_when_closed()
            line.append(order)
            self._changed.notify()
        return order.done

    def _refuse_when_closed(self) -> None:
        if self._closed_because is not None:
            raise EngineStopped(f"the engine does not run: {self._closed_because}")

    # ---------------------------------------------------------------- the engine thread

    def wait(self, *, running: bool, paused: bool) -> bool:
        """Until there is something to do; False when that is to end."""

        def something_to_do() -> bool:
            can_step = not paused and (running or bool(self._waiting))
            return bool(can_step or self._aborts or self._commands or self._swaps or self._closed_because)

        with self._changed:
            self._changed.wait_for(something_to_do)
            return self._closed_because is None

    def take_commands(self) -> list[Order]:
        with self._changed:
            due = self._commands[:]
            self._commands.clear()
        return due

    def take_swaps(self) -> list[Order]:
        with self._changed:
            due = self._swaps[:]
            self._swaps.clear()
        return due

    def take_aborted(self) -> list[Request]:
        """Requests to end now; those that were still waiting leave the line."""
        with self._changed:
            aborted = [self._known.pop(name) for name in self._aborts if name in self._known]
            self._aborts.clear()
            for request in aborted:
                if request in self._waiting:
                    self._waiting.remove(request)
        return aborted

    def admit(
        self, *, free_slots: int, prefill_tokens: int, to_prefill: Callable[[Request], int]
    ) -> list[Request]:
        """The oldest waiting requests that fit: one at least if a slot is free, none while a swap waits."""
        newcomers: list[Request] = []
        longest = 0
        with self._changed:
            while self._waiting and not self._swaps and len(newcomers) < free_slots:
                longest = max(longest, to_prefill(self._waiting[0]))
                if newcomers and longest * (len(newcomers) + 1) > prefill_tokens:
                    break
                newcomers.append(self._waiting.popleft())
        return newcomers

    def forget(self, ended: Iterable[Request]) -> None:
        with self._changed:
            for request in ended:
                del self._known[request.request_id]

    def empty(self, reason: str) -> tuple[list[Request], list[Order]]:
        """Close, and hand out everything that nobody will carry out any more."""
        with self._changed:
            self._closed_because = reason
            requests, orders = list(self._known.values()), [*self._commands, *self._swaps]
            for line in (self._waiting, self._known, self._aborts, self._commands, self._swaps):
                line.clear()
        return requests, orders
