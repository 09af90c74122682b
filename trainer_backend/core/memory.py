"""How much memory a run needs, by kind, before anything is loaded: arithmetic over shapes and limits.

How far it can be relied on: what is counted in weights is exact. `cache` is at its fullest: the engine's
rows, one for each request that may run, are all as wide as the longest of them, so one sequence as long as
allowed fills it but for the kept prefixes. In pages, as on CUDA, a row is as long as its own request, and the
memory is given back while the learner works, unless iterations are collected ahead. `activations` are those
of a full micro-batch, what autograd keeps for layers like Llama's and Qwen3's: within 10 % of what was
counted on both, in float32 under a mask and in bfloat16 over one row; other architectures may be a third
away. What the allocator and the libraries themselves need is the flat OVERHEAD of a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer_backend.core.logprobs import BYTES_PER_LOGIT

FLOAT32, BFLOAT16 = 4, 2
# AdamW: two moments in float32.
MOMENTS = 8
# Of a number of a step's logits: a copy that stays, and what sampling holds beside it at a time, which all
# CUDA graphs share. Truncation needs most of it, for sorted probabilities, their order and sums.
SAMPLING = FLOAT32 + 48
# CUDA's context, the libraries' workspaces, and what the allocator cannot reuse.
OVERHEAD = 2**30


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder that decide how much memory it needs.

    parameters: all weights, tied ones once.
    adapters: weights of the adapters; 0 without [lora].
    critic: weights of a critic's head, and of its own layers where it has some; 0 without one.
    head_norms: whether queries and keys are normed head by head, as in Qwen3.
    vectors: weights of norms and biases, which are float32 everywhere; `parameters` counts them too.
    ends: weights outside of the layers, such as embedding and head; `parameters` counts them too.
    has_kernels: whether the learner has kernels for its layers (`learner.operators`).
    """

    parameters: int
    layers: int
    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    adapters: int = 0
    critic: int = 0
    head_norms: bool = False
    vectors: int = 0
    ends: int = 0
    has_kernels: bool = False

    @property
    def layer(self) -> int:
        """Weights of a layer."""
        return (self.parameters - self.ends) // self.layers

    @property
    def trained(self) -> int:
        return (self.adapters or self.parameters) + self.critic

    def frozen_bytes(self, matrices: int) -> int:
        """Bytes of all its weights but adapters and value head, for a copy that nobody trains.

        Args:
            matrices: bytes of a number in a matrix.
        """
        return self.parameters * matrices + self.vectors * (FLOAT32 - matrices)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUse:
    """What an engine does with a model.

    low: whether products, and copies that nobody trains, are bfloat16; otherwise float32.
    running, kept: rows and kept prefixes of the cache, each of up to `cached_tokens`.
    paged: whether caches are in pages (where there are kernels): requests wait where not all of them fit.
    cache_bytes: the most that an engine's cache in pages may take, but for one row; None for no such limit.
    """

    low: bool
    running: int
    kept: int
    cached_tokens: int
    paged: bool = False
    cache_bytes: int | None = None

    @property
    def held(self) -> int:
        """Bytes of a number in the cache, and in a matrix that nobody trains."""
        return BFLOAT16 if self.low else FLOAT32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How the ranks of a learner share the model's weights out; adapters and a value head are whole on each.

    parts: ranks that hold all weights together.
    count: ranks.
    here: ranks of this node, which share its main memory.
    reshards: whether a layer's weights are freed after its forward pass (learner.fsdp_reshard_after_forward).
    offload: whether the shares are in main memory (learner.fsdp_cpu_offload).
    """

    parts: int
    count: int
    here: int
    reshards: bool = True
    offload: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse(EngineUse):
    """What a run does with a model: it serves the model and trains it.

    masked: whether attention is masked over rows of several segments, or runs over one long row.
    fused: whether layers compute by kernels that keep less for the backward pass (`learner.operators`).
    row_tokens: width of the widest row: a segment may be as long as the engine's longest sequence.
    micro_batch_tokens: tokens of one forward and backward, at least a row.
    logits_chunk: tokens whose logits exist at a time.
    reference: whether a second copy is held for the KL term.
    checkpointing: whether each layer keeps its input alone (training.gradient_checkpointing).
    offload: whether AdamW's moments are in main memory (training.optimizer_offload).
    values_by_token: whether a critic reads every sampled token's state, which it keeps in float32.
    engines: how many of this machine sample, each with a copy and a cache; 0: other servers do.
    processes: how many use the device.
    sharing: None: the learner is one process, which has all weights.
    """

    masked: bool
    row_tokens: int
    micro_batch_tokens: int
    logits_chunk: int
    reference: bool = False
    checkpointing: bool = False
    offload: bool = False
    values_by_token: bool = False
    engines: int = 1
    processes: int = 1
    sharing: Sharing | None = None
    fused: bool = False


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes by kind.

    device: on the device that computes, each kind at its fullest; of a rank, on its own device.
    host: in main memory beside a GPU, of all ranks of a node; on a CPU, whose main memory is the device, what
        its ranks need at the start alone.
    least: the least that the device must hold: no kept prefixes, and activations at the lower end of the
        estimate; of a cache in pages, one request as long as allowed.
    """

    device: dict[str, int]
    host: dict[str, int]
    least: int


