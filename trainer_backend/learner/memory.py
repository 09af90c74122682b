"""Estimates the memory of a run, by kind, from shapes and limits, before anything is loaded.

Accuracy: counts of weights are exact. `cache` is an upper bound. The engine has one row per running request;
all rows are as wide as the longest, so a single sequence of the allowed length fills the cache except for
kept prefixes. In a cache of pages, as on CUDA, a row is as long as its own request, and the memory is freed
during updates unless iterations are collected ahead. `activations` are the saved and temporary ones of a full
micro-batch: within 12 % of measured peaks for layers like Llama's and Qwen3's (float32 with a mask, bfloat16
over one row), within 26 % for other architectures in float32. OVERHEAD is a flat amount for a GPU's allocator
and libraries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainer_backend.core.logprobs import BYTES_PER_LOGIT
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.inference.trunks import most_rows
from trainer_backend.job.tables import LearnerTable
from trainer_backend.learner.by_length import SHORTEST_SHARE
from trainer_backend.learner.shapes import BFLOAT16, FLOAT32, ModelShape

# AdamW: two moments in float32.
MOMENTS = 8
# Bytes per logit of a sampling step: a permanent copy, and scratch memory that all CUDA graphs share, mostly
# for truncation (sorted probabilities, their order and sums).
SAMPLING = FLOAT32 + 48
# CUDA's context, workspaces of libraries, and fragmentation.
OVERHEAD = 2**30
# Kinds that a learner frees after an update in which vLLM slept.
OF_UPDATES = frozenset({"gradients", "gathered", "activations", "logits", "values"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUse:
    """The settings of an engine that decide its memory."""

    keys: EngineKeys
    """Limits of the engine. In pages `cache_gib` bounds its cache, which holds at least one row."""
    low: bool
    """Whether products and frozen copies are bfloat16; otherwise float32."""
    paged: bool = False
    """Whether caches are in pages (with kernels); requests wait if not all fit."""
    trunks: bool = False
    """Whether our decoder stores common beginnings of rows separately (`inference.trunks`)."""

    @property
    def held(self) -> int:
        """Bytes of a number in the cache and in a frozen matrix."""
        return BFLOAT16 if self.low else FLOAT32


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse(EngineUse):
    """The settings of a run, which serves and trains a model, that decide its memory."""

    masked: bool
    """Whether attention is masked over rows of several segments, instead of over one long row."""
    row_tokens: int
    """Tokens of the widest row, at least those of the engine's longest sequence."""
    micro_batch_tokens: int
    """Tokens of one forward and backward pass, at least those of a row."""
    logits_chunk: int
    """Tokens whose logits exist at a time."""
    reference: bool = False
    """Whether a second copy is held for the KL term."""
    checkpointed: int = 0
    """Number of layers, from the first, that save only their input (training.gradient_checkpointing)."""
    offload: bool = False
    """Whether AdamW's moments are in main memory (training.optimizer_offload)."""
    values_by_token: bool = False
    """Whether a critic reads, and saves in float32, the state of every sampled token."""
    engines: int = 1
    """Number of local engines, each with a copy and a cache; 0: other servers sample."""
    processes: int = 1
    """Number of processes on the device."""
    ranks: LearnerTable = field(default_factory=LearnerTable)
    """The learner's ranks, which share the model's weights; each has the whole adapters and value head."""
    fused: bool = False
    """Whether layers use kernels that save less for the backward pass (`learner.operators`)."""
    vllm: int = 0
    """Bytes of the device for all `vllm_servers`."""
    vllm_servers: int = 0
    vllm_sleeps: bool = False
    """Whether vLLM frees its memory during updates (inference.sleep)."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes by kind."""

    device: dict[str, int]
    """Bytes on the computing device, or on each rank's device; each kind at its fullest."""
    host: dict[str, int]
    """Main memory of all ranks of a node; on a CPU, whose main memory is the device, only the additional need
    at the start."""
    least: int
    """The least bytes that the device must have, with the lower estimate of activations. Caches then have no
    kept prefixes; a cache in pages holds one request of the allowed length."""


