"""One generation on its way through the engine, from the waiting line to the delivered result."""

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from shared_schemas.trajectory import Sampling
from trainer_backend.errors import InferenceError
from trainer_backend.inference.protocol import FinishReason, Generation
from trainer_backend.inference.sampler import stream_key

Outcome = Generation | InferenceError


@dataclass(slots=True, eq=False)
class Request:
    """Owned by the engine thread once admitted; before that by the waiting line.

    `cached` counts the tokens whose keys and values are in the cache; `next_token` is the one that the
    next step feeds. So a prompt of n tokens enters with n - 1 cached, its last one fed like a sampled token.
    """

    request_id: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Generation]
    key: int = 0
    cached: int = 0
    next_token: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        seed = self.sampling.seed if self.sampling.seed is not None else secrets.randbits(64)
        self.key = stream_key(seed, self.prompt_ids)
        self.cached = len(self.prompt_ids) - 1
        self.next_token = self.prompt_ids[-1]

    def take(self, token: int, logprob: float) -> None:
        """The step fed `next_token` and sampled `token` after it."""
        self.cached += 1
        self.next_token = token
        self.token_ids.append(token)
        self.logprobs.append(logprob)

    def sampled_by(self, version: int) -> None:
        """From the next token on, `version` samples."""
        first_token = len(self.token_ids)
        if self.versions and self.versions[-1][0] == first_token:
            self.versions.pop()
        self.versions.append((first_token, version))

    def ended(self, finish_reason: FinishReason) -> Generation:
        return Generation(tuple(self.token_ids), tuple(self.logprobs), finish_reason, tuple(self.versions))


def deliver(outcomes: Iterable[tuple[Request, Outcome]]) -> None:
    """Hand results to the event loops that wait for them: one wake-up a loop, not one a request."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Request, Outcome]]] = {}
    for request, outcome in outcomes:
        by_loop.setdefault(request.loop, []).append((request, outcome))
    for loop, pairs in by_loop.items():
        # A loop that was closed has nobody left who waits, and must not end the engine thread.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, pairs)


def _resolve(pairs: list[tuple[Request, Outcome]]) -> None:
    for request, outcome in pairs:
        if request.future.done():
            continue
        if isinstance(outcome, InferenceError):
            request.future.set_exception(outcome)
        else:
            request.future.set_result(outcome)