def memory_needs(
    shape: ModelShape, use: MemoryUse, *, is_gpu: bool, fixed: Sequence[ModelShape] = ()
) -> MemoryNeeds:
    """What a run holds at its peak, in an optimizer step.

    Args:
        fixed: shapes of the fixed policies that are served beside it, each with a cache of its own.

    Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 3 (weights, gradients, moments).
    """
    learner = _learner_needs(shape, use, is_gpu=is_gpu)
    if use.sharing is not None and not is_gpu:  # the ranks of a node have one memory
        learner = {kind: use.sharing.here * size for kind, size in learner.items()}
    device = learner | {
        "engine": use.engines * (shape.frozen_bytes(use.held) + shape.adapters * use.held),
        "cache": use.engines * cache(shape, use),
        "sampling": use.engines * sampling(shape, use) + sum(sampling(other, use) for other in fixed),
        "fixed": sum(other.frozen_bytes(use.held) for other in fixed),
        "fixed cache": sum(cache(other, use) for other in fixed),
        "overhead": use.processes * OVERHEAD if is_gpu else 0,
    }
    caches = device["cache"] + device["fixed cache"]
    of_a_row = use.engines * cached_row(shape, use) + sum(cached_row(other, use) for other in fixed)
    needed = of_a_row * (1 if use.paged else use.running)
    unsure = device["activations"] / 3 + caches - needed
    device = {kind: size for kind, size in device.items() if size}
    host = _main_memory_needs(shape, use, fixed, is_gpu=is_gpu)
    return MemoryNeeds(device, host, int(sum(device.values()) - unsure))


def _learner_needs(shape: ModelShape, use: MemoryUse, *, is_gpu: bool) -> dict[str, int]:
    """Of a learner's process, or of each of its ranks."""
    held, reference = _held(shape, use), _reference(shape, use)
    moments = 0 if use.offload and is_gpu else held.moments
    if use.sharing is not None and use.sharing.offload and is_gpu:
        held, moments = _whole(shape), _whole(shape).moments
        reference = shape.adapters * FLOAT32 if use.reference else 0
    return {
        "weights": held.weights,
        "gradients": held.gradients,
        "optimizer": moments,
        "gathered": 0 if use.sharing is None else gathered(shape, use, use.sharing),
        "reference": reference,
        "activations": activations(shape, use),
        "logits": logits(shape, use),
        "values": use.micro_batch_tokens * shape.width * 2 * FLOAT32 if use.values_by_token else 0,
    }


@dataclass(frozen=True, slots=True)
class _Held:
    """Bytes that a process holds of a model from step to step."""

    weights: int
    gradients: int
    moments: int


def _whole(shape: ModelShape) -> _Held:
    """Of adapters and value head, which every rank has whole."""
    count = shape.adapters + shape.critic
    return _Held(count * FLOAT32, count * FLOAT32, count * MOMENTS)


