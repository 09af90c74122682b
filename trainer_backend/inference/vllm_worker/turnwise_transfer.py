"""Send new weights from the learner to vLLM's workers, one tensor at a time, through a process group.

The learner has a key-value store (torch's TCPStore), which exists as long as one version of the policy.
Learner and workers use these keys of the store:

    asked                 how many workers have asked so far, and the number n of the newest worker
    worker/{n}            {"server", "rank", "size"}: see `Worker`
    call/{n}, here/{n}    the learner calls the worker before it makes a group; the worker answers
    place/{n}             {"group", "backend", "rank", "size", "timeout_s"}; {} if the worker must ask again
    {group}/{i}           {"name", "dtype", "shape"} of the i-th tensor; {"count"} after the last tensor;
                          {"error"} if the group has failed
    {group}/done/{rank}, {group}/failed/{rank}      a worker has loaded all tensors, or has given up

A group exists for one transfer of all weights. If a member fails, the transfer fails for all members; the
remaining workers ask again, and get the weights in another group. Every wait has a time limit.

This file runs in the learner's process and in vLLM's own environment; it imports neither Turnwise nor vLLM.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    Backend,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

_CONNECT_S = 30.0
# A member waits this many times `timeout_s` for the next tensor: longer than the learner waits for a hanging
# member.
_PATIENCE = 3.0
_BLOCKS = "TORCH_NCCL_BLOCKING_WAIT"


class Interrupted(RuntimeError):
    """The group has lost a member, so the received weights are incomplete."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One of the `size` workers of a server. `server` is a name that is unique to one load by this server."""

    server: str
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Place:
    group: str
    backend: str
    """The backend: "gloo" or "nccl"."""
    rank: int
    size: int
    timeout_s: float
    """The most time that the transfer of one tensor may take, in seconds."""

    def join(self, store: Store) -> Backend:
        """Create the process group. It is independent of all other groups of this process."""
        timeout, own = timedelta(seconds=self.timeout_s), PrefixStore(f"{self.group}/group", store)
        if self.backend == "gloo":
            return ProcessGroupGloo(own, self.rank, self.size, timeout)
        from torch._C._distributed_c10d import ProcessGroupNCCL  # exists only in builds with CUDA

        # Otherwise, if a member is lost, a thread of torch ends the whole process without an error.
        with _environment(_BLOCKS, "1"):
            options = ProcessGroupNCCL.Options()
            options._timeout = timeout
            return ProcessGroupNCCL(own, self.rank, self.size, options)

    def device(self, own: torch.device) -> torch.device:
        """Return the device of the tensors that the group transfers; `own` is the device of the model."""
        return torch.device("cpu") if self.backend == "gloo" else own


def broadcast(group: Backend, tensor: Tensor) -> None:
    """Send a tensor to the group at rank 0, or receive into it at any other rank; return when it is done."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()  # type: ignore[attr-defined]  # left out of torch's stubs


def leave(group: Backend) -> None:
    """Close a group's connections, so that members that wait for this process get an error."""
    with suppress(RuntimeError):
        group.abort()


def receive(
    address: tuple[str, int],
    worker: Worker,
    load: Callable[[Iterator[tuple[str, Tensor]]], object],
    *,
    device: torch.device,
    wait_s: float,
) -> None:
    """Receive weights from the learner and give them to `load`; if the group fails, try again.

    `address` is the address of the learner's store. `wait_s` limits the time, over all attempts, until the
    learner calls this worker. `load` gets an iterator of (name, value), which yields weights as they arrive.

    Raises:
        RuntimeError, OSError: the learner does not call in time, or its store is closed.
    """
    deadline = time.monotonic() + wait_s
    socket.create_connection(address, _CONNECT_S).close()  # a TCPStore would retry a closed port for long
    store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=min(wait_s, _CONNECT_S)))
    while True:
        place = _place(store, worker, deadline)
        tensors = _tensors(store, place, device)
        try:
            load(tensors)
        except BaseException as error:
            # Leave the group: the error's traceback would keep it alive, and the other members waiting.
            tensors.close()
            with suppress(RuntimeError):
                store.set(f"{place.group}/failed/{place.rank}", "")
            if isinstance(error, Interrupted) and time.monotonic() < deadline:
                continue
            raise
        store.set(f"{place.group}/done/{place.rank}", "")
        return


def _place(store: TCPStore, worker: Worker, deadline: float) -> Place:
    while True:
        number = store.add("asked", 1)
        store.set(f"worker/{number}", json.dumps(asdict(worker)))
        store.wait([f"call/{number}"], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        store.set(f"here/{number}", "")
        # The learner assigns places once all called workers have answered, or after a few seconds.
        store.wait([f"place/{number}"], timedelta(seconds=_CONNECT_S))
        place = json.loads(store.get(f"place/{number}"))
        if place:
            return Place(**place)


def _tensors(
    store: TCPStore, place: Place, device: torch.device
) -> Generator[tuple[str, Tensor], None, None]:
    """Yield (name, value) of each weight as it arrives; raise Interrupted if not all of them arrive."""
    group: Backend | None = None
    try:
        group = place.join(store)
        for head in _heads(store, place):
            tensor = torch.empty(
                head["shape"], dtype=getattr(torch, head["dtype"]), device=place.device(device)
            )
            broadcast(group, tensor)
            yield head["name"], tensor
    except RuntimeError as error:  # torch.distributed has no other class for a broken connection
        raise Interrupted(str(error)) from error
    finally:
        if group is not None:
            leave(group)


def _heads(store: TCPStore, place: Place) -> Iterator[dict[str, Any]]:
    store.set_timeout(timedelta(seconds=_PATIENCE * place.timeout_s))
    number = 0
    while True:
        head = json.loads(store.get(f"{place.group}/{number}"))
        if "error" in head:
            raise Interrupted(head["error"])
        if "count" in head:
            return
        yield head
        number += 1


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
