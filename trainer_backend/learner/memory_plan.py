"""Compares the memory that a job needs with the memory of this machine, or of a planned GPU.

If the job does not set `training.micro_batch_tokens`, the plan chooses the largest micro-batches that fit,
because they need the fewest passes over the weights. The choice depends only on the job and the device, so a
resumed run makes the same choice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from trainer_backend.core.logprobs import adds_wide, chunk_within, multiplies_wide
from trainer_backend.errors import JobError
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.inference.paged_attention import kernels_are_here, why_no_kernels
from trainer_backend.job.tables import ModelTable
from trainer_backend.job.training_table import MICRO_BATCH_TOKENS
from trainer_backend.learner.attention import BlockMask, attention_for, why_masked
from trainer_backend.learner.by_length import SHORTEST_SHARE
from trainer_backend.learner.config import LearnerConfig
from trainer_backend.learner.device import Placement, place
from trainer_backend.learner.memory import EngineUse, MemoryNeeds, MemoryUse, memory_needs, serving_needs
from trainer_backend.learner.packed_decoder import FAMILIES
from trainer_backend.learner.ranks import ALONE, Ranks
from trainer_backend.learner.shapes import ModelShape, count_checkpointed, model_config, model_shape
from trainer_backend.models.folder import folder_config
from trainer_backend.models.kinds import missing_kernels, module_is_here

_CGROUP = Path("/sys/fs/cgroup")
# Limits of chosen micro-batches, in tokens. Larger ones are not faster; smaller ones leave a GPU partly idle.
_MOST_TOKENS, _FEWEST_TOKENS = 2**16, 2**9
# When micro-batches are chosen, a reserve stays free: a share of the device's memory, and a share of the
# estimated activations, for our layers or for those of transformers (see the accuracy in learner.memory).
_SPARE, _UNSURE_OWN, _UNSURE_THEIRS = 0.05, 0.1, 1 / 3


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory that a run needs, and the memory that is free for it, in bytes."""

    placement: Placement
    needs: MemoryNeeds
    free: int
    host_free: int
    ranks: str = ""
    """Text for the user: to which of the learner's ranks the needs apply. Empty for a single process."""
    notes: tuple[str, ...] = ()
    """Sentences for the user, such as where the learner computes slowly, why, and at what cost."""
    micro_batch_tokens: int = MICRO_BATCH_TOKENS
    """Number of tokens of a micro-batch, set by the job or chosen by the plan."""

    @property
    def need(self) -> int:
        """Bytes needed on the device if each kind of memory is at its maximum."""
        return sum(self.needs.device.values())

    def __str__(self) -> str:
        """Format the plan as one line for the user."""
        need = self.need
        scale, unit = (2**30, "GiB") if need >= 2**30 else (2**20, "MiB")
        kinds = ", ".join(f"{kind} {size / scale:.1f}" for kind, size in self.needs.device.items())
        where = f"{self.placement}, {self.ranks}" if self.ranks else str(self.placement)
        line = f"memory ({where}): {need / scale:.1f} of {self.free / scale:.1f} {unit} free: {kinds}"
        host = ", ".join(f"{kind} {size / scale:.1f}" for kind, size in self.needs.host.items())
        line += f"; in main memory: {host}" if host else ""
        return line + ("; it fits only while sequences are shorter than allowed" if need > self.free else "")

    def report(self) -> str:
        """Return the plan and the notes, one per line."""
        return "\n".join((str(self), *self.notes))

    def shortage(self) -> str | None:
        """Describe which memory is too small even for the least need; None if the job can run."""
        if self.needs.least > self.free:
            least = f"{self.needs.least / 2**30:.2f} GiB"
            each = " of each rank" if self.ranks and self.placement.device.type != "cpu" else ""
            return f"the job needs at least {least} on {self.placement.device.type}{each}"
        host = sum(self.needs.host.values())
        line = f"the job needs {host / 2**30:.2f} of {self.host_free / 2**30:.2f} GiB of main memory"
        return line if host > self.host_free else None


def refuse_too_large(plan: MemoryPlan, *, hint: str) -> None:
    """Raise JobError if the job cannot fit into memory; `hint` names keys of the job that lower its need."""
    shortage = plan.shortage()
    if shortage is not None:
        raise JobError(f"{shortage}: {plan}.", hint=hint)


@dataclass(frozen=True, slots=True)
class Models:
    """The shapes of a run's models: of the model in training (`own`) and of the fixed policies."""

    own: ModelShape
    kind: str
    """The `model_type` of `own` in its transformers config."""
    fixed: tuple[ModelShape, ...] = ()
    missing: tuple[str, ...] = ()
    """Names of packages that have fast kernels for layers of `own`, but are not installed."""


