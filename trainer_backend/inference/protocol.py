"""What an inference engine offers: the local one here, others (vLLM) behind the same verbs."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from shared_schemas.trajectory import Sampling

FinishReason = Literal["stop", "length", "abort"]
# New weights: the tensors of a model's state_dict, or a folder with safetensors.
WeightSource = Mapping[str, Tensor] | Path | str


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token.

    Attributes:
        likeliest: (id, log-prob) of the most likely ones at its place, where asked for.
        lost_mass: the probability of what top_p and top_k took away there; None where they took nothing.
    """

    token_id: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()
    lost_mass: float | None = None


class StopRule(Protocol):
    """Decides from the sampled tokens, each given once and in order, whether to stop. One per request."""

    def take(self, token_id: int) -> str | None:
        """The stop string that this token completes, None to go on. It must not raise."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What a request may want beside its tokens.

    Attributes:
        likeliest: how many of the most likely tokens to tell at every place.
        stop: ends the generation, on the engine's side so that nothing is sampled past it.
        processed: tell log-probs of what was drawn from, top_p and top_k included (see `Generation`).
        on_token: called in the caller's event loop with each token as it comes; not with the one that ends
            the generation, which is known to do so only by `generate` returning.
    """

    likeliest: int = 0
    stop: StopRule | None = None
    processed: bool = False
    on_token: Callable[[Sampled], None] | None = None


NO_EXTRAS = Extras()


@dataclass(frozen=True, slots=True)
class Generation:
    """The sampled continuation of one prompt.

    Attributes:
        token_ids: sampled ids; the stop token is the last of them when one ended the generation.
        logprobs: of each of them under softmax(logits / temperature), before top_p and top_k (fp32), or
            after them, renormalised, where `Extras.processed` asked. With temperature 0, where that limit is
            degenerate, under softmax(logits).
        finish_reason: "stop" (a stop token or a stop string), "length" (max_tokens) or "abort" (what was
            sampled until then).
        versions: ((first_token, policy_version), ...): from which token on which weights sampled.
        stop_string: the one that its last token completed; None where none did.
        prompt_tokens_reused: prompt tokens whose keys and values were there already.
        likeliest: per token, as `Extras.likeliest` asked.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: tuple[tuple[int, int], ...]
    stop_string: str | None = None
    prompt_tokens_reused: int = 0
    likeliest: tuple[tuple[tuple[int, float], ...], ...] = ()

    def sampled(self) -> list[Sampled]:
        """Its tokens one by one."""
        tops = self.likeliest or ((),) * len(self.token_ids)
        return list(map(Sampled, self.token_ids, self.logprobs, tops))


class FrozenEngine(Protocol):
    """What the gateway needs of an engine: it generates from token ids, by weights that others look after.

    All methods may be called from any thread with a running event loop.
    """

    @property
    def version(self) -> int:
        """The policy version that samples now."""

    @property
    def max_model_len(self) -> int:
        """Most tokens that a prompt and its continuation may have together."""

    @property
    def breakdown(self) -> Future[str]:
        """Done, with the reason, once the engine has ended by itself and can answer nobody any more."""

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, request_id: str, extras: Extras = NO_EXTRAS
    ) -> Generation:
        """Sample a continuation of `ids`. Cancelling the call aborts the request.

        Raises:
            ContextLengthExceeded: prompt + max_tokens exceed `max_model_len`.
            InferenceError: see its leaves in `trainer_backend.errors`.
        """

    def start(self) -> None:
        """Start serving; a second call does nothing."""

    def stop(self) -> None:
        """Stop serving and wait for the end; what still waits or runs gets an InferenceError."""

    async def close(self) -> None:
        """Let go of what belongs to the running event loop. The gateway calls it before its loop ends."""


class InferenceEngine(FrozenEngine, Protocol):
    """An engine whose weights are replaced while it serves.

    The same seed, prompt and weights give the same tokens, whatever else is being generated.
    """

    async def load_weights(self, version: int, source: WeightSource) -> None:
        """Replace the weights. Running requests finish first and new ones wait; none is lost.

        Between `pause` and `resume` the swap is immediate instead: running requests go on with the new
        weights, and their `versions` say from which token. The keys and values of what they have so far stay
        those of the old weights, as in other servers; no other request ever gets any of them.

        Raises:
            WeightsRefused: the tensors do not fit; the old weights keep serving.
        """

    async def pause(self) -> None:
        """Stop sampling after the current step; requests stay where they are."""

    async def resume(self) -> None:
        """Go on after `pause`."""

    async def abort(self, request_id: str) -> bool:
        """End a request with what it has; False when no such request waits or runs."""