def memory_needs(
    shape: ModelShape, use: MemoryUse, *, is_gpu: bool, fixed: Sequence[ModelShape] = ()
) -> MemoryNeeds:
    """Estimate the peak memory of a run, in an optimizer step; each of the policies `fixed` has a cache.

    Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 3 (weights, gradients, moments).
    """
    learner = _learner_needs(shape, use, is_gpu=is_gpu)
    if not is_gpu:  # the ranks of a node have one memory
        learner = {kind: use.ranks.nproc_per_node * size for kind, size in learner.items()}
    device = learner | {
        "engine": use.engines * engine(shape, use),
        "cache": use.engines * cache(shape, use),
        "sampling": use.engines * sampling(shape, use) + sum(sampling(other, use) for other in fixed),
        "fixed": sum(other.frozen_bytes(use.held) for other in fixed),
        "fixed cache": sum(cache(other, use) for other in fixed),
        "vllm": use.vllm,
        "overhead": use.processes * OVERHEAD if is_gpu else 0,
    }
    if use.vllm_sleeps:
        device = fuller_turn(device, use.vllm_servers)
    caches = device["cache"] + device["fixed cache"]
    of_a_row = use.engines * cached_row(shape, use) + sum(cached_row(other, use) for other in fixed)
    needed = of_a_row * (1 if use.paged else use.keys.slots)
    unsure = device.get("activations", 0) / 3 + caches - needed
    device = {kind: size for kind, size in device.items() if size}
    host = _main_memory_needs(shape, use, fixed, is_gpu=is_gpu)
    return MemoryNeeds(device, host, int(sum(device.values()) - unsure))


def fuller_turn(device: Mapping[str, int], servers: int) -> dict[str, int]:
    """Return the bytes by kind of the larger need: of an update, while vLLM sleeps, or while vLLM is awake.

    A sleeping server keeps the memory of CUDA and its graphs.
    """
    update = {**device, "vllm": servers * OVERHEAD}
    awake = {kind: size for kind, size in device.items() if kind not in OF_UPDATES}
    return max(update, awake, key=lambda kinds: sum(kinds.values()))


def _learner_needs(shape: ModelShape, use: MemoryUse, *, is_gpu: bool) -> dict[str, int]:
    """Estimate the memory of a learner's process, or of each of its ranks."""
    held, reference = _held(shape, use), _reference(shape, use)
    moments = 0 if use.offload and is_gpu else held.moments
    if use.ranks.fsdp_cpu_offload and is_gpu:
        held, moments = _whole(shape), _whole(shape).moments
        reference = shape.adapters * FLOAT32 if use.reference else 0
    return {
        "weights": held.weights,
        "gradients": held.gradients,
        "optimizer": moments,
        "gathered": gathered(shape, use) if use.ranks.ranks > 1 else 0,
        "reference": reference,
        "activations": activations(shape, use),
        "logits": logits(shape, use),
        "values": use.micro_batch_tokens * shape.width * 2 * FLOAT32 if use.values_by_token else 0,
    }


class _Held(NamedTuple):
    """Bytes of a model that a process holds permanently."""

    weights: int
    gradients: int
    moments: int


def _whole(shape: ModelShape) -> _Held:
    """Return the memory of adapters and value head, which every rank has whole."""
    count = shape.adapters + (shape.width + 1 if shape.critic else 0)
    return _Held(count * FLOAT32, count * FLOAT32, count * MOMENTS)


