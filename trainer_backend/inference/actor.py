"""The interfaces of inference engines: with weights that others manage, and of the trained policy."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from shared_schemas.trajectory import Sampling
from trainer_backend.core.experts import ExpertColumns
from trainer_backend.inference.stop_strings import StopStrings
from trainer_backend.inference.versions import PolicyVersion

if TYPE_CHECKING:  # not at run time: checking a server needs no torch
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
# New weights: the tensors of a model's state_dict, or a folder with safetensors files.
WeightSource: TypeAlias = "Mapping[str, Tensor] | Path | str"


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token."""

    token_id: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()
    """(id, log-prob) of the most likely tokens at its place, if requested."""
    lost_mass: float | None = None
    """The probability that truncation removed there; None without it."""


@dataclass(frozen=True, slots=True)
class Extras:
    """Optional parts of a request."""

    likeliest: int = 0
    """How many of the most likely tokens to report at every place; none is reported where memory runs out for
    them."""
    stop: StopStrings | None = None
    """Ends the generation in the engine, so that nothing is sampled beyond it. One per request."""
    processed: bool = False
    """Report log-probs after truncation (see `Generation`)."""
    on_token: Callable[[SampledToken], None] | None = None
    """Called in the caller's event loop with each token except the one that ends the generation, which only
    the return of `generate` reveals."""
    session: str = ""
    """The rollout of the request, whose prompts begin alike; "" for none."""
    common_draws: bool = False
    """The random numbers follow from the seed alone, and not from the prompt too. An engine that has no seeds
    of its own ignores it."""


NO_EXTRAS = Extras()


@dataclass(frozen=True, slots=True)
class Generation:
    """The sampled continuation of one prompt."""

    token_ids: tuple[int, ...]
    """Sampled ids, including a stop token that ended the generation."""
    logprobs: tuple[float, ...]
    """Log-prob of each id under softmax(logits / temperature), before truncation (fp32); after it,
    renormalised, if `Extras.processed` is set. At temperature 0, where that is degenerate, under
    softmax(logits)."""
    finish_reason: FinishReason
    """How it ended: "stop" (a stop token or string), "length" (max_tokens) or "abort" (a partial result)."""
    versions: tuple[tuple[int, int], ...]
    """((first_token, policy_version), ...): the weights from each first token on."""
    stop_string: str | None = None
    """The one that its last token completed, or None."""
    prompt_tokens_reused: int = 0
    """Prompt tokens whose keys and values were cached."""
    likeliest: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Per token, as `Extras.likeliest` requests."""
    experts: ExpertColumns | None = None
    """[L, W] the experts of all tokens of the prompt and the continuation but for the last one, where the
    engine records them (`models.routers`)."""

    def sampled(self) -> list[SampledToken]:
        """Return its tokens one by one."""
        tops = self.likeliest or ((),) * len(self.token_ids)
        return list(map(SampledToken, self.token_ids, self.logprobs, tops))


class FrozenEngine(Protocol):
    """An engine that generates from token ids, with weights that others manage. It may be called from any
    thread with a running event loop. A subclass leaves out what it need not do.
    """

    breakdown: Future[str]
    """Done, with the reason, once the engine has failed and can answer no more."""

    @property
    def version(self) -> int:
        """The policy version that samples now."""

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and its continuation together."""

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
        return

    def stop(self) -> None:
        """Stop serving and wait for the end; unfinished requests get an InferenceError."""
        return

    async def close(self) -> None:
        """Release what belongs to the running event loop. The gateway calls it before its loop ends."""
        return


class Engine(FrozenEngine, Protocol):
    """The engine of the actor, whose weights are replaced: `LocalEngine`, or the `Servers` of vLLM."""

    async def load(self, version: PolicyVersion) -> None:
        """Serve this version from now on; WeightsRefused: the one before is still served."""

    async def release(self) -> None:
        """Free the memory that it shares with the learner, because nothing is sampled for a while."""
        return

    def totals(self) -> dict[str, float]:
        """Counts since its start: requests, prompt_tokens, sampled_tokens, steps, and more."""

    async def probe(self) -> None:
        """Return once it has given a sign of life."""
        return

    async def look_after(self) -> None:
        """Keep it serving, as long as that needs something; an error says why it cannot be kept."""
        return

    def watch(self, report: Callable[..., None]) -> None:
        """Report its processes, if it has any, and each change of one; `report` is `Reporter.process`."""
        return
