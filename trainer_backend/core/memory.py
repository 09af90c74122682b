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
    value_head: weights of a critic's; 0 without one.
    head_norms: whether queries and keys are normed head by head, as in Qwen3.
    vectors: weights of norms and biases, which are float32 everywhere; `parameters` counts them too.
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
    value_head: int = 0
    head_norms: bool = False
    vectors: int = 0

    @property
    def trained(self) -> int:
        return (self.adapters or self.parameters) + self.value_head

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
class MemoryUse(EngineUse):
    """What a run does with a model: it serves the model and trains it.

    masked: whether attention is masked over rows of several segments, or runs over one long row.
    row_tokens: width of the widest row: a segment may be as long as the engine's longest sequence.
    micro_batch_tokens: tokens of one forward and backward, at least a row.
    logits_chunk: tokens whose logits exist at a time.
    reference: whether a second copy is held for the KL term.
    checkpointing: whether each layer keeps its input alone (training.gradient_checkpointing).
    offload: whether AdamW's moments are in main memory (training.optimizer_offload).
    values_by_token: whether a critic reads every sampled token's state, which it keeps in float32.
    engines: how many of this machine sample, each with a copy and a cache; 0: other servers do.
    processes: how many use the device.
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


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes by kind.

    device: on the device that computes, each kind at its fullest.
    host: in main memory beside a GPU; empty on a CPU, whose main memory is the device.
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
    own = shape.frozen_bytes(use.held if shape.adapters else FLOAT32)
    own += (shape.adapters + shape.value_head) * FLOAT32
    moments = shape.trained * MOMENTS
    device = {
        "weights": own,
        "gradients": shape.trained * FLOAT32,
        "optimizer": 0 if use.offload and is_gpu else moments,
        "engine": use.engines * (shape.frozen_bytes(use.held) + shape.adapters * use.held),
        "reference": (shape.adapters * FLOAT32 or shape.frozen_bytes(use.held)) if use.reference else 0,
        "cache": use.engines * cache(shape, use),
        "sampling": use.engines * sampling(shape, use) + sum(sampling(other, use) for other in fixed),
        "activations": activations(shape, use),
        "logits": logits(shape, use),
        "values": use.micro_batch_tokens * shape.width * 2 * FLOAT32 if use.values_by_token else 0,
        "fixed": sum(other.frozen_bytes(use.held) for other in fixed),
        "fixed cache": sum(cache(other, use) for other in fixed),
        "overhead": use.processes * OVERHEAD if is_gpu else 0,
    }
    caches = device["cache"] + device["fixed cache"]
    of_a_row = use.engines * cached_row(shape, use) + sum(cached_row(other, use) for other in fixed)
    needed = of_a_row * (1 if use.paged else use.running)
    unsure = device["activations"] / 3 + caches - needed
    device = {kind: size for kind, size in device.items() if size}
    host = _main_memory_needs(shape, use, fixed) if is_gpu else {}
    return MemoryNeeds(device, host, int(sum(device.values()) - unsure))


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


def _main_memory_needs(shape: ModelShape, use: MemoryUse, fixed: Sequence[ModelShape]) -> dict[str, int]:
    """Bytes of main memory that a run on a GPU needs.

    Offloaded moments stay there. Weights in float32, then moments, pass through it to a checkpoint. At the
    start each fixed policy passes through it, in float32 and once more in its served precision.
    """
    weights, moments = shape.parameters * FLOAT32, shape.trained * MOMENTS
    passing = {
        "checkpoint": weights if use.offload else max(weights, moments),
        "fixed": max(
            (other.parameters * FLOAT32 + other.frozen_bytes(use.held) for other in fixed), default=0
        ),
    }
    largest = max(passing, key=lambda kind: passing[kind])
    return ({"optimizer": moments} if use.offload else {}) | {largest: passing[largest]}


def activations(shape: ModelShape, use: MemoryUse) -> int:
    """Bytes that autograd keeps of one micro-batch, and that the backward pass of one layer needs."""
    layer = _layer_bytes_a_token(shape, low=use.low, masked=use.masked)
    kept = FLOAT32 * shape.width if use.checkpointing else layer
    tokens = use.micro_batch_tokens
    # A layer more: the one whose gradients are being computed, or that is computed again.
    total = tokens * (shape.layers * kept + layer)
    if use.low and not shape.adapters:  # autocast keeps the weights that it has rounded
        total += BFLOAT16 * shape.parameters // (shape.layers if use.checkpointing else 1)
    return total + (tokens * use.row_tokens * (FLOAT32 + 1) if use.masked else 0)


def _layer_bytes_a_token(shape: ModelShape, *, low: bool, masked: bool) -> int:
    """Two norms and their inputs, queries to outputs of attention, and the four tensors of the MLP.

    Of the last layer that is for tokens that are read; all of them may be.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if low:
        by_query, by_key = (12, 10) if shape.head_norms else (6, 4)
        return 26 * shape.width + 8 * shape.mlp_width + by_query * queries + by_key * keys
    if not masked:  # the learner's own forward pass, whose norms and rotations keep less
        by_query, by_key = (16, 12) if shape.head_norms else (12, 8)
        return 16 * shape.width + 16 * shape.mlp_width + by_query * queries + by_key * keys
    by_query, by_key = (24, 8) if shape.head_norms else (16, 0)
    return 24 * shape.width + 16 * shape.mlp_width + by_query * queries + by_key * keys


def logits(shape: ModelShape, use: MemoryUse) -> int:
    """Bytes of a chunk of logits, of the head's rounded copy, and of its gradient, to which chunks add."""
    head = shape.vocabulary * shape.width
    by_head = (BFLOAT16 if use.low else 0) + (0 if shape.adapters else FLOAT32)
    return use.logits_chunk * shape.vocabulary * BYTES_PER_LOGIT + head * by_head
