"""Run the local engine: continuous batching of a causal language model on its own thread.

The thread repeats a *turn*: it admits waiting requests in order of arrival, prefills their prompts together,
and makes one decode step for all running requests. A turn prefills a limited number of tokens, so that
running requests do not wait long. Results are delivered to the event loop of the caller. This module contains
what callers use, `worker` runs the thread, and `inbox` connects the two.

The cache stores the keys and values of a running request in a *row*, and those of some finished requests in
*kept prefixes*. A new prompt reuses the longest beginning that a row or a kept prefix contains, and only its
other tokens are computed (`prefixes`).

On CUDA the cache is paged (`paged_runner`). A decode step is a CUDA graph there, the host reads the tokens of
a step while the next step runs, and a request that does not fit in memory waits. On other devices, a request
for which memory runs out ends with an error. If memory runs out while new weights are copied, the engine
frees kept prefixes and pages, and copies the weights again. If that fails too, the engine refuses all
requests until a later load succeeds.

The decode step is not compiled, because compiling takes longer than the first iteration of many runs. The
engine has no speculative decoding.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from operator import attrgetter

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from shared_schemas.trajectory import Sampling
from trainer_backend.errors import BadChatRequest, EngineTimeout
from trainer_backend.inference.actor import (
    NO_EXTRAS,
    Engine,
    Extras,
    Generation,
    WeightSource,
    refuse_too_long,
)
from trainer_backend.inference.batch import RunningBatch
from trainer_backend.inference.inbox import Inbox
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.inference.paged_runner import PageLimits
from trainer_backend.inference.request import Request
from trainer_backend.inference.tool_format import tool_format_in_use
from trainer_backend.inference.versions import PolicyVersion
from trainer_backend.inference.weights import ServedWeights, read_weights
from trainer_backend.inference.worker import EngineWorker
from trainer_backend.models.folder import embedding_rows
from trainer_backend.models.routers import recorded_routers

# Dividing fp32 logits by a lower temperature may overflow. Callers that want less randomness can send 0.
LOWEST_TEMPERATURE = 1e-3
# bench/decision_rate.py uses this name to find the CPU time of the thread.
ENGINE_THREAD = "turnwise-engine"


class LocalEngine(Engine):
    """Samples with a `transformers` model in this process; the weights can be replaced while it serves.

    The engine owns the model, so the learner must train another copy of it. The same seed, prompt and weights
    give the same tokens, whatever other requests run at the same time.

    Args:
        model: any causal model that a runner can compute (`runner`), in evaluation mode, on its device. Do
            not move it to another device later, because our decoder has joined its weights in memory
            (`decoder`).
        stop_ids: the token ids that end a generation (see `stop_token_ids`).
        keys: the settings of [inference]. None: the defaults, with the model's `max_position_embeddings` as
            `max_model_len`.
        read: finds the weights of a version. By default, it returns the folder of the version.
        paged: whether the cache is paged. None: it is paged if the device has kernels for pages (CUDA).
        prefill_tokens: the most tokens that a turn prefills, padding included. A longer prompt is prefilled
            alone.
    """

    request_timeout_s = order_timeout_s = 600.0
    stop_timeout_s = 30.0

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        stop_ids: Sequence[int],
        version: int = 0,
        keys: EngineKeys | None = None,
        read: Callable[[PolicyVersion], WeightSource] = attrgetter("folder"),
        paged: bool | None = None,
        prefill_tokens: int = 2048,
        max_waiting: int = 4096,
    ) -> None:
        self._read = read
        longest = model.config.get_text_config().max_position_embeddings
        self.keys = keys or EngineKeys(max_model_len=longest)
        self._vocabulary = embedding_rows(model)
        self._weights = ServedWeights(model)
        self._inbox = Inbox(max_waiting=max_waiting)
        self._worker = EngineWorker(
            RunningBatch(
                model,
                slots=self.keys.slots,
                max_len=self.keys.max_model_len,
                kept_prefixes=self.keys.prefix_slots,
                pages=PageLimits(paged, self.keys.cache_bytes),
                routers=recorded_routers(model, wanted=self.keys.replay_experts),
            ),
            self._inbox,
            stop_ids=frozenset(stop_ids),
            prefill_tokens=prefill_tokens,
            version=version,
        )
        self.breakdown, self.counters = self._worker.breakdown, self._worker.counters
        self._thread: threading.Thread | None = None

    @property
    def max_model_len(self) -> int:
        return self.keys.max_model_len

    @property
    def version(self) -> int:
        return self._worker.version

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, request_id: str, extras: Extras = NO_EXTRAS
    ) -> Generation:
        self._refuse_bad_prompt(ids, sampling)
        loop = asyncio.get_running_loop()
        request = Request(request_id, ids, sampling, loop, loop.create_future(), extras)
        self._inbox.submit(request)
        try:
            async with asyncio.timeout(self.request_timeout_s):
                return await request.future
        except TimeoutError as error:
            self._inbox.abort(request_id)
            raise EngineTimeout(f"request {request_id} took more than {self.request_timeout_s} s") from error
        except asyncio.CancelledError:
            self._inbox.abort(request_id)
            raise

    async def load(self, version: PolicyVersion) -> None:
        await self.load_weights(version.number, await asyncio.to_thread(self._read, version))

    async def load_weights(self, version: int, source: WeightSource) -> None:
        """Replace the weights without losing a request: running requests finish first, and new requests wait.

        Between `pause` and `resume`, the weights are replaced at once. Running requests then continue with
        the new weights, and the `versions` of their results record the token at which the version changed.
        These requests keep the keys and values of the old weights, as in other servers, but no other request
        reuses them.

        Raises:
            WeightsRefused: the tensors do not fit; the old weights keep serving.
            EngineOutOfMemory: memory ran out while weights were copied; the engine serves no request until a
                later load succeeds.
        """
        copy = partial(self._weights.replace, await asyncio.to_thread(read_weights, source))
        await self._wait_for(self._inbox.swap(partial(self._worker.swap, version, copy)))

    async def pause(self) -> None:
        """Stop sampling after the current step, until `resume`. Requests keep their rows or stay queued."""
        await self._wait_for(self._inbox.command(partial(setattr, self._worker, "paused", True)))

    async def resume(self) -> None:
        await self._wait_for(self._inbox.command(partial(setattr, self._worker, "paused", False)))

    async def probe(self) -> None:
        """Return once the engine's thread is between two steps, which shows that the thread responds."""
        await self._wait_for(self._inbox.command(lambda: None))

    async def release(self) -> None:
        await self._wait_for(self._inbox.command(self._worker.release))

    def totals(self) -> dict[str, float]:
        return asdict(self.counters)

    async def abort(self, request_id: str) -> bool:
        """End a request; its caller gets the partial result. Return False if no request has this id."""
        return self._inbox.abort(request_id)

    def start(self) -> None:
        if self._thread is not None:
            return
        self._inbox.open()
        self._thread = threading.Thread(
            target=self._worker.run, args=(self.keys.threads,), name=ENGINE_THREAD, daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._inbox.close("it was stopped")
        if self._thread is not None:
            self._thread.join(self.stop_timeout_s)

    async def _wait_for(self, future: Future[None]) -> None:
        try:
            async with asyncio.timeout(self.order_timeout_s):
                await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise EngineTimeout(f"not carried out within {self.order_timeout_s} s") from error

    def _refuse_bad_prompt(self, ids: Sequence[int], sampling: Sampling) -> None:
        if not ids:
            raise BadChatRequest("the prompt has no tokens", where="messages")
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            raise BadChatRequest(
                f"prompt ids must lie in [0, {self._vocabulary}), got {min(ids)} to {max(ids)}"
            )
        if 0.0 < sampling.temperature < LOWEST_TEMPERATURE:
            raise BadChatRequest(
                f"temperature {sampling.temperature} is neither 0 nor at least {LOWEST_TEMPERATURE}",
                where="temperature",
            )
        refuse_too_long(len(ids), sampling.max_tokens, self.max_model_len)


def stop_token_ids(
    generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerFast
) -> tuple[int, ...]:
    """Return the ids of all tokens that end an answer.

    They come from the model's generation config, its tokenizer and its tool-call format.
    """
    end_ids = generation.eos_token_id if generation is not None else None
    ids = end_ids if isinstance(end_ids, list) else [end_ids]
    ends = tool_format_in_use(tokenizer).ends
    own = [number for number, token in tokenizer.added_tokens_decoder.items() if token.content in ends]
    return tuple(sorted({int(i) for i in (*ids, *own, tokenizer.eos_token_id) if i is not None}))
