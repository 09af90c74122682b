"""One generation on its way through the engine, from the waiting line to the delivered result."""

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from shared_schemas.trajectory import Sampling
from trainer_backend.errors import InferenceError
from trainer_backend.inference.prefixes import Held
from trainer_backend.inference.protocol import NO_EXTRAS, Extras, FinishReason, Generation, Sampled
from trainer_backend.inference.sampler import stream_key

# A token on the way, or how the request ended.
Outcome = Sampled | Generation | InferenceError


@dataclass(slots=True, eq=False)
class Request:
    """Owned by the engine thread once admitted; before that by the waiting line.

    `cached` counts the tokens whose keys and values are in the cache; `next_token` is the one that the
    next step feeds. So a prompt of n tokens enters with n - 1 cached, its last one fed like a sampled token.
    `held` are those n - 1; `reused` of them needed no prefill.
    """

    request_id: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Generation]
    extras: Extras = NO_EXTRAS
    key: int = 0
    cached: int = 0
    reused: int = 0
    next_token: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    held: Held = field(init=False)

    def __post_init__(self) -> None:
        seed = self.sampling.seed if self.sampling.seed is not None else secrets.randbits(64)
        self.key = stream_key(seed, self.prompt_ids)
        self.cached = len(self.prompt_ids) - 1
        self.next_token = self.prompt_ids[-1]
        self.held = Held(self.prompt_ids[:-1])

    def take(self, sampled: Sampled) -> None:
        """The step fed `next_token` and sampled this after it."""
        self.cached += 1
        self.next_token = sampled.token_id
        self.token_ids.append(sampled.token_id)
        self.logprobs.append(sampled.logprob)
        if self.extras.likeliest:
            self.likeliest.append(sampled.likeliest)

    def cached_ids(self) -> list[int]:
        """The ids whose keys and values stand in the request's row."""
        return [*self.prompt_ids, *self.token_ids][: self.cached]

    def sampled_by(self, version: int) -> None:
        """From the next token on, `version` samples."""
        first_token = len(self.token_ids)
        if self.versions and self.versions[-1][0] == first_token:
            self.versions.pop()
        self.versions.append((first_token, version))

    def ended(self, finish_reason: FinishReason, *, stop_string: str | None = None) -> Generation:
        return Generation(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=finish_reason,
            versions=tuple(self.versions),
            stop_string=stop_string,
            prompt_tokens_reused=self.reused,
            likeliest=tuple(self.likeliest),
        )


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
        if isinstance(outcome, Sampled):
            if request.extras.on_token is not None:
                request.extras.on_token(outcome)
        elif isinstance(outcome, InferenceError):
            request.future.set_exception(outcome)
        else:
            request.future.set_result(outcome)