def _shared(shape: ModelShape, use: MemoryUse) -> _Held:
    """Return the memory of a rank's share of the model's weights and of an own critic's layers."""
    layers = max(0, shape.critic - shape.width - 1)
    weights = shape.frozen_bytes(use.held if shape.adapters else FLOAT32) + layers * FLOAT32
    trained = layers + (0 if shape.adapters else shape.parameters)
    return _Held(*(-(-size // use.ranks.parts) for size in (weights, trained * FLOAT32, trained * MOMENTS)))


def _held(shape: ModelShape, use: MemoryUse) -> _Held:
    return _Held(*map(sum, zip(_whole(shape), _shared(shape, use), strict=True)))


def _reference(shape: ModelShape, use: MemoryUse) -> int:
    """Return the memory of the reference: its adapters, or a copy of the model, sharded like the model."""
    if not use.reference:
        return 0
    return shape.adapters * FLOAT32 or -(-shape.frozen_bytes(use.held) // use.ranks.parts)


def gathered(shape: ModelShape, use: MemoryUse) -> int:
    """Return the bytes of gathered weights on a rank, and of their gradients before reduction.

    Weights outside of layers are gathered for a whole pass. Of the layers, the current one and the next are
    gathered, or all if gathered weights are kept.

    Source: torch.distributed.fsdp.fully_shard (its prefetch in the backward pass).
    """
    units = shape.ends + min(2, shape.layers) * shape.layer
    weights = units if use.ranks.fsdp_reshard_after_forward else shape.parameters
    return weights * use.held if shape.adapters else (weights + units) * FLOAT32


def serving_needs(shape: ModelShape, use: EngineUse, *, is_gpu: bool) -> MemoryNeeds:
    """Estimate the memory of an engine with a frozen model; the cache may also be smaller."""
    weights, overhead = shape.frozen_bytes(use.held), OVERHEAD if is_gpu else 0
    device = {"engine": weights, "cache": cache(shape, use), "sampling": sampling(shape, use)}
    device["overhead"] = overhead
    return MemoryNeeds({kind: size for kind, size in device.items() if size}, {}, weights + overhead)


def cached_row(shape: ModelShape, use: EngineUse) -> int:
    """Return the bytes of keys, values and states of one longest request."""
    states = shape.states * shape.state_numbers * FLOAT32
    return use.keys.max_model_len * shape.cached_numbers * use.held + states


def cache(shape: ModelShape, use: EngineUse) -> int:
    """Return the bytes of an engine's full cache, with the beginnings (trunks) that our decoder shares."""
    row = cached_row(shape, use)
    shared = most_rows(use.keys.slots) if use.trunks and shape.own_pass else 0
    kept = use.keys.prefix_slots * (2 if shape.states else 1)  # with states, as many within prompts too
    fullest = (use.keys.slots + kept + shared) * row
    if not use.paged or use.keys.cache_bytes is None:
        return fullest
    return min(fullest, max(use.keys.cache_bytes, row))


def engine(shape: ModelShape, use: EngineUse) -> int:
    """Return the bytes of a copy of the model, and of a layer's sum of experts and adapters."""
    sums = shape.adapted_experts // shape.layers
    return shape.frozen_bytes(use.held) + (shape.adapters + sums) * use.held


def sampling(shape: ModelShape, use: EngineUse) -> int:
    """Return the bytes of a paged engine's step buffers, without the cache."""
    return use.keys.slots * shape.vocabulary * SAMPLING if use.paged else 0


def _main_memory_needs(
    shape: ModelShape, use: MemoryUse, fixed: Sequence[ModelShape], *, is_gpu: bool
) -> dict[str, int]:
    """Estimate the bytes of main memory that a run needs in addition to its device.

    Offloaded moments and shares stay in main memory. To a checkpoint, each rank's float32 weights pass
    through it, then its moments. At the start it holds, in turn, each fixed policy in float32 and in the
    served precision; the model, for one rank of a node at a time; and a reference, for all ranks at once.
    """
    ranks, stays = use.ranks, {}
    if not is_gpu and ranks.ranks == 1:
        return {}
    passing = {"fixed": max((_passing(other, use) for other in fixed), default=0)} if is_gpu else {}
    if ranks.ranks > 1:
        copied = use.reference and not shape.adapters
        whole = shape.parameters * FLOAT32
        passing["loading"] = ranks.nproc_per_node * _passing(shape, use) if copied else whole
    if is_gpu:
        here = ranks.nproc_per_node
        moments = _held(shape, use).moments
        weights = -(-here * shape.parameters * FLOAT32 // ranks.ranks)
        passing["checkpoint"] = weights if use.offload else max(weights, here * moments)
        if use.offload:
            stays["optimizer"] = moments
        if ranks.fsdp_cpu_offload:
            frozen = 0 if shape.adapters else _reference(shape, use)
            stays["shares"] = here * (sum(_shared(shape, use)) + frozen)
    largest = max(passing, key=lambda kind: passing[kind])
    return stays | {largest: passing[largest]}


def _passing(shape: ModelShape, use: EngineUse) -> int:
    """Return the bytes of a model in float32 and of its frozen copy in the served precision."""
    return shape.parameters * FLOAT32 + shape.frozen_bytes(use.held)


def activations(shape: ModelShape, use: MemoryUse) -> int:
    """Estimate the bytes that autograd saves for a micro-batch, and the peak of one layer's backward pass."""
    parts = _bytes_a_token(shape, use)
    tokens = use.micro_batch_tokens
    if shape.apart:  # with the most padding of a group
        tokens = int(tokens / SHORTEST_SHARE)
    whole = shape.layers - use.checkpointed  # layers that are not checkpointed
    again = 1 if use.checkpointed else 0
    largest = parts.of_largest_layer(shape)
    kept = whole * parts.of_all_layers(shape) // shape.layers + largest * _GRADIENTS // 10
    inputs = use.checkpointed * FLOAT32 * shape.width
    total = tokens * (inputs + max(kept, again * largest * _AGAIN // 10))
    if use.low and not shape.adapters:  # autocast saves rounded weights
        total += BFLOAT16 * shape.parameters * max(whole, 1) // shape.layers
    total += FLOAT32 * shape.adapted_experts * (max(whole, again) + 1) // shape.layers  # W + BA, its gradient
    return total + (tokens * use.row_tokens * (FLOAT32 + 1) if use.masked else 0)


# Temporary memory of a backward pass, in tenths of a layer: gradients, while saved tensors are freed; and a
# recomputed layer with its gradients. By then, layers without checkpointing are done.
_GRADIENTS, _AGAIN = 3, 14


class _Parts(NamedTuple):
    """Bytes per token that autograd saves in the parts of a layer."""

    norms: int
    mlp: int
    attention: int

    def of_all_layers(self, shape: ModelShape) -> int:
        mixed = shape.attending * self.attention + shape.states * shape.state_bytes
        return shape.layers * self.norms + (shape.mlps or shape.layers) * self.mlp + mixed

    def of_largest_layer(self, shape: ModelShape) -> int:
        mixed = max(self.attention, shape.state_bytes if shape.states else 0)
        return self.norms + (max(self.mlp, mixed) if shape.mlps else self.mlp + mixed)


def _bytes_a_token(shape: ModelShape, use: MemoryUse) -> _Parts:
    """Count the bytes of norms and their inputs, of attention from queries to outputs, and of the MLP.

    The last layer computes only tokens that are read, which may be all.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if use.fused and not shape.adapters:
        # Float32: two sums. Bfloat16: their norms; queries and keys before and after rotation; values and the
        # outputs of attention; gate, up, and their product.
        by_width, by_mlp, by_query, by_key = 12, 6, 6, 6
    elif use.low:
        by_width, by_mlp = 26, 8
        by_query, by_key = (12, 10) if shape.head_norms else (6, 4)
    elif not use.masked and shape.own_pass:  # its norms and rotations save less
        by_width, by_mlp = 16, 16
        by_query, by_key = (16, 12) if shape.head_norms else (12, 8)
    else:
        by_width, by_mlp = 24, 16
        by_query, by_key = (24, 8) if shape.head_norms else (16, 0)
    attention = by_query * queries + by_key * keys
    if shape.eager:  # scores before and after softmax, for a segment as long as a row
        attention += 2 * FLOAT32 * shape.heads * use.row_tokens
    norms = int(by_width * shape.width * shape.norms / 2)
    return _Parts(norms, by_mlp * shape.mlp_width, attention)


def logits(shape: ModelShape, use: MemoryUse) -> int:
    """Return the bytes of a chunk of logits, of the head's rounded copy, and of its gradient."""
    head = shape.vocabulary * shape.width
    by_head = (BFLOAT16 if use.low else 0) + (0 if shape.adapters else FLOAT32)
    return use.logits_chunk * shape.vocabulary * BYTES_PER_LOGIT + head * by_head
