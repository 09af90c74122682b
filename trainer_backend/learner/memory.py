"""Estimates the memory of a run, by kind, from model shapes and the job's limits, before weights are loaded.

Accuracy of the kinds:

    weights       exact
    cache         an upper bound. On a CPU, the rows of all running requests are padded to the longest row, so
                  one request of the maximal length makes every row as long. In a paged cache, as on CUDA, a
                  row takes only its own length. A paged cache is freed during updates, unless iterations are
                  collected ahead.
    activations   for a full micro-batch, including temporary activations. Within 12 % of measured peaks for
                  layers like those of Llama and Qwen3 (in float32 with a mask, in bfloat16 over one row),
                  within 26 % for other architectures in float32
    overhead      a flat amount for a GPU's allocator and libraries
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

# Bytes per weight of AdamW's two float32 moments.
MOMENTS = 8
# Bytes per logit of a sampling step: a permanent copy, and scratch memory that all CUDA graphs share. Most of
# it is for top-p and top-k: sorted probabilities, their order and sums.
SAMPLING = FLOAT32 + 48
# CUDA's context, workspaces of libraries, and fragmentation.
OVERHEAD = 2**30
# Kinds of memory that a learner frees after an update, before a vLLM server on the same GPU wakes.
OF_UPDATES = frozenset({"gradients", "gathered", "activations", "logits", "values"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUse:
    """The settings that determine the memory of a local engine."""

    keys: EngineKeys
    """Limits of the engine. `cache_gib` limits only a paged cache, which always holds at least one row."""
    low: bool
    """Whether matrix products and frozen copies are in bfloat16; otherwise they are in float32."""
    paged: bool = False
    """Whether the key-value cache is paged (this needs Triton's kernels). Requests wait while it is full."""
    trunks: bool = False
    """Whether rows with a common prefix store its keys and values only once (`inference.trunks`)."""

    @property
    def held(self) -> int:
        """Bytes per number in the key-value cache and in frozen matrices."""
        return BFLOAT16 if self.low else FLOAT32


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse(EngineUse):
    """The settings that determine the memory of a run, which trains a model and may also serve it."""

    masked: bool
    """Whether attention uses a mask; otherwise all packed rows are joined into one row, without a mask."""
    row_tokens: int
    """Number of tokens of the longest row; at least the engine's `max_model_len`."""
    micro_batch_tokens: int
    """Number of tokens of one forward and backward pass; at least `row_tokens`."""
    logits_chunk: int
    """Number of tokens whose logits are in memory at the same time."""
    reference: bool = False
    """Whether a reference policy is held for the KL term."""
    checkpointed: int = 0
    """Number of layers, from the first, that save only their input (training.gradient_checkpointing)."""
    offload: bool = False
    """Whether AdamW's moments are in main memory (training.optimizer_offload)."""
    values_by_token: bool = False
    """Whether a critic reads the hidden states of all sampled tokens, and saves them in float32."""
    engines: int = 1
    """Number of local engines, each with a copy of the model and a cache; 0 if vLLM servers sample."""
    processes: int = 1
    """Number of processes on the device."""
    ranks: LearnerTable = field(default_factory=LearnerTable)
    """The learner's ranks. They shard the model; each rank holds all adapters and the whole value head."""
    fused: bool = False
    """Whether layers use kernels that save less for the backward pass (`learner.operators`)."""
    vllm: int = 0
    """Bytes that all `vllm_servers` on this device take."""
    vllm_servers: int = 0
    vllm_sleeps: bool = False
    """Whether vLLM frees its memory during updates (inference.sleep)."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """The memory that a run needs, in bytes by kind (weights, cache, activations and so on)."""

    device: dict[str, int]
    """Bytes on the computing device, with each kind at its maximum. With several ranks: on one rank's GPU."""
    host: dict[str, int]
    """Bytes of main memory for all ranks of a node. On a CPU, main memory is itself the device, so this lists
    only the additional need at the start."""
    least: int
    """The least bytes of device memory with which the run can work: activations at the lower end of their
    estimate, no kept prefixes, and in a paged cache only one request of the maximal length."""


def memory_needs(
    shape: ModelShape, use: MemoryUse, *, is_gpu: bool, fixed: Sequence[ModelShape] = ()
) -> MemoryNeeds:
    """Estimate the peak memory of a run, which it reaches in an optimizer step.

    `fixed` are the shapes of the fixed policies; each of them also has a cache on the device.

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
    """Return the larger need, in bytes by kind: during an update while vLLM sleeps, or while vLLM is awake.

    `servers` is the number of vLLM servers on the device. A sleeping server keeps CUDA and CUDA graphs.
    """
    update = {**device, "vllm": servers * OVERHEAD}
    awake = {kind: size for kind, size in device.items() if kind not in OF_UPDATES}
    return max(update, awake, key=lambda kinds: sum(kinds.values()))


def _learner_needs(shape: ModelShape, use: MemoryUse, *, is_gpu: bool) -> dict[str, int]:
    """Estimate the device memory of the learner by kind, in bytes. With several ranks: of one rank."""
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
    """Bytes that training holds permanently."""

    weights: int
    gradients: int
    moments: int


def _whole(shape: ModelShape) -> _Held:
    """Return the memory of adapters and value head, which are not sharded: each rank has all of them."""
    count = shape.adapters + (shape.width + 1 if shape.critic else 0)
    return _Held(count * FLOAT32, count * FLOAT32, count * MOMENTS)


def _shared(shape: ModelShape, use: MemoryUse) -> _Held:
    """Return the memory of a rank's shards of the model and of the layers that only the critic uses."""
    layers = max(0, shape.critic - shape.width - 1)
    weights = shape.frozen_bytes(use.held if shape.adapters else FLOAT32) + layers * FLOAT32
    trained = layers + (0 if shape.adapters else shape.parameters)
    return _Held(*(-(-size // use.ranks.parts) for size in (weights, trained * FLOAT32, trained * MOMENTS)))


def _held(shape: ModelShape, use: MemoryUse) -> _Held:
    return _Held(*map(sum, zip(_whole(shape), _shared(shape, use), strict=True)))


def _reference(shape: ModelShape, use: MemoryUse) -> int:
    """Return the bytes of the reference policy on a rank: a copy of the adapters, or shards of a model."""
    if not use.reference:
        return 0
    return shape.adapters * FLOAT32 or -(-shape.frozen_bytes(use.held) // use.ranks.parts)


def gathered(shape: ModelShape, use: MemoryUse) -> int:
    """Return the bytes of the weights that FSDP gathers on a rank, and of their gradients before reduction.

    Weights outside of layers are gathered for a whole pass. Of the layers, only the current one and the next
    are gathered, or all layers if `fsdp_reshard_after_forward` is off.

    Source: torch.distributed.fsdp.fully_shard (its prefetch in the backward pass).
    """
    units = shape.ends + min(2, shape.layers) * shape.layer
    weights = units if use.ranks.fsdp_reshard_after_forward else shape.parameters
    return weights * use.held if shape.adapters else (weights + units) * FLOAT32


def serving_needs(shape: ModelShape, use: EngineUse, *, is_gpu: bool) -> MemoryNeeds:
    """Estimate the memory of an engine with a frozen model. The result's `least` does not include a cache."""
    weights, overhead = shape.frozen_bytes(use.held), OVERHEAD if is_gpu else 0
    device = {"engine": weights, "cache": cache(shape, use), "sampling": sampling(shape, use)}
    device["overhead"] = overhead
    return MemoryNeeds({kind: size for kind, size in device.items() if size}, {}, weights + overhead)


def cached_row(shape: ModelShape, use: EngineUse) -> int:
    """Return the bytes of keys, values and recurrent states of one request of the maximal length."""
    states = shape.states * shape.state_numbers * FLOAT32
    return use.keys.max_model_len * shape.cached_numbers * use.held + states


def cache(shape: ModelShape, use: EngineUse) -> int:
    """Return the bytes of an engine's full cache, including trunks (first tokens that rows share)."""
    row = cached_row(shape, use)
    shared = most_rows(use.keys.slots) if use.trunks and shape.own_pass else 0
    kept = use.keys.prefix_slots * (2 if shape.states else 1)  # with states, as many again within prompts
    fullest = (use.keys.slots + kept + shared) * row
    if not use.paged or use.keys.cache_bytes is None:
        return fullest
    return min(fullest, max(use.keys.cache_bytes, row))


def engine(shape: ModelShape, use: EngineUse) -> int:
    """Return the bytes of an engine's copy of the model, and of one layer's experts with adapters added."""
    sums = shape.adapted_experts // shape.layers
    return shape.frozen_bytes(use.held) + (shape.adapters + sums) * use.held


def sampling(shape: ModelShape, use: EngineUse) -> int:
    """Return the bytes of the buffers of a paged engine's sampling step; 0 for other engines."""
    return use.keys.slots * shape.vocabulary * SAMPLING if use.paged else 0


def _main_memory_needs(
    shape: ModelShape, use: MemoryUse, fixed: Sequence[ModelShape], *, is_gpu: bool
) -> dict[str, int]:
    """Estimate the bytes of main memory that a run needs in addition to its device.

    Offloaded moments and shards are held permanently. Of these temporary needs, the largest is counted:

        fixed        at the start, one fixed policy in float32 and in the precision of serving
        loading      the model, in one rank of a node at a time; or, if the reference is a model of its own,
                     the reference in float32 and its frozen copy, in all ranks of a node at once
        checkpoint   each rank's float32 weights, then its moments
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
    """Return the bytes of a model in float32 and of its frozen copy in the precision of serving."""
    return shape.parameters * FLOAT32 + shape.frozen_bytes(use.held)


def activations(shape: ModelShape, use: MemoryUse) -> int:
    """Estimate the bytes that autograd saves for a micro-batch, and the peak of one layer's backward pass."""
    parts = _bytes_a_token(shape, use)
    tokens = use.micro_batch_tokens
    if shape.apart:  # with the most padding that a batch may have
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


# Temporary memory of a backward pass, in tenths of what a layer saves: gradients, while saved tensors are
# freed; and a recomputed (checkpointed) layer with its gradients. When layers are recomputed, the layers
# without checkpointing have already been freed.
_GRADIENTS, _AGAIN = 3, 14


class _Parts(NamedTuple):
    """Bytes that autograd saves per token in each part of a layer."""

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
    """Count the saved bytes per token: norms and their inputs, attention from queries to outputs, the MLP.

    The last layer is counted like the others, although it may compute only the tokens that are read.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if use.fused and not shape.adapters:
        # Float32: two sums. Bfloat16: their norms; queries and keys before and after rotation; values and the
        # outputs of attention; gate, up, and their product.
        by_width, by_mlp, by_query, by_key = 12, 6, 6, 6
    elif use.low:
        by_width, by_mlp = 26, 8
        by_query, by_key = (12, 10) if shape.head_norms else (6, 4)
    elif not use.masked and shape.own_pass:  # our own norms and rotations save less
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
    """Return the bytes of a chunk of logits, of the rounded copy of the LM head, and of its gradient."""
    head = shape.vocabulary * shape.width
    by_head = (BFLOAT16 if use.low else 0) + (0 if shape.adapters else FLOAT32)
    return use.logits_chunk * shape.vocabulary * BYTES_PER_LOGIT + head * by_head
