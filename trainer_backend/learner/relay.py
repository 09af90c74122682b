"""Calls to a learner of several ranks: the first rank receives them, and all ranks execute them.

The name of each call, and the error or success of each rank, go through torch's rendezvous store, where a
rank can wait for hours. The arguments are broadcast.

A call should raise on all ranks or on none. If only some ranks fail, for example by running out of memory
within a layer, the other ranks hang in a collective. The call then ends with the error, and all ranks exit.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn

import structlog
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from service_kit.boundary import describe_error
from service_kit.rpc import ErrorBody
from trainer_backend.errors import LearnerFailed, LearnerLost, TrainerError, UpdateStopped
from trainer_backend.learner.calls import CALLS
from trainer_backend.learner.ranks import Ranks

log = structlog.get_logger("learner")

# Time to wait for the next call. It can be long, because rollouts are collected between calls.
_IDLE = timedelta(days=365)
# Time in which the other ranks must raise, too, after one rank has raised an error.
_GRACE = timedelta(seconds=5)
# Time in which the other ranks must end a call after the first rank has ended it.
_LIMIT = timedelta(seconds=600)
_LOOK = timedelta(seconds=0.2)


class Caller:
    """Receives progress reports and errors of a running call.

    This base class ignores them; ranks other than the first use it.
    """

    def tell(self, done: int, total: int) -> None:
        """Report the progress of the call."""

    def is_halted(self) -> bool:
        """Return whether the call should stop at its next progress report."""
        return False

    def broken(self, error: TrainerError) -> None:
        """Report that the call has failed with this error, and that this process must therefore exit."""


class Halted(Exception):
    """Raised inside a call, on every rank, to stop the call."""


class Relay:
    """Executes each call on all ranks: the first rank sends it by `call`, the others run `follow`.

    `do(name, *arguments)` executes a call on this rank.
    """

    def __init__(self, ranks: Ranks, do: Callable[..., Any]) -> None:
        self._ranks, self._do, self._number = ranks, do, 0
        self._store = distributed_c10d._get_default_store() if ranks.are_several else None

    def call(self, name: str, body: bytes, caller: Caller) -> Any:
        """Execute a call on all ranks and return its result; only the first rank uses this method.

        Raises Halted if the call was stopped.
        """
        if self._store is None:
            return self._execute(name, body, caller)
        self._number += 1
        self._store.set(f"call/{self._number}", name)
        own: Exception | None = None
        result = None
        with self._watch(name, caller):
            try:
                result = self._execute(name, self._share(body), caller)
            except Exception as error:
                own = error
        first, limit = None, _LIMIT
        if own is not None:
            first = call_error(own, name)
            # If the connection between the ranks is lost, waiting for them is useless.
            limit = timedelta() if isinstance(first, LearnerLost) else _GRACE
        ends = [first, *self._ends(name, limit)]
        errors = [error for error in ends if error is not None]
        if errors and (len(errors) < len(ends) or any(isinstance(error, LearnerLost) for error in errors)):
            caller.broken(_cause(errors))
        if own is not None:
            raise own
        return result

    def follow(self) -> NoReturn:
        """Execute the calls that the first rank sends, until this process is stopped."""
        assert self._store is not None
        while True:
            self._number += 1
            self._store.wait([f"call/{self._number}"], _IDLE)
            name = self._store.get(f"call/{self._number}").decode()
            text = ""
            try:
                self._execute(name, self._share(b""), Caller())
            except Exception as error:
                text = ErrorBody.of(call_error(error, name)).model_dump_json()
                self._store.set(self._failure, text)
            self._store.set(self._end_key(self._ranks.index), text)

    def _execute(self, name: str, body: bytes, caller: Caller) -> Any:
        def tell(done: int, total: int) -> None:
            caller.tell(done, total)
            (halted,) = self._ranks.sums(float(caller.is_halted()))
            if halted:
                raise Halted

        return self._do(name, *CALLS.read_arguments(name, body, tell))

    def _share(self, body: bytes) -> bytes:
        """Return the first rank's `body` on every rank; the other ranks pass empty bytes."""
        (size,) = self._ranks.sums(len(body))
        shared = torch.frombuffer(bytearray(body or bytes(int(size))), dtype=torch.uint8)
        dist.broadcast(shared, src=0, group=self._ranks.control)
        return bytes(shared.numpy())

    def _end_key(self, rank: int) -> str:
        return f"end/{self._number}/{rank}"

    @property
    def _failure(self) -> str:
        """Return the store's key under which a rank reports that it failed in the current call."""
        return f"failure/{self._number}"

    def _ends(self, name: str, limit: timedelta) -> list[TrainerError | None]:
        """Wait for the other ranks to end the call; return the error of each, or None if it succeeded.

        A rank that has not ended the call within `limit` counts as LearnerLost.
        """
        store, others = self._store, range(1, self._ranks.count)
        assert store is not None
        with suppress(dist.DistError):  # some ranks have not ended the call in time
            store.wait([self._end_key(rank) for rank in others], max(limit, _LOOK))
        ends: list[TrainerError | None] = []
        for rank in others:
            if not store.check([self._end_key(rank)]):
                ends.append(LearnerLost(f"rank {rank} of the learner does not end the call"))
                continue
            text = store.get(self._end_key(rank))
            ends.append(CALLS.read_error(text, name) if text else None)
        return ends

    @contextmanager
    def _watch(self, name: str, caller: Caller) -> Iterator[None]:
        """Report another rank's failure to the caller if the context does not end soon after the failure."""
        store, over = self._store, threading.Event()
        assert store is not None

        def look() -> None:
            while not over.wait(_LOOK.total_seconds()):
                if store.check([self._failure]):
                    if not over.wait(_GRACE.total_seconds()):
                        error = CALLS.read_error(store.get(self._failure), name)
                        caller.broken(_cause([error]))
                    return

        thread = threading.Thread(target=look, name="ranks-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def call_error(error: Exception, name: str) -> TrainerError:
    """Convert any error of a call to a TrainerError, which can be sent to the orchestrator."""
    if isinstance(error, TrainerError):
        return error
    if isinstance(error, Halted):
        return LearnerFailed(f"{name!r} was stopped")
    log.error("call_failed", call=name, exc_info=error)
    text = describe_error(error)
    is_bare = type(error) is RuntimeError and any(word in str(error).lower() for word in ("gloo", "nccl"))
    if is_bare or isinstance(error, dist.DistError):
        return LearnerLost(f"the ranks of the learner have lost each other in {name!r}: {text}")
    return LearnerFailed(f"an error inside the learner in {name!r}: {text}")


def _cause(errors: list[TrainerError]) -> TrainerError:
    """Return the root cause: the first error other than LearnerLost, if there is one."""
    error = next((error for error in errors if not isinstance(error, LearnerLost)), errors[0])
    if isinstance(error, UpdateStopped):
        # With 0 steps, the orchestrator would ask for a checkpoint, which ranks that exit cannot write.
        error.steps_taken = max(error.steps_taken, 1)
    return error
