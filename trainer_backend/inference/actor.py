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

# Not imported at run time, because a command that only checks a server should not load torch.
if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
# New weights: the tensors of a model's state_dict, or a folder with safetensors files.
WeightSource: TypeAlias = "Mapping[str, Tensor] | Path | str"


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()
    """The most likely tokens at the position of this token, as pairs (id, log-prob); empty unless
    requested."""
    lost_mass: float | None = None
    """The probability mass that truncation (such as top-p) removed at the position of this token; None if the
    request does not truncate."""


@dataclass(frozen=True, slots=True)
class Extras:
    """Optional settings of a generation request."""

    likeliest: int = 0
    """How many of the most likely tokens to report at every position. At a position where memory is too short
    for them, the engine reports none."""
    stop: StopStrings | None = None
    """Stop strings: the engine ends the generation once the sampled text contains one of them. The object
    keeps the state of the search, so each request needs its own object."""
    processed: bool = False
    """Report log-probs after truncation instead of before it (see `Generation.logprobs`)."""
    on_token: Callable[[SampledToken], None] | None = None
    """A callback for streaming. It receives each sampled token except the last one, in the caller's event
    loop; only the result of `generate` contains the last token."""
    session: str = ""
    """The id of the rollout that sends the request, or "". The prompts of a rollout share a long prefix, so
    an engine with several servers sends all of them to one server."""
    common_draws: bool = False
    """Derive the random numbers from the seed alone, so that requests with different prompts draw the same
    numbers. By default they depend on the prompt too. Engines without seeds ignore this option."""


NO_EXTRAS = Extras()


@dataclass(frozen=True, slots=True)
class Generation:
    """The sampled continuation of one prompt."""

    token_ids: tuple[int, ...]
    """The sampled ids. If a stop token ended the generation, it is the last id."""
    logprobs: tuple[float, ...]
    """The log-prob of each sampled id, in fp32. It is taken before truncation, under softmax(logits /
    temperature). If `Extras.processed` is set, it is taken after truncation, under the renormalised
    distribution. At temperature 0 it is taken under softmax(logits)."""
    finish_reason: FinishReason
    """Why the generation ended: "stop" (a stop token or a stop string), "length" (`max_tokens` was reached)
    or "abort" (the request was aborted, so the result is partial)."""
    versions: tuple[tuple[int, int], ...]
    """Pairs (first_token, policy_version): the version sampled the tokens from index `first_token` on, up to
    the `first_token` of the next pair."""
    stop_string: str | None = None
    """The stop string that the last token completed, or None."""
    prompt_tokens_reused: int = 0
    """The number of prompt tokens whose keys and values were taken from the cache."""
    likeliest: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each position, the `Extras.likeliest` most likely tokens, as pairs (id, log-prob)."""
    experts: ExpertColumns | None = None
    """The experts that the routers chose, [L, W]: the W choices of all layers for each token of prompt and
    continuation. The last token has no row. None unless the engine records experts (`models.routers`)."""

    def sampled(self) -> list[SampledToken]:
        tops = self.likeliest or ((),) * len(self.token_ids)
        return list(map(SampledToken, self.token_ids, self.logprobs, tops))


def refuse_too_long(
    prompt_tokens: int, max_tokens: int, max_model_len: int, whose: str = "the model's own"
) -> None:
    """Raise ContextLengthExceeded if `prompt_tokens` + `max_tokens` exceeds `max_model_len`.

    `whose` tells the reader of the error message where the limit comes from.
    """
    if prompt_tokens + max_tokens > max_model_len:
        raise ContextLengthExceeded(
            prompt_tokens=prompt_tokens, max_tokens=max_tokens, max_model_len=max_model_len, whose=whose
        )


class FrozenEngine(Protocol):
    """An engine that samples continuations of token ids and has no method to load weights.

    Any thread with a running event loop may call the engine. Methods whose body is a bare `return` do nothing
    by default; a subclass overrides those that it needs.
    """

    breakdown: Future[str]
    """If the engine fails for good, the reason becomes the result of this future."""

    @property
    def version(self) -> int:
        """Return the number of the policy version that the engine currently samples from."""

    @property
    def max_model_len(self) -> int:
        """Return the largest total number of tokens of a prompt and its continuation."""

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, request_id: str, extras: Extras = NO_EXTRAS
    ) -> Generation:
        """Sample a continuation of `ids`. Cancelling the call aborts the request.

        Raises:
            ContextLengthExceeded: the prompt and `max_tokens` together exceed `max_model_len`.
            InferenceError: any other failure; `trainer_backend.errors` lists its subclasses.
        """

    def start(self) -> None:
        """Start the engine; a second call does nothing."""
        return

    def stop(self) -> None:
        """Stop the engine and wait until it has ended. Unfinished requests raise an InferenceError."""
        return

    async def close(self) -> None:
        """Release resources that belong to the running event loop, such as connections.

        The gateway calls `close` before its loop ends.
        """
        return


class Engine(FrozenEngine, Protocol):
    """An engine whose weights can be replaced. It samples for the actor, the policy in training.

    Implementations are `LocalEngine`, and `Servers` for vLLM.
    """

    async def load(self, version: PolicyVersion) -> None:
        """Load the weights of `version`, and sample with them from now on.

        Raises:
            WeightsRefused: the weights do not fit the model, or no server loaded them in time.
        """

    async def release(self) -> None:
        """Give device memory back, so that the learner can use it until the next `load`."""
        return

    def totals(self) -> dict[str, float]:
        """Return counters since the start by name, such as `requests` and `sampled_tokens`."""

    async def probe(self) -> None:
        """Return once the engine has responded. With a timeout, a caller can thus detect a hanging engine."""
        return

    async def look_after(self) -> None:
        """Watch the engine, and restore parts that fail; raise an error if the engine cannot continue."""
        return

    def watch(self, report: Callable[..., None]) -> None:
        """Call `report` for each process of the engine: now, and whenever the state of the process changes.

        `report` has the parameters of `Reporter.process`.
        """
        return
