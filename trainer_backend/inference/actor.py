"""Define the interfaces of engines: `FrozenEngine` has fixed weights, `Engine` also loads new weights."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from shared_schemas.trajectory import Sampling
from trainer_backend.core.experts import ExpertColumns
from trainer_backend.errors import ContextLengthExceeded
from trainer_backend.inference.stop_strings import StopStrings
from trainer_backend.inference.versions import PolicyVersion

if TYPE_CHECKING:  # not at run time: checking a server needs no torch
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
# New weights: the tensors of a model's state_dict, or a folder with safetensors files.
WeightSource: TypeAlias = "Mapping[str, Tensor] | Path | str"


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()
    """(id, log-prob) of the most likely tokens at its position, if requested."""
    lost_mass: float | None = None
    """The probability that truncation removed at its position; None without truncation."""


@dataclass(frozen=True, slots=True)
class Extras:
    """Optional parts of a request."""

    likeliest: int = 0
    """How many of the most likely tokens to report at every position; the engine reports none if memory runs
    out."""
    stop: StopStrings | None = None
    """The stop strings that end the generation inside the engine. Each request needs its own object."""
    processed: bool = False
    """Report log-probs after truncation (see `Generation`)."""
    on_token: Callable[[SampledToken], None] | None = None
    """Called in the caller's event loop with each token except the last one, which only the result of
    `generate` holds."""
    session: str = ""
    """The id of the rollout that sends the request; prompts of a rollout begin alike. "" for none."""
    common_draws: bool = False
    """Derive the random numbers from the seed alone, not from the seed and the prompt. Engines without seeds
    ignore this option."""


NO_EXTRAS = Extras()


@dataclass(frozen=True, slots=True)
class Generation:
    """The sampled continuation of one prompt."""

    token_ids: tuple[int, ...]
    """Sampled ids, including a stop token that ended the generation."""
    logprobs: tuple[float, ...]
    """Log-prob of each id under softmax(logits / temperature), before truncation (fp32). If
    `Extras.processed` is set: after truncation, renormalised. At temperature 0: under softmax(logits)."""
    finish_reason: FinishReason
    """Why the generation ended: "stop" (a stop token or string), "length" (max_tokens) or "abort" (a partial
    result)."""
    versions: tuple[tuple[int, int], ...]
    """((first_token, policy_version), ...): the version that sampled from each first token on."""
    stop_string: str | None = None
    """The stop string that the last token completed, or None."""
    prompt_tokens_reused: int = 0
    """Prompt tokens whose keys and values were cached."""
    likeliest: tuple[tuple[tuple[int, float], ...], ...] = ()
    """(id, log-prob) of the most likely tokens at each position, as many as `Extras.likeliest` requests."""
    experts: ExpertColumns | None = None
    """The experts, [L, W], of all tokens of prompt and continuation except the last token; None unless the
    engine records experts (`models.routers`)."""

    def sampled(self) -> list[SampledToken]:
        tops = self.likeliest or ((),) * len(self.token_ids)
        return list(map(SampledToken, self.token_ids, self.logprobs, tops))


def refuse_too_long(
    prompt_tokens: int, max_tokens: int, max_model_len: int, whose: str = "the model's own"
) -> None:
    """Raise ContextLengthExceeded if prompt and answer exceed a limit; `whose` says whose limit it is."""
    if prompt_tokens + max_tokens > max_model_len:
        raise ContextLengthExceeded(
            prompt_tokens=prompt_tokens, max_tokens=max_tokens, max_model_len=max_model_len, whose=whose
        )


class FrozenEngine(Protocol):
    """An engine that generates from token ids and does not load weights itself.

    Any thread with a running event loop may call the engine. A subclass overrides only what it needs.
    """

    breakdown: Future[str]
    """This future gets the reason as its result once the engine has failed for good."""

    @property
    def version(self) -> int:
        """Return the policy version that samples now."""

    @property
    def max_model_len(self) -> int:
        """Return the largest number of tokens of prompt and continuation together."""

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, request_id: str, extras: Extras = NO_EXTRAS
    ) -> Generation:
        """Sample a continuation of `ids`. Cancelling the call aborts the request.

        Raises:
            ContextLengthExceeded: prompt + max_tokens exceed `max_model_len`.
            InferenceError: see its leaves in `trainer_backend.errors`.
        """

    def start(self) -> None:
        """Start the engine; a second call does nothing."""
        return

    def stop(self) -> None:
        """Stop the engine and wait for its end; unfinished requests get an InferenceError."""
        return

    async def close(self) -> None:
        """Release what belongs to the running event loop. The gateway calls `close` before its loop ends."""
        return


class Engine(FrozenEngine, Protocol):
    """The actor's engine, whose weights are replaced: `LocalEngine`, or `Servers` for vLLM."""

    async def load(self, version: PolicyVersion) -> None:
        """Serve this version from now on.

        Raises:
            WeightsRefused: the engine still serves the version before.
        """

    async def release(self) -> None:
        """Free the memory that the engine shares with the learner, until the next load."""
        return

    def totals(self) -> dict[str, float]:
        """Return counts since the start: requests, prompt_tokens, sampled_tokens, steps, and more."""

    async def probe(self) -> None:
        """Return once the engine has given a sign of life."""
        return

    async def look_after(self) -> None:
        """Keep the engine serving; raise an error that says why, if the engine cannot continue."""
        return

    def watch(self, report: Callable[..., None]) -> None:
        """Call `report` (`Reporter.process`) for each process of the engine, now and at each change."""
        return
