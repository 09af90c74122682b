"""A cable between two network namespaces, of which one can choose how bad it is. Linux, as root.

Each end is a TUN device in its namespace; a thread of this process carries the packets. So it needs no module
of the kernel, where `tc netem` needs one that not every machine has.
"""

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Self

# From linux/if_tun.h: the request, and a device of IP packets without a header of its own.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MOST_BYTES, _LOOK_S = 65_536, 0.05


@dataclass(frozen=True, slots=True)
class Quality:
    """What happens to a packet in either direction.

    Attributes:
        delay_s: it takes so long, and up to `jitter_s` more; none overtakes another.
        loss: the share of packets that are lost.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0


PERFECT = Quality()
CUT = Quality(loss=1.0)


@dataclass(frozen=True, slots=True)
class End:
    """One end: the namespace, which it makes, and its address there."""

    namespace: str
    address: str
    device: str

    def on(self, *command: str) -> tuple[str, ...]:
        """A command in that namespace."""
        return ("ip", "netns", "exec", self.namespace, *command)


class Cable:
    """Two namespaces and the cable between them, as a context manager.

    Attributes:
        quality: may be changed at any time.
    """

    def __init__(self, ends: Sequence[End], *, seed: int = 0) -> None:
        self.ends, self.quality = tuple(ends), PERFECT
        self._random, self._over = random.Random(seed), threading.Event()
        self._files: list[int] = []
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> Self:
        self._remove()
        for end in self.ends:
            _run("ip", "netns", "add", end.namespace)
            self._files.append(_tun(end.device))
            _run("ip", "link", "set", end.device, "netns", end.namespace)
            _run(*end.on("ip", "address", "add", f"{end.address}/24", "dev", end.device))
            _run(*end.on("ip", "link", "set", end.device, "up"))
            _run(*end.on("ip", "link", "set", "lo", "up"))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        for file in self._files:
            os.close(file)
        self._remove()

    def _remove(self) -> None:
        for end in self.ends:
            subprocess.run(["ip", "netns", "delete", end.namespace], check=False, capture_output=True)

    def _carry(self) -> None:
        """Read packets at each end, and write them at the other when they are due."""
        others = dict(zip(self._files, reversed(self._files), strict=True))
        last_due, number = dict.fromkeys(self._files, 0.0), count()
        packets: list[tuple[float, int, int, bytes]] = []
        while not self._over.is_set():
            wait_s = max(0.0, packets[0][0] - time.monotonic()) if packets else _LOOK_S
            ready, _, _ = select.select(self._files, [], [], min(wait_s, _LOOK_S))
            for file in ready:
                packet, quality = os.read(file, _MOST_BYTES), self.quality
                if self._random.random() < quality.loss:
                    continue
                due = time.monotonic() + quality.delay_s + quality.jitter_s * self._random.random()
                last_due[file] = max(due, last_due[file])
                heapq.heappush(packets, (last_due[file], next(number), others[file], packet))
            while packets and packets[0][0] <= time.monotonic():
                _, _, file, packet = heapq.heappop(packets)
                os.write(file, packet)


def _tun(name: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return file


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
