"""Represent one generation request in the engine, from the queue to the delivered result."""

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from shared_schemas.trajectory import Sampling
from trainer_backend.errors import InferenceError
from trainer_backend.inference.actor import NO_EXTRAS, Extras, FinishReason, Generation, SampledToken
from trainer_backend.inference.prefixes import Prefix
from trainer_backend.inference.sampler import stream_key

# What a caller receives: a token while the request runs, and at its end the result or an error.
Outcome = SampledToken | Generation | InferenceError


@dataclass(slots=True, eq=False)
class Request:
    """A request. It belongs to the inbox until the engine admits it, and then to the engine thread.

    Of a prompt of n tokens, only n - 1 are computed and cached before the first decode step. This step
    computes the last prompt token, in the same way as later steps compute the sampled tokens.
    """

    request_id: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Generation]
    extras: Extras = NO_EXTRAS
    key: int = 0
    cached: int = 0
    """The number of tokens whose keys and values are in the cache."""
    reused: int = 0
    """The number of first tokens that needed no prefill, because they were in the cache already."""
    lost: int = 0
    """The number of further cached tokens that could not be reused, because no state was kept there."""
    marks: set[int] = field(default_factory=set)
    """The positions in the prompt at which a state is kept for later prompts."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    experts: list[NDArray[np.uint16]] = field(default_factory=list)
    """The experts of the cached tokens, in arrays [n tokens, W choices]; empty unless recorded."""
    arrival: int = 0
    """The position of the request in the order of arrival."""
    prefix: Prefix = field(init=False)
    """The tokens that must be cached before the request's first decode step in its current row."""

    def __post_init__(self) -> None:
        seed = self.sampling.seed if self.sampling.seed is not None else secrets.randbits(64)
        self.key = stream_key(seed, () if self.extras.common_draws else self.prompt_ids)
        self.cached = len(self.prompt_ids) - 1
        self.prefix = Prefix(self.prompt_ids[:-1], self.experts)

    @property
    def last_id(self) -> int:
        """Return the last known token, which the next decode step feeds to the model."""
        return self.token_ids[-1] if self.token_ids else self.prompt_ids[-1]

    def begin_again(self) -> None:
        """Prepare to wait for another row, in which the prefill includes the tokens sampled so far."""
        self.prefix = Prefix(self.cached_ids(), self.experts)

    def begin_experts(self, known: Prefix | None) -> None:
        """Discard all experts except those that the prefix `known` has for the reused tokens, if any."""
        reused = np.concatenate(known.experts)[: self.reused] if known and known.experts else None
        self.experts.clear()
        self.note_experts(reused)

    def note_experts(self, experts_LW: NDArray[np.uint16] | None) -> None:
        """Append the experts of the next tokens; None means that experts are not recorded."""
        if experts_LW is not None:
            self.experts.append(experts_LW.copy())  # a view would keep the memory of all rows of the pass

    def take(self, token: int, logprob: float) -> None:
        """Record a sampled token, and count the token before it as cached."""
        self.cached += 1
        self.token_ids.append(token)
        self.logprobs.append(logprob)

    def cached_ids(self) -> list[int]:
        """Return the ids whose keys and values are in the request's row."""
        return [*self.prompt_ids, *self.token_ids][: self.cached]

    def set_version(self, version: int) -> None:
        """Record that `version` samples all tokens from the next one on."""
        first_token = len(self.token_ids)
        if self.versions and self.versions[-1][1] == version:
            return
        if self.versions and self.versions[-1][0] == first_token:
            self.versions.pop()
        self.versions.append((first_token, version))

    def generation(self, finish_reason: FinishReason, *, stop_string: str | None = None) -> Generation:
        return Generation(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=finish_reason,
            versions=tuple(self.versions),
            stop_string=stop_string,
            prompt_tokens_reused=min(self.reused, len(self.prompt_ids)),
            likeliest=tuple(self.likeliest),
            experts=np.concatenate(self.experts) if self.experts else None,
        )


def read_rests(requests: Sequence[Request]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens that B requests still have to prefill.

    The result is the ids of all requests [T], and for each request the position of the first id and the
    number of ids, [B] each.
    """
    starts_B = np.array([request.reused for request in requests])
    counts_B = np.array([request.cached for request in requests]) - starts_B
    rests = chain.from_iterable(request.cached_ids()[request.reused :] for request in requests)
    return np.fromiter(rests, np.int64, count=int(counts_B.sum())), starts_B, counts_B


def deliver(outcomes: Iterable[tuple[Request, Outcome]]) -> None:
    """Deliver results to the event loops that wait for them, with one wake-up per loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Request, Outcome]]] = {}
    for request, outcome in outcomes:
        by_loop.setdefault(request.loop, []).append((request, outcome))
    for loop, pairs in by_loop.items():
        # Nothing waits in a closed loop, and its RuntimeError must not end the engine thread.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, pairs)


def _resolve(pairs: list[tuple[Request, Outcome]]) -> None:
    for request, outcome in pairs:
        if request.future.done():
            continue
        if isinstance(outcome, SampledToken):
            if request.extras.on_token is not None:
                request.extras.on_token(outcome)
        elif isinstance(outcome, InferenceError):
            request.future.set_exception(outcome)
        else:
            request.future.set_result(outcome)