def model_configs(
    config: LearnerConfig, checkpoint: Path | None = None, *, fixed: Sequence[Path] = ()
) -> tuple[Any, list[Any]]:
    """Read the transformers configs of the model in training and of the fixed policies.

    The model in training is read from `checkpoint`; if None, from the job's table [model]. `fixed` are the
    model folders of the fixed policies.
    """
    others = [folder_config(folder) for folder in fixed]
    return model_config(config.model, checkpoint, choose_vocabulary(config, others)), others


def choose_vocabulary(config: LearnerConfig, others: Sequence[Any]) -> int:
    """Return the vocabulary size of a preset: as in the first fixed policy; without one, as in the job."""
    return int(others[0].get_text_config().vocab_size) if others else config.model.vocab_size


def model_shapes(config: LearnerConfig, own: Any, others: Sequence[Any] = ()) -> Models:
    """Compute the shapes of the models from the configs that `model_configs` returns."""
    critic = None if config.value_level is None else config.training.critic
    shape = model_shape(own, config.lora, critic=critic, longest=config.inference.max_model_len)
    shapes = tuple(model_shape(other, None) for other in others)
    missing = tuple(missing_kernels(own, module_is_here))
    return Models(shape, own.get_text_config().model_type, shapes, missing)


def memory_plan(
    config: LearnerConfig, checkpoint: Path | None = None, *, fixed: Sequence[Path] = (), ranks: Ranks = ALONE
) -> MemoryPlan:
    """Plan the memory of a run on this machine; for the arguments see `model_configs` and `plan_on`."""
    own, others = model_configs(config, checkpoint, fixed=fixed)
    return plan_on(place(config.model.device), config, model_shapes(config, own, others), ranks)


def plan_on(placement: Placement, config: LearnerConfig, models: Models, ranks: Ranks = ALONE) -> MemoryPlan:
    """Plan the memory of a run on a device.

    Each rank plans only its own need; the first rank's need includes the engines. If the job does not set the
    size of micro-batches, the largest size with which the job fits is chosen.
    """
    if config.training.micro_batch_tokens is not None:
        return _plan_as_set(placement, config, models, ranks)
    for tokens in _choices(placement, config):
        plan = _plan_as_set(placement, set_micro_batches(config, tokens), models, ranks)
        if plan.need + _reserve(plan, models.own) <= device_size(placement):
            break
    return plan if placement.device.type == "cpu" and tokens == MICRO_BATCH_TOKENS else note_choice(plan)


def set_micro_batches(config: LearnerConfig, tokens: int) -> LearnerConfig:
    """Return a copy of the job with micro-batches of this many tokens."""
    return replace(config, training=config.training.model_copy(update={"micro_batch_tokens": tokens}))


