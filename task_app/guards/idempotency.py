"""`Idempotency-Key`: a request that is sent again is answered again, and not carried out again. No I/O.

`task_app.guards.once` is the ASGI middleware around it.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

from task_app.errors import CapacityReached, IdempotencyConflict

RawHeaders = tuple[tuple[bytes, bytes], ...]

# The key and digest of the request that is being carried out, for whoever makes its effects durable.
CLAIM: ContextVar["Claim | None"] = ContextVar("claim", default=None)


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, as it was sent."""

    status: int
    headers: RawHeaders
    body: bytes

    @property
    def size(self) -> int:
        return len(self.body) + sum(len(name) + len(value) for name, value in self.headers)


class Touched(Protocol):
    """A file that says what a request did (task_app.journal.sessions)."""

    def catch_up(self) -> None:
        """Write what could not be written when it happened; raises OSError."""

    def told(self, claim: "Claim") -> None:
        """The claim has been answered, which survives the process."""


@dataclass(slots=True, eq=False)
class Claim:
    """One key: the request that it was first seen with, and its answer once there is one.

    `written`: the answer survives the process, or need not; nobody is told of it before. `touched`: the files
    that say what was done for it, by session, until they know that it has been answered.
    """

    key: str
    digest: str
    taken_s: float
    answer: Answer | None = None
    written: bool = False
    touched: dict[str, Touched] = field(default_factory=dict)
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def due(self) -> tuple[str, str]:
        """What names the request in a file."""
        return self.key, self.digest

    @property
    def is_over(self) -> bool:
        """Answered, and no file is yet to know of it: it may be forgotten."""
        return self.answer is not None and not self.touched


class Answers:
    """The keys of late, and what was answered; bounded in number, bytes and age, oldest forgotten first.

    Args:
        most: keys.
        most_bytes: of all answers together.
        most_s: a key is forgotten after this long.
        clock: seconds that only grow.
    """

    def __init__(
        self, *, most: int, most_bytes: int, most_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self.most_bytes = most_bytes
        self.most_s = most_s
        self.clock = clock
        self._claims: OrderedDict[str, Claim] = OrderedDict()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._claims)

    def get(self, key: str) -> Claim | None:
        """Whatever is known of a key; looking forgets nothing."""
        return self._claims.get(key)

    def restore(self, key: str, digest: str, answer: Answer) -> Claim:
        """Remember what the process before had answered: the last one, if the key came again."""
        if (earlier := self._claims.get(key)) is not None:
            self._forget(earlier)
        claim = self.take(key, digest)
        self.settle(claim, answer)
        return claim

    def find(self, key: str, digest: str) -> Claim | None:
        """The earlier claim of this request, or None if the key is new.

        Raises:
            IdempotencyConflict: the key came with another request.
        """
        self._forget_old()
        claim = self._claims.get(key)
        if claim is not None and claim.digest != digest:
            raise IdempotencyConflict(
                "this Idempotency-Key came with another request before",
                where="header Idempotency-Key",
                hint="a new request needs a new key; a retry repeats method, path and body byte for byte",
            )
        return claim

    def take(self, key: str, digest: str) -> Claim:
        """Claim a new key for a request that is to be carried out now.

        Raises:
            CapacityReached: that many keyed requests are being carried out already.
        """
        if len(self._claims) >= self._most and not self._forget_oldest():
            raise CapacityReached(f"{self._most} requests with an Idempotency-Key are being carried out")
        claim = self._claims[key] = Claim(key, digest, taken_s=self.clock())
        return claim

    def settle(self, claim: Claim, answer: Answer) -> None:
        """Keep the answer, and let those who wait for it go on."""
        claim.answer = answer
        claim.settled.set()
        self.held_bytes += answer.size
        while self.held_bytes > self.most_bytes and self._forget_oldest():
            pass

    def release(self, claim: Claim) -> None:
        """The request was not carried out: whoever sends it again may."""
        if self._claims.get(claim.key) is claim:
            del self._claims[claim.key]
        claim.settled.set()

    def _forget_old(self) -> None:
        before_s = self.clock() - self.most_s
        old = takewhile(lambda claim: claim.taken_s < before_s, self._claims.values())
        for claim in [claim for claim in old if claim.is_over]:
            self._forget(claim)

    def _forget_oldest(self) -> bool:
        """Of those that are over: what is being carried out stays claimed."""
        claim = next((claim for claim in self._claims.values() if claim.is_over), None)
        if claim is not None:
            self._forget(claim)
        return claim is not None

    def _forget(self, claim: Claim) -> None:
        del self._claims[claim.key]
        self.held_bytes -= claim.answer.size if claim.answer is not None else 0


def request_digest(method: str, raw_path: bytes, query: bytes, body: bytes) -> str:
    """Of all that makes two requests the same; the lengths keep the parts apart."""
    parts = (method.encode(), raw_path, query, body)
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hashlib.blake2b(framed, digest_size=16).hexdigest()
