"""How much memory a run needs, by kind, before anything is loaded: arithmetic over shapes and limits.

How far it can be relied on: what is counted in weights is exact. `cache` is at its fullest: the engine's
rows, one for each request that may run, are all as wide as the longest of them, so one sequence as long as
allowed fills it but for the kept prefixes. In pages, as on CUDA, a row is as long as its own request, and the
memory is given back while the learner works, unless iterations are collected ahead. `activations` are those
of a full micro-batch, what autograd keeps and what a backward pass has in work: within 12 % of the peaks that
were measured of layers like Llama's and Qwen3's, in float32 under a mask and in bfloat16 over one row; of
other architectures within 26 %, in float32. What the allocator and the libraries themselves need is the flat
OVERHEAD of a GPU.
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
# Bytes per logit of a step: a copy that stays, and scratch memory of sampling, which all CUDA graphs share.
# Truncation needs most of it, for sorted probabilities, their order and sums.
SAMPLING = FLOAT32 + 48
# CUDA's context, the libraries' workspaces, and what the allocator cannot reuse.
OVERHEAD = 2**30
# Kinds that a learner gives back after an update where vLLM has slept meanwhile.
OF_UPDATES = frozenset({"gradients", "gathered", "activations", "logits", "values"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUse:
    """What an engine does with a model.

    keys: its bounds. In pages `cache_gib` is the most of its cache, but for one row.
    low: whether products and frozen copies are bfloat16; otherwise float32.
    paged: whether caches are in pages (where there are kernels): requests wait where not all of them fit.
    trunks: whether our decoder keeps what several rows begin with outside of them (`inference.trunks`).
    """

    keys: EngineKeys
    low: bool
    paged: bool = False
    trunks: bool = False

    @property
    def held(self) -> int:
        """Bytes of a number in the cache, and in a frozen matrix."""
        return BFLOAT16 if self.low else FLOAT32


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse(EngineUse):
    """What a run does with a model: it serves the model and trains it.

    masked: whether attention is masked over rows of several segments, or runs over one long row.
    fused: whether layers compute by kernels that keep less for the backward pass (`learner.operators`).
    row_tokens: width of the widest row: a segment may be as long as the engine's longest sequence.
    micro_batch_tokens: tokens of one forward and backward, at least a row.
    logits_chunk: tokens whose logits exist at a time.
    reference: whether a second copy is held for the KL term.
    checkpointed: how many layers, from the first, keep their input alone (training.gradient_checkpointing).
    offload: whether AdamW's moments are in main memory (training.optimizer_offload).
    values_by_token: whether a critic reads every sampled token's state, which it keeps in float32.
    engines: how many of this machine sample, each with a copy and a cache; 0: other servers do.
    processes: how many use the device.
    ranks: the learner's, which share its model's weights out; adapters and a value head are whole on each.
    vllm: bytes that vLLM's servers take of the device, all `vllm_servers` of them.
    vllm_sleeps: whether they give these back during updates (inference.sleep).
    """

    masked: bool
    row_tokens: int
    micro_batch_tokens: int
    logits_chunk: int
    reference: bool = False
    checkpointed: int = 0
    offload: bool = False
    values_by_token: bool = False
    engines: int = 1
    processes: int = 1
    ranks: LearnerTable = field(default_factory=LearnerTable)
    fused: bool = False
    vllm: int = 0
    vllm_servers: int = 0
    vllm_sleeps: bool = False


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes by kind.

    device: on the device that computes, each kind at its fullest; of a rank, on its own device.
    host: with a GPU, the main memory of all ranks of a node; on a CPU, whose main memory is the device, what
        its ranks need only at the start.
    least: the least that the device must hold: no kept prefixes, and activations at the lower end of the
        estimate; of a cache in pages, one request as long as allowed.
    """

    device: dict[str, int]
    host: dict[str, int]
    least: int