def _choices(placement: Placement, config: LearnerConfig) -> list[int]:
    """List the sizes of micro-batches to try, in tokens. Each size is half of the one before.

    On a GPU, the first size is the largest that can speed up an optimizer step. On a CPU, it fits the CPU's
    cache. The list ends at the first size of at most 512 tokens or one row, whichever is larger,
    because a pass always computes at least one row.
    """
    row = max(config.training.row_tokens, config.inference.max_model_len)
    step = config.training.batch_decisions * config.inference.max_model_len
    most = MICRO_BATCH_TOKENS if placement.device.type == "cpu" else _MOST_TOKENS
    while most // 2 >= max(step, MICRO_BATCH_TOKENS):
        most //= 2
    choices = [most]
    while choices[-1] > max(row, _FEWEST_TOKENS):
        choices.append(choices[-1] // 2)
    return choices


def _reserve(plan: MemoryPlan, shape: ModelShape) -> float:
    """Return the bytes of the device that must stay free when micro-batches are chosen."""
    unsure = _UNSURE_OWN if shape.own_pass else _UNSURE_THEIRS
    return _SPARE * device_size(plan.placement) + unsure * plan.needs.device.get("activations", 0)


def note_choice(plan: MemoryPlan) -> MemoryPlan:
    """Return the plan with a note about the chosen micro-batches."""
    size = device_size(plan.placement)
    fits = f"{abs(size - plan.need) / 2**30:.1f} GiB {'spare' if plan.need <= size else 'too little'}"
    note = f"micro-batches of {plan.micro_batch_tokens} tokens are chosen: {size / 2**30:.1f} GiB, {fits}"
    return replace(plan, notes=(*plan.notes, note))


def _plan_as_set(placement: Placement, config: LearnerConfig, models: Models, ranks: Ranks) -> MemoryPlan:
    is_gpu = placement.device.type != "cpu"
    # Engines are on the first rank's device, or in the first node's main memory.
    has_engines = not ranks.are_several or ranks.index < (1 if is_gpu else config.ranks.nproc_per_node)
    if not has_engines:
        config = replace(config, engines=0, processes=1)
    copies = max(1, config.fixed_copies) if has_engines else 0
    shape = models.own
    use = memory_use(config, placement, shape)
    servers = servers_on(placement, config, ranks)
    use = replace(
        use,
        # Counted in full, because a vLLM server does not adapt to the memory that other processes leave.
        vllm=int(servers * config.inference.server_share * placement.card_bytes()) if servers else 0,
        vllm_servers=servers,
        vllm_sleeps=config.inference.sleep,
    )
    needs = memory_needs(shape, use, is_gpu=is_gpu, fixed=models.fixed * copies)
    notes = slower_ways(
        placement,
        head_dim=shape.head_dim,
        model_type=models.kind,
        no_kernels=None if placement.card is not None else why_no_kernels(placement.device),
        wide_products=multiplies_wide(),
        wide_sums=adds_wide(),
        apart=shape.apart,
        missing=models.missing,
    )
    if use.vllm_sleeps and servers:
        turn = "an update" if "activations" in needs.device else "the time when it is awake"
        notes += (f"vLLM sleeps during updates: the plan is that of {turn}, which needs more",)
    here = f"rank {ranks.index}" if is_gpu else str(config.ranks.nproc_per_node)
    whose = f"{here} of {ranks.count} ranks" if ranks.are_several else ""
    plan = _compare_with_free(needs, placement, notes, whose)
    return replace(plan, micro_batch_tokens=config.training.micro_batch)


def servers_on(placement: Placement, config: LearnerConfig, ranks: Ranks) -> int:
    """Count the run's vLLM servers on this rank's GPU. Servers are placed on GPUs from the last to the first.

    A planned machine is assumed to have as many GPUs as a node has ranks, or more if one server needs more.
    """
    if placement.device.type != "cuda":
        return 0
    each = config.inference.server_devices
    here = config.ranks.nproc_per_node
    gpus = max(here, each) if placement.card is not None else torch.cuda.device_count()
    own = gpus - 1 - ranks.index % here
    return sum(number % gpus == own for number in range(config.servers * each)) if each <= gpus else 0


def slower_ways(
    placement: Placement,
    *,
    head_dim: int,
    model_type: str,
    no_kernels: str | None,
    wide_products: bool,
    wide_sums: bool,
    apart: str = "",
    missing: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return a sentence for each fast way of computing that the learner cannot use on this device, and why.

    Args:
        no_kernels: the reason why Triton's kernels do not run (`paged_attention.why_no_kernels`), or None.
        wide_products: the result of `logprobs.multiplies_wide`.
        wide_sums: the result of `logprobs.adds_wide`.
        apart: the reason why each segment needs its own row; empty if rows hold several segments.
        missing: packages with fast kernels for the model's stateful layers that are not installed.
    """
    device = placement.device.type
    notes = [*placement.notes(), *slower_sampling(no_kernels), *slower_layers(device, apart, missing)]
    if not apart and model_type not in FAMILIES:
        notes.append(
            f"updates of this model run through transformers: the learner's own forward pass knows "
            f"{', '.join(sorted(FAMILIES))}, and model_type is {model_type!r}"
        )
    masked = None if device == "cpu" or apart else why_masked(placement, head_dim=head_dim)
    if masked is not None:
        notes.append(
            f"attention of updates is masked: {masked}. Its work and its mask grow with the square of "
            "training.row_tokens, so keep that near the longest sequence"
        )
    elif model_type in FAMILIES and placement.low is not None and no_kernels is not None:
        notes.append(
            "norms, rotations and gates of updates are computed by torch's operators, without those kernels: "
            "an update takes up to twice the time"
        )
    if placement.low is not None and not wide_products:
        notes.append(
            f"logits of updates are products of float32: torch {torch.__version__} cannot sum products of "
            "bfloat16 in float32, 2.8 can, several times faster"
        )
    elif placement.low is not None and not wide_sums:
        notes.append(
            f"the gradient of the head needs a second buffer, 4 bytes for each of its weights: torch "
            f"{torch.__version__} cannot add such products in place, 2.10 can"
        )
    return tuple(notes)


def slower_layers(device: str, apart: str, missing: Sequence[str]) -> Iterator[str]:
    """Yield the sentences of `slower_ways` about `apart` and `missing`."""
    if apart:
        yield (
            "updates of this model run through transformers, a segment a row, padded by up to "
            f"{1 / SHORTEST_SHARE - 1:.0%} of its tokens (learner/padding_share): its {apart}, so texts in a "
            "packed row would change each other"
        )
    if missing:
        faster = f"{' and '.join(missing)} would be much faster"
        why = "a CPU has no others" if device == "cpu" else faster
        yield f"layers with a state are computed by torch's operators, which are exact and slow: {why}"


def slower_sampling(no_kernels: str | None) -> tuple[str, ...]:
    """Return a sentence about slow sampling if Triton's kernels do not run on a GPU, with the reason."""
    if no_kernels is None:
        return ()
    return (
        f"Triton's kernels do not run on this GPU: {no_kernels}. Sampling is several times slower without "
        "them; they need triton, a C compiler, and a TRITON_CACHE_DIR from which programs may run",
    )


def serving_plan(table: ModelTable, keys: EngineKeys, folder: Path) -> MemoryPlan:
    """Plan the memory of serving the model of `folder` without training. Reads only its config."""
    placement = place(table.device)
    shape = model_shape(folder_config(folder), None)
    is_gpu = placement.device.type != "cpu"
    paged = kernels_are_here(placement.device)
    use = EngineUse(keys=keys, low=placement.low is not None, paged=paged, trunks=not is_gpu)
    needs = serving_needs(shape, use, is_gpu=is_gpu)
    notes = (*placement.notes(), *slower_sampling(why_no_kernels(placement.device)))
    return _compare_with_free(needs, placement, notes)


def _compare_with_free(
    needs: MemoryNeeds, placement: Placement, notes: tuple[str, ...], ranks: str = ""
) -> MemoryPlan:
    main = main_memory()
    free = main if placement.device.type == "cpu" else device_memory(placement)
    if placement.card is not None:  # the main memory of a planned machine is unknown
        main = sum(needs.host.values())
    return MemoryPlan(placement, needs, free, main, ranks, notes)


def memory_use(config: LearnerConfig, placement: Placement, shape: ModelShape) -> MemoryUse:
    """Convert a job's settings, such as those of [training] and [inference], to inputs of `memory_needs`."""
    training, inference = config.training, config.inference
    row = max(training.row_tokens, inference.max_model_len)
    masked = isinstance(attention_for(placement, head_dim=shape.head_dim), BlockMask) and not shape.apart
    has_kernels = placement.card is not None or kernels_are_here(placement.device)
    return MemoryUse(
        keys=inference,
        low=placement.low is not None,
        paged=has_kernels,
        trunks=placement.device.type == "cpu",
        masked=masked,
        fused=shape.has_kernels and not masked and has_kernels and placement.low is not None,
        row_tokens=row,
        micro_batch_tokens=max(training.micro_batch, row),
        logits_chunk=training.logits_chunk_tokens or chunk_within(placement.logits_bytes(), shape.vocabulary),
        reference=training.needs_reference,
        checkpointed=count_checkpointed(training.gradient_checkpointing, shape.layers),
        offload=training.optimizer_offload,
        values_by_token=config.value_level == "token",
        engines=config.engines,
        processes=config.processes,
        ranks=config.ranks,
    )


def device_memory(placement: Placement) -> int:
    """Return the free bytes of a GPU; for a planned GPU, its total bytes."""
    if placement.card is not None:
        return placement.card
    if placement.device.type == "cuda":
        return torch.cuda.mem_get_info(placement.device)[0]
    return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()


def device_size(placement: Placement) -> int:
    """Return the total bytes of the device. For a CPU this is main memory, within the container's limit."""
    if placement.device.type == "cuda":
        return placement.card_bytes()
    if placement.device.type == "mps":
        return torch.mps.recommended_max_memory()
    limit = _container_limit(_CGROUP)
    total: int = psutil.virtual_memory().total
    return total if limit is None else min(total, limit)


def main_memory(cgroup: Path = _CGROUP) -> int:
    """Return the free bytes of main memory, within the container's limit if there is one."""
    available: int = psutil.virtual_memory().available
    limit = _container_limit(cgroup)
    try:
        counts = (cgroup / "memory.stat").read_text(encoding="ascii")
        used = next(int(line.split()[1]) for line in counts.splitlines() if line.startswith("anon "))
    except (OSError, ValueError, StopIteration):
        return available
    return available if limit is None else min(available, limit - used)


def _container_limit(cgroup: Path) -> int | None:
    try:
        return int((cgroup / "memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no cgroup v2, or no limit ("max")
        return None
