"""Broadcasts the learner's weights to the workers of vLLM servers, one tensor at a time.

The workers receive them by `inference.vllm_worker.turnwise_transfer`, which documents the protocol.
"""

import json
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import timedelta
from itertools import count
from math import inf

from torch import Tensor
from torch._C._distributed_c10d import Backend, TCPStore
from transformers import PreTrainedModel

from trainer_backend.inference.vllm_worker.turnwise_transfer import Place, Worker, broadcast, leave
from trainer_backend.learner.device import Placement
from trainer_backend.learner.sharding import whole
from trainer_backend.models.folder import collect_weights
from trainer_backend.models.origin import as_stored, refuse_joined

_LOOK_S, _TURN_S = 0.02, 0.1
# The shortest time to wait for further servers after the first one is ready.
_GRACE_S = 1.0


class WeightSender:
    """Sends the weights of one version of the policy to vLLM servers that request them.

    Call `ready` until it returns a number of servers, then call `send`. The workers of these servers form a
    process group with the learner. Both calls can be repeated, for example for servers that failed.

    Workers connect to `address`, a port on `host`. `backend` is "nccl", or "gloo" for tensors in main memory.
    A transfer fails if a worker takes longer than `timeout_s` for one tensor. Before a transfer, each worker
    must answer within `answer_s`; otherwise its server is left out.
    """

    answer_s = 5.0

    def __init__(self, host: str, *, backend: str, timeout_s: float) -> None:
        self._backend, self._timeout_s = backend, timeout_s
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address = (host, int(listener.getsockname()[1]))
        # The store owns the descriptor from here on.
        self._store = TCPStore(
            *self.address, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=timeout_s),
        )  # fmt: skip
        self._asked = 0
        self._waiting: dict[str, dict[int, tuple[int, Worker]]] = {}  # {server: {rank: (number, worker)}}
        self._called: list[tuple[int, Worker]] = []
        self._first: float | None = None  # time at which the first waiting server was seen
        self._names = map("group_{}".format, count())

    def ready(self, expected: int, since: float) -> int:
        """Wait up to 0.1 s for servers; return the number of servers to which `send` will send, or 0.

        If the result is 0, call `ready` again. It is positive when `expected` servers are ready, or when some
        are ready and the others are late. The wait began at `since`, a time of the monotonic clock. After the
        first server, the others may take as long again as that server took, but at least a second. Servers
        that died or hang are not counted.
        """
        end = time.monotonic() + _TURN_S
        while (now := time.monotonic()) < end:
            servers = self._whole_servers()
            if servers and self._first is None:
                self._first = now
            if len(servers) >= expected or (servers and _is_late(since, self._first)):
                self._first = None
                if self._call(servers):
                    return len({worker.server for _, worker in self._called})
            time.sleep(_LOOK_S)
        return 0

    def send(self, tensors: Iterable[tuple[str, Tensor]]) -> int:
        """Send weights to the servers that `ready` counted; return how many servers loaded all weights.

        `tensors` yields each weight with its name in a Hugging Face checkpoint. The iterable is consumed to
        its end even after a failure, because the learner's other ranks take part in gathering each tensor.
        Only one gathered tensor exists at a time. If a server fails during the transfer, the transfer fails
        for all servers, and the remaining servers request the weights again.
        """
        members, self._called = self._called, []
        name, size = next(self._names), len(members) + 1
        places = [Place(name, self._backend, rank, size, self._timeout_s) for rank in range(size)]
        for (number, _), place in zip(members, places[1:], strict=True):
            self._store.set(f"place/{number}", json.dumps(asdict(place)))
        stream = _Stream(self._store, places[0])
        for tensor_name, tensor in tensors:
            stream.send(tensor_name, tensor)
            del tensor  # so that its memory is free before the next tensor is made
        done = stream.end()
        short = {worker.server for rank, (_, worker) in enumerate(members, start=1) if rank not in done}
        return len({worker.server for _, worker in members} - short)

    def close(self) -> None:
        """Close the port, so that waiting workers lose their connection and new ones cannot connect."""
        del self._store

    def _whole_servers(self) -> list[str]:
        """Return the waiting servers whose workers have all connected."""
        asked = self._store.add("asked", 0)
        for number in range(self._asked + 1, asked + 1):
            worker = Worker(**json.loads(self._store.get(f"worker/{number}")))
            self._waiting.setdefault(worker.server, {})[worker.rank] = (number, worker)
        self._asked = asked
        return [
            server
            for server, workers in self._waiting.items()
            if len(workers) == workers[min(workers)][1].size
        ]

    def _call(self, servers: Iterable[str]) -> bool:
        """Ask all workers of `servers` to answer, within `answer_s`; return whether any server did.

        If all workers of a server answer, they become members of the next group. The workers of any other
        server are told to request the weights again.
        """
        workers = {server: self._waiting.pop(server) for server in servers}
        numbers = [number for own in workers.values() for number, _ in own.values()]
        for number in numbers:
            self._store.set(f"call/{number}", "")
        deadline, missing = time.monotonic() + self.answer_s, set(numbers)
        while missing and time.monotonic() < deadline:
            missing = {number for number in missing if not self._store.check([f"here/{number}"])}
            time.sleep(_LOOK_S if missing else 0.0)
        for own in workers.values():
            if missing.isdisjoint(number for number, _ in own.values()):
                self._called += own.values()
                continue
            for number, _ in own.values():
                self._store.set(f"place/{number}", "{}")
        return bool(self._called)