def memory_needs(
    shape: ModelShape, use: MemoryUse, *, is_gpu: bool, fixed: Sequence[ModelShape] = ()
) -> MemoryNeeds:
    """What a run holds at its peak, in an optimizer step; each policy of the shapes `fixed` has a cache.

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
    """What is held during an update, while vLLM sleeps, or while it is awake; whichever is more.

    A server that sleeps keeps what CUDA and its graphs take of it.
    """
    update = {**device, "vllm": servers * OVERHEAD}
    awake = {kind: size for kind, size in device.items() if kind not in OF_UPDATES}
    return max(update, awake, key=lambda kinds: sum(kinds.values()))


def _learner_needs(shape: ModelShape, use: MemoryUse, *, is_gpu: bool) -> dict[str, int]:
    """Memory of a learner's process, or of each of its ranks."""
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
    """Bytes that a process holds of a model from step to step."""

    weights: int
    gradients: int
    moments: int


def _whole(shape: ModelShape) -> _Held:
    """Memory of adapters and value head, which every rank has whole."""
    count = shape.adapters + (shape.width + 1 if shape.critic else 0)
    return _Held(count * FLOAT32, count * FLOAT32, count * MOMENTS)


def _shared(shape: ModelShape, use: MemoryUse) -> _Held:
    """Memory of the weights of the model and of an own critic's layers, of which a rank has a part."""
    layers = max(0, shape.critic - shape.width - 1)
    weights = shape.frozen_bytes(use.held if shape.adapters else FLOAT32) + layers * FLOAT32
    trained = layers + (0 if shape.adapters else shape.parameters)
    return _Held(*(-(-size // use.ranks.parts) for size in (weights, trained * FLOAT32, trained * MOMENTS)))


def _held(shape: ModelShape, use: MemoryUse) -> _Held:
    return _Held(*map(sum, zip(_whole(shape), _shared(shape, use), strict=True)))


def _reference(shape: ModelShape, use: MemoryUse) -> int:
    """Memory of the reference policy: its adapters, or a copy of the model, shared out like the model."""
    if not use.reference:
        return 0
    return shape.adapters * FLOAT32 or -(-shape.frozen_bytes(use.held) // use.ranks.parts)


def gathered(shape: ModelShape, use: MemoryUse) -> int:
    """Bytes that a rank gathers of weights that are shared out, and of their gradients before it sums them.

    What is outside of the layers is whole for as long as a pass takes, of the layers one that is computed and
    the next one, or all of them where they are kept.

    Source: torch.distributed.fsdp.fully_shard (its prefetch in the backward pass).
    """
    units = shape.ends + min(2, shape.layers) * shape.layer
    weights = units if use.ranks.fsdp_reshard_after_forward else shape.parameters
    return weights * use.held if shape.adapters else (weights + units) * FLOAT32


def serving_needs(shape: ModelShape, use: EngineUse, *, is_gpu: bool) -> MemoryNeeds:
    """Memory of an engine with a frozen model. The model must fit; the cache grows with use."""
    weights, overhead = shape.frozen_bytes(use.held), OVERHEAD if is_gpu else 0
    device = {"engine": weights, "cache": cache(shape, use), "sampling": sampling(shape, use)}
    device["overhead"] = overhead
    return MemoryNeeds({kind: size for kind, size in device.items() if size}, {}, weights + overhead)


def cached_row(shape: ModelShape, use: EngineUse) -> int:
    """Keys, values and states of one longest request."""
    states = shape.states * shape.state_numbers * FLOAT32
    return use.keys.max_model_len * shape.cached_numbers * use.held + states


def cache(shape: ModelShape, use: EngineUse) -> int:
    """Keys and values of an engine at its fullest, and of what rows of our decoder share outside of it."""
    row = cached_row(shape, use)
    shared = most_rows(use.keys.slots) if use.trunks and shape.own_pass else 0
    kept = use.keys.prefix_slots * (2 if shape.states else 1)  # and as many inside prompts
    fullest = (use.keys.slots + kept + shared) * row
    if not use.paged or use.keys.cache_bytes is None:
        return fullest
    return min(fullest, max(use.keys.cache_bytes, row))


def engine(shape: ModelShape, use: EngineUse) -> int:
    """A copy of the model, and the sums of a layer's experts and adapters while it computes."""
    sums = shape.adapted_experts // shape.layers
    return shape.frozen_bytes(use.held) + (shape.adapters + sums) * use.held


def sampling(shape: ModelShape, use: EngineUse) -> int:
    """Buffers that the steps of a paged engine keep, without the cache."""
    return use.keys.slots * shape.vocabulary * SAMPLING if use.paged else 0


def _main_memory_needs(
    shape: ModelShape, use: MemoryUse, fixed: Sequence[ModelShape], *, is_gpu: bool
) -> dict[str, int]:
    """Bytes of main memory that a run needs in addition to its device.

    Offloaded moments and shares stay there. Weights in float32, then moments, pass through it to a
    checkpoint, of each rank its own. At the start each fixed policy passes through it, in float32 and once
    more in its served precision; so does the model, on one rank of a node after the other, and a reference,
    on all of them at once.
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
    """A model in float32, and its frozen copy in the served precision."""
    return shape.parameters * FLOAT32 + shape.frozen_bytes(use.held)


def activations(shape: ModelShape, use: MemoryUse) -> int:
    """Bytes that autograd keeps of one micro-batch, and that the backward pass of one layer needs."""
    parts = _bytes_a_token(shape, use)
    tokens = use.micro_batch_tokens
    if shape.apart:  # at the most padding that a group has
        tokens = int(tokens / SHORTEST_SHARE)
    whole = shape.layers - use.checkpointed  # layers that keep all of it
    again = 1 if use.checkpointed else 0
    largest = parts.of_largest_layer(shape)
    kept = whole * parts.of_all_layers(shape) // shape.layers + largest * _GRADIENTS // 10
    inputs = use.checkpointed * FLOAT32 * shape.width
    total = tokens * (inputs + max(kept, again * largest * _AGAIN // 10))
    if use.low and not shape.adapters:  # autocast keeps the weights that it has rounded
        total += BFLOAT16 * shape.parameters * max(whole, 1) // shape.layers
    total += FLOAT32 * shape.adapted_experts * (max(whole, again) + 1) // shape.layers  # and their gradient
    return total + (tokens * use.row_tokens * (FLOAT32 + 1) if use.masked else 0)


# What a backward pass has in work, in tenths of a layer: gradients, while what was kept is freed; and all of
# one that is computed again, with them. When the first is computed again, layers that kept all are done.
_GRADIENTS, _AGAIN = 3, 14


class _Parts(NamedTuple):
    """Bytes that autograd keeps of a token in the parts of a layer."""

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
    """Two norms and their inputs, queries to outputs of attention, and the four tensors of the MLP.

    Of the last layer that is for tokens that are read; all of them may be.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if use.fused and not shape.adapters:
        # Two sums in float32. In bfloat16 their norms; queries and keys, each before and after they are
        # rotated; values, and the outputs of attention; gate, up, and their product.
        by_width, by_mlp, by_query, by_key = 12, 6, 6, 6
    elif use.low:
        by_width, by_mlp = 26, 8
        by_query, by_key = (12, 10) if shape.head_norms else (6, 4)
    elif not use.masked and shape.own_pass:  # whose norms and rotations keep less
        by_width, by_mlp = 16, 16
        by_query, by_key = (16, 12) if shape.head_norms else (12, 8)
    else:
        by_width, by_mlp = 24, 16
        by_query, by_key = (24, 8) if shape.head_norms else (16, 0)
    attention = by_query * queries + by_key * keys
    if shape.eager:  # scores before and after their softmax, of a segment as long as a row
        attention += 2 * FLOAT32 * shape.heads * use.row_tokens
    norms = int(by_width * shape.width * shape.norms / 2)
    return _Parts(norms, by_mlp * shape.mlp_width, attention)


def logits(shape: ModelShape, use: MemoryUse) -> int:
    """Bytes of a chunk of logits, of the head's rounded copy, and of its gradient, to which chunks add."""
    head = shape.vocabulary * shape.width
    by_head = (BFLOAT16 if use.low else 0) + (0 if shape.adapters else FLOAT32)
    return use.logits_chunk * shape.vocabulary * BYTES_PER_LOGIT + head * by_head
