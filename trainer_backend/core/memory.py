"""How much memory a run needs, by kind, before anything is loaded: arithmetic over shapes and limits.

How far it can be relied on: what is counted in weights is exact. `cache` is at its fullest: the engine's
rows, one for each request that may run, are all as wide as the longest of them, so one sequence as long as
allowed fills it but for the kept prefixes. `activations` are those of a full micro-batch, what autograd keeps
for layers like Llama's and Qwen3's: within 10 % of what was counted on both, in float32 under a mask and in
bfloat16 over one row; other architectures may be a third away. What the allocator and the libraries
themselves need is the flat OVERHEAD of a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer_backend.core.logprobs import BYTES_PER_LOGIT

FLOAT32, BFLOAT16 = 4, 2
# AdamW: two moments in float32.
MOMENTS = 8
# CUDA's context, the libraries' workspaces, and what the allocator cannot reuse.
OVERHEAD = 2**30


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a decoder its memory follows from.

    parameters: all weights, tied ones once.
    adapters: weights of the adapters; 0 without [lora].
    value_head: weights of a critic's; 0 without one.
    head_norms: whether queries and keys are normed head by head, as in Qwen3.
    vectors: those of the parameters that are norms and biases, which are float32 everywhere.
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
        """Of its own weights where nobody trains them; `matrices`: bytes of a number in one."""
        return self.parameters * matrices + self.vectors * (FLOAT32 - matrices)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a job does with a model.

    low: products in bfloat16, and held copies too; otherwise float32.
    masked: attention by a mask over rows, rather than over one row.
    row_tokens: of the widest row: a segment may be as long as the engine's longest sequence.
    micro_batch_tokens: of one forward and backward, at least a row.
    logits_chunk: tokens whose logits exist at a time.
    running, kept: rows and kept prefixes of the engine's cache, each of up to `cached_tokens`.
    reference: whether a second copy is held for the KL term.
    values_by_token: whether a critic reads every sampled token's state, which it keeps in float32.
    """

    low: bool
    masked: bool
    row_tokens: int
    micro_batch_tokens: int
    logits_chunk: int
    running: int
    kept: int
    cached_tokens: int
    reference: bool = False
    checkpointing: bool = False
    offload: bool = False
    values_by_token: bool = False

    @property
    def held(self) -> int:
        """Bytes of a number in a matrix that nobody trains, and in the cache."""
        return BFLOAT16 if self.low else FLOAT32


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes by kind.

    device: on the device that computes, each kind at its fullest.
    host: in main memory beside it; empty where that is the device.
    least: what the device must hold at the very least: no kept prefix, and activations as small as the
        estimate may be off.
    """

    device: dict[str, int]
    host: dict[str, int]
    least: int


def memory_needs(
    shape: ModelShape, use: MemoryUse, *, is_gpu: bool, fixed: Sequence[ModelShape] = ()
) -> MemoryNeeds:
    """What a run holds at its peak, in an optimizer step.

    Args:
        fixed: of fixed policies that are served beside: weights that are held, and a cache of their own.

    Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 3 (weights, gradients, moments).
    """
    own = shape.frozen_bytes(use.held if shape.adapters else FLOAT32)
    own += (shape.adapters + shape.value_head) * FLOAT32
    moments = shape.trained * MOMENTS
    device = {
        "weights": own,
        "gradients": shape.trained * FLOAT32,
        "optimizer": 0 if use.offload and is_gpu else moments,
        "engine": shape.frozen_bytes(use.held) + shape.adapters * use.held,
        "reference": (shape.adapters * FLOAT32 or shape.frozen_bytes(use.held)) if use.reference else 0,
        "cache": cache(shape, use),
        "activations": activations(shape, use),
        "logits": logits(shape, use),
        "values": use.micro_batch_tokens * shape.width * 2 * FLOAT32 if use.values_by_token else 0,
        "fixed": sum(other.frozen_bytes(use.held) for other in fixed),
        "fixed cache": sum(cache(other, use) for other in fixed),
        "overhead": OVERHEAD if is_gpu else 0,
    }
    caches = device["cache"] + device["fixed cache"]
    unsure = device["activations"] / 3 + caches * use.kept / (use.running + use.kept)
    device = {kind: size for kind, size in device.items() if size}
    host = _host(shape, use, fixed) if is_gpu else {}
    return MemoryNeeds(device, host, int(sum(device.values()) - unsure))


def cache(shape: ModelShape, use: MemoryUse) -> int:
    """Keys and values of an engine at its fullest."""
    keys_and_values = 2 * shape.layers * shape.kv_heads * shape.head_dim * use.held
    return (use.running + use.kept) * use.cached_tokens * keys_and_values


def _host(shape: ModelShape, use: MemoryUse, fixed: Sequence[ModelShape]) -> dict[str, int]:
    """Main memory beside a GPU: weights in float32, then moments, pass through it to a checkpoint; at the
    start, one after the other, those of fixed policies do, in float32 and as they are held."""
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
    """What autograd keeps of one micro-batch, and what the backward pass of a layer needs at a time."""
    layer = _layer_bytes_a_token(shape, use.low)
    kept = FLOAT32 * shape.width if use.checkpointing else layer
    tokens = use.micro_batch_tokens
    # A layer more: the one whose gradients are being computed, or that is computed again.
    total = tokens * (shape.layers * kept + layer)
    if use.low and not shape.adapters:  # autocast keeps the weights that it has rounded
        total += BFLOAT16 * shape.parameters // (shape.layers if use.checkpointing else 1)
    return total + (tokens * use.row_tokens * (FLOAT32 + 1) if use.masked else 0)


def _layer_bytes_a_token(shape: ModelShape, low: bool) -> int:
    """Two norms and their inputs, queries to outputs of attention, and the four tensors of the MLP."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if low:
        by_query, by_key = (12, 10) if shape.head_norms else (6, 4)
        return 26 * shape.width + 8 * shape.mlp_width + by_query * queries + by_key * keys
    by_query, by_key = (24, 8) if shape.head_norms else (16, 0)
    return 24 * shape.width + 16 * shape.mlp_width + by_query * queries + by_key * keys


def logits(shape: ModelShape, use: MemoryUse) -> int:
    """A chunk of logits, and of the head its rounded copy and the gradient that a chunk adds."""
    head = shape.vocabulary * shape.width
    by_head = (BFLOAT16 if use.low else 0) + (0 if shape.adapters else FLOAT32)
    return use.logits_chunk * shape.vocabulary * BYTES_PER_LOGIT + head * by_head