class _Stream:
    """One transfer of all weights to one process group."""

    def __init__(self, store: TCPStore, place: Place) -> None:
        self._store, self._place = store, place
        self._count, self._has_failed = 0, False
        self._group: Backend | None = None

    def send(self, name: str, tensor: Tensor) -> None:
        """Broadcast a tensor to the group. Do nothing if an earlier broadcast to this group failed."""
        if self._has_failed:
            return
        try:
            if self._group is None:
                self._group = self._place.join(self._store)
            sent = tensor.detach().to(self._place.device(tensor.device)).contiguous()
            dtype = str(sent.dtype).removeprefix("torch.")
            self._announce(name=name, dtype=dtype, shape=list(sent.shape))
            broadcast(self._group, sent)
        except (RuntimeError, ValueError) as error:  # from torch.distributed: a member is lost or too slow
            self._has_failed = True
            if self._group is not None:
                leave(self._group)
            self._announce(error=f"the group has failed at {name}: {error}")

    def end(self) -> set[int]:
        """Wait for the members to load the weights; return the ranks of those that loaded all.

        The first member must finish within `timeout_s`. After that, the others get as much time as the first
        one took, but at least a second.
        """
        done: set[int] = set()
        if not self._has_failed:
            self._announce(count=self._count)
            start, first, left = time.monotonic(), None, set(range(1, self._place.size))
            while left and not _is_late(start, first, self._place.timeout_s):
                done |= self._find_ranks(left, "done")
                left -= done | self._find_ranks(left, "failed")
                first = first or (time.monotonic() if done else None)
                time.sleep(_LOOK_S if left else 0.0)
        if self._group is not None:
            leave(self._group)
        return done

    def _find_ranks(self, ranks: set[int], state: str) -> set[int]:
        """Return those of `ranks` that have reported `state`, which is "done" or "failed"."""
        return {rank for rank in ranks if self._store.check([f"{self._place.group}/{state}/{rank}"])}

    def _announce(self, **head: object) -> None:
        self._store.set(f"{self._place.group}/{self._count}", json.dumps(head))
        self._count += 1


def _is_late(start: float, first: float | None, limit_s: float = inf) -> bool:
    """Return whether a wait that began at `start` is over. Times are of the monotonic clock, in seconds.

    `first` is the time at which the first participant was ready. While it is None, the wait may last
    `limit_s`. After that, it may last as long again as the first participant took, but at least _GRACE_S.
    """
    now = time.monotonic()
    return now - start > limit_s if first is None else now - first > max(_GRACE_S, first - start)


def checkpoint_tensors(model: PreTrainedModel, placement: Placement) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the value of each weight as in a Hugging Face checkpoint.

    Tied weights are yielded once, under their first name. If the model is sharded, every rank must consume
    the whole iterator, because the ranks gather each tensor together. Tensors are on the device of
    `placement`, and floating-point tensors have the dtype `placement.held`.
    """
    refuse_joined(model)
    for name, tensor in collect_weights(model).items():
        dtype = placement.held if tensor.is_floating_point() else tensor.dtype
        full = whole(tensor).to(device=placement.device, dtype=dtype)  # sharded weights may be in main memory
        yield from as_stored(model, {name: full}).items()
        del full  # so that its memory is free before the next tensor is gathered


def own_address(peer: str) -> str:
    """Return the IP address of this machine from which it would reach `peer`. No packet is sent."""
    ((family, _, _, _, address), *_) = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