def _shared(shape: ModelShape, use: MemoryUse) -> _Held:
    """Of the model's own weights, of which a rank has a part."""
    parts = 1 if use.sharing is None else use.sharing.parts
    weights = shape.frozen_bytes(use.held if shape.adapters else FLOAT32)
    trained = 0 if shape.adapters else shape.parameters
    return _Held(*(-(-size // parts) for size in (weights, trained * FLOAT32, trained * MOMENTS)))


def _held(shape: ModelShape, use: MemoryUse) -> _Held:
    whole, shared = _whole(shape), _shared(shape, use)
    return _Held(
        whole.weights + shared.weights, whole.gradients + shared.gradients, whole.moments + shared.moments
    )


def _reference(shape: ModelShape, use: MemoryUse) -> int:
    """Of the policy that RL started from: its adapters, or a copy of the model, shared out like the model."""
    if not use.reference:
        return 0
    parts = 1 if use.sharing is None else use.sharing.parts
    return shape.adapters * FLOAT32 or -(-shape.frozen_bytes(use.held) // parts)


def gathered(shape: ModelShape, use: MemoryUse, sharing: Sharing) -> int:
    """Bytes that a rank gathers of weights that are shared out, and of their gradients before it sums them.

    What is outside of the layers is whole for as long as a pass takes, of the layers one that is computed and
    the next one, or all of them where they are kept.

    Source: torch.distributed.fsdp.fully_shard (its prefetch in the backward pass).
    """
    units = shape.ends + min(2, shape.layers) * shape.layer
    weights = (units if sharing.reshards else shape.parameters) * (use.held if shape.adapters else FLOAT32)
    return weights + (0 if shape.adapters else units * FLOAT32)


def serving_needs(shape: ModelShape, use: EngineUse, *, is_gpu: bool) -> MemoryNeeds:
    """What an engine holds of a model that nobody trains. The model must fit; the cache grows with use."""
    weights, overhead = shape.frozen_bytes(use.held), OVERHEAD if is_gpu else 0
    device = {
        "engine": weights,
        "cache": cache(shape, use),
        "sampling": sampling(shape, use),
        "overhead": overhead,
    }
    return MemoryNeeds({kind: size for kind, size in device.items() if size}, {}, weights + overhead)


def cached_row(shape: ModelShape, use: EngineUse) -> int:
    """Keys and values of one longest request."""
    return use.cached_tokens * 2 * shape.layers * shape.kv_heads * shape.head_dim * use.held


def cache(shape: ModelShape, use: EngineUse) -> int:
    """Keys and values of an engine at its fullest."""
    row = cached_row(shape, use)
    fullest = (use.running + use.kept) * row
    if not use.paged or use.cache_bytes is None:
        return fullest
    return min(fullest, max(use.cache_bytes, row))


def sampling(shape: ModelShape, use: EngineUse) -> int:
    """What the steps of an engine in pages keep for themselves, beside the cache."""
    return use.running * shape.vocabulary * SAMPLING if use.paged else 0


def _main_memory_needs(
    shape: ModelShape, use: MemoryUse, fixed: Sequence[ModelShape], *, is_gpu: bool
) -> dict[str, int]:
    """Bytes of main memory that a run needs beside its device.

    Offloaded moments and shares stay there. Weights in float32, then moments, pass through it to a
    checkpoint, of each rank its own. At the start each fixed policy passes through it, in float32 and once
    more in its served precision; so does the model, on one rank of a node after the other, and a reference,
    on all of them at once.
    """
    sharing, stays = use.sharing, {}
    if not is_gpu and sharing is None:
        return {}
    passing = {"fixed": max((_passing(other, use) for other in fixed), default=0)} if is_gpu else {}
    if sharing is not None:
        copied = use.reference and not shape.adapters
        whole = shape.parameters * FLOAT32
        passing["loading"] = sharing.here * _passing(shape, use) if copied else whole
    if is_gpu:
        here, written = (1, 1) if sharing is None else (sharing.here, sharing.count)
        moments = _held(shape, use).moments
        weights = -(-here * shape.parameters * FLOAT32 // written)
        passing["checkpoint"] = weights if use.offload else max(weights, here * moments)
        if use.offload:
            stays["optimizer"] = moments
        if sharing is not None and sharing.offload:
            shared = _shared(shape, use)
            frozen = 0 if shape.adapters else _reference(shape, use)
            stays["shares"] = here * (shared.weights + shared.gradients + shared.moments + frozen)
    largest = max(passing, key=lambda kind: passing[kind])
    return stays | {largest: passing[largest]}


def _passing(shape: ModelShape, use: EngineUse) -> int:
    """A model in float32, and its copy in what is held of a model that nobody trains."""
    return shape.parameters * FLOAT32 + shape.frozen_bytes(use.held)


def activations(shape: ModelShape, use: MemoryUse) -> int:
    """Bytes that autograd keeps of one micro-batch, and that the backward pass of one layer needs."""
    layer = _layer_bytes_a_token(shape, use)
    kept = FLOAT32 * shape.width if use.checkpointing else layer
    tokens = use.micro_batch_tokens
    # A layer more: the one whose gradients are being computed, or that is computed again.
    total = tokens * (shape.layers * kept + layer)
    if use.low and not shape.adapters:  # autocast keeps the weights that it has rounded
        total += BFLOAT16 * shape.parameters // (shape.layers if use.checkpointing else 1)
    return total + (tokens * use.row_tokens * (FLOAT32 + 1) if use.masked else 0)


def _layer_bytes_a_token(shape: ModelShape, use: MemoryUse) -> int:
    """Two norms and their inputs, queries to outputs of attention, and the four tensors of the MLP.

    Of the last layer that is for tokens that are read; all of them may be.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if use.fused and not shape.adapters:
        # Two sums in float32. In bfloat16 their norms; queries and keys, each before and after they are
        # rotated; values, and the outputs of attention; gate, up, and their product.
        return 12 * shape.width + 6 * shape.mlp_width + 6 * queries + 6 * keys
    if use.low:
        by_query, by_key = (12, 10) if shape.head_norms else (6, 4)
        return 26 * shape.width + 8 * shape.mlp_width + by_query * queries + by_key * keys
    if not use.masked:  # the learner's own forward pass, whose norms and rotations keep less
        by_query, by_key = (16, 12) if shape.head_norms else (12, 8)
        return 16 * shape.width + 16 * shape.mlp_width + by_query * queries + by_key * keys
    by_query, by_key = (24, 8) if shape.head_norms else (16, 0)
    return 24 * shape.width + 16 * shape.mlp_width + by_query * queries + by_key * keys


def logits(shape: ModelShape, use: MemoryUse) -> int:
    """Bytes of a chunk of logits, of the head's rounded copy, and of its gradient, to which chunks add."""
    head = shape.vocabulary * shape.width
    by_head = (BFLOAT16 if use.low else 0) + (0 if shape.adapters else FLOAT32)
    return use.logits_chunk * shape.vocabulary * BYTES_PER_LOGIT + head * by_head
