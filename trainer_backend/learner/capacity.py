"""Plans the memory of a job: its needs by kind (`core.memory`) beside the free memory of this machine."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trainer_backend.core.logprobs import adds_wide, chunk_within, multiplies_wide
from trainer_backend.core.memory import (
    EngineUse,
    MemoryNeeds,
    MemoryUse,
    ModelShape,
    Sharing,
    memory_needs,
    serving_needs,
)
from trainer_backend.core.presets import PRESETS
from trainer_backend.errors import JobError, ModelFolderError
from trainer_backend.inference.paged_attention import kernels_are_here
from trainer_backend.job.tables import InferenceTable, LearnerTable, ModelTable
from trainer_backend.job.training_table import LoraTable
from trainer_backend.learner.attention import BlockMask, attention_for, head_dim_of, why_masked
from trainer_backend.learner.config import LearnerConfig
from trainer_backend.learner.decoder import FAMILIES, is_known
from trainer_backend.learner.device import Placement, place
from trainer_backend.learner.lora import adapted_layers
from trainer_backend.learner.operators import computes_by_kernels, gates_are_known
from trainer_backend.learner.ranks import ALONE, Ranks
from trainer_backend.models.layout import base_folder, refuse_incomplete, refuse_untrainable
from trainer_backend.models.presets import preset_config
from trainer_backend.models.sources import model_folder

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory that a run needs, and the memory of this machine, in bytes.

    ranks: whose needs these are, where the learner has several ranks; empty: it is one process.
    notes: what the learner does in a slower way than it could, why, and what that costs: a sentence each.
    """

    placement: Placement
    needs: MemoryNeeds
    free: int
    host_free: int
    ranks: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the line that a person reads before the first step."""
        need = sum(self.needs.device.values())
        scale, unit = (2**30, "GiB") if need >= 2**30 else (2**20, "MiB")
        kinds = ", ".join(f"{kind} {size / scale:.1f}" for kind, size in self.needs.device.items())
        where = f"{self.placement}, {self.ranks}" if self.ranks else str(self.placement)
        line = f"memory ({where}): {need / scale:.1f} of {self.free / scale:.1f} {unit} free: {kinds}"
        host = ", ".join(f"{kind} {size / scale:.1f}" for kind, size in self.needs.host.items())
        line += f"; in main memory: {host}" if host else ""
        return line + ("; it fits only while sequences are shorter than allowed" if need > self.free else "")

    def report(self) -> str:
        """The same, and the notes, each on a line."""
        return "\n".join((str(self), *self.notes))

    def shortage(self) -> str | None:
        """A line about what cannot fit; None where everything fits."""
        if self.needs.least > self.free:
            least = f"{self.needs.least / 2**30:.2f} GiB"
            each = " of each rank" if self.ranks and self.placement.device.type != "cpu" else ""
            return f"the job needs at least {least} on {self.placement.device.type}{each}"
        host = sum(self.needs.host.values())
        line = f"the job needs {host / 2**30:.2f} of {self.host_free / 2**30:.2f} GiB of main memory"
        return line if host > self.host_free else None


def refuse_too_large(plan: MemoryPlan, *, hint: str) -> None:
    """Refuse a job that cannot fit, with every kind; `hint` names the keys that would make it smaller."""
    shortage = plan.shortage()
    if shortage is not None:
        raise JobError(f"{shortage}: {plan}.", hint=hint)


def memory_plan(
    config: LearnerConfig,
    checkpoint: Path | None = None,
    *,
    fixed: Sequence[Path] = (),
    ranks: Ranks = ALONE,
) -> MemoryPlan:
    """Plan the memory of a run on this machine; the model's weights are not read.

    Args:
        checkpoint: a folder that the run goes on from; None: the model of [model].
        fixed: model folders of the fixed policies that are served beside.
        ranks: of which this process plans its own share; engines share the first one's device.
    """
    placement = place(config.model.device)
    is_gpu = placement.device.type != "cpu"
    # Engines are on the device of the first rank, or in the main memory of the first node.
    is_beside = not ranks.are_several or ranks.index < (1 if is_gpu else config.ranks.nproc_per_node)
    if not is_beside:
        config = replace(config, engines=0, processes=1)
    critic = None if config.update.value_level is None else config.training.critic
    others = [_folder_config(folder) for folder in fixed]
    # A preset beside a fixed policy has the tokenizer of the first of them.
    vocabulary = others[0].get_text_config().vocab_size if others else config.model.vocab_size
    model_config = _model_config(config.model, checkpoint, vocabulary)
    shape = model_shape(model_config, config.lora, critic=critic)
    copies = max(1, config.fixed_copies) if is_beside else 0
    needs = memory_needs(
        shape,
        memory_use(config, placement, shape),
        is_gpu=is_gpu,
        fixed=[model_shape(other, None) for other in others] * copies,
    )
    plan = replace(_beside_what_is_free(needs, placement), ranks=_whose(ranks, config.ranks, is_gpu=is_gpu))
    notes = slower_ways(
        placement,
        head_dim=shape.head_dim,
        model_type=model_config.get_text_config().model_type,
        by_kernels=computes_by_kernels(placement),
        wide_products=multiplies_wide(),
        wide_sums=adds_wide(),
    )
    return replace(plan, notes=notes)


def _whose(ranks: Ranks, table: LearnerTable, *, is_gpu: bool) -> str:
    if not ranks.are_several:
        return ""
    here = f"rank {ranks.index}" if is_gpu else str(table.nproc_per_node)
    return f"{here} of {ranks.count} ranks"


def slower_ways(
    placement: Placement,
    *,
    head_dim: int,
    model_type: str,
    by_kernels: bool,
    wide_products: bool,
    wide_sums: bool,
) -> tuple[str, ...]:
    """What the learner does in a slower way on this device and with this torch, a sentence each.

    Args:
        by_kernels: whether Triton's kernels run there (`operators.computes_by_kernels`).
        wide_products: whether this torch has them (`logprobs.multiplies_wide`).
        wide_sums: likewise (`logprobs.adds_wide`).
    """
    notes = list(placement.notes())
    if model_type not in FAMILIES:
        notes.append(
            f"updates of this model run through transformers: the learner's own forward pass knows "
            f"{', '.join(sorted(FAMILIES))}, and model_type is {model_type!r}"
        )
    masked = None if placement.device.type == "cpu" else why_masked(placement, head_dim=head_dim)
    if masked is not None:
        notes.append(
            f"attention of updates is masked: {masked}. Its work and its mask grow with the square of "
            "training.row_tokens, so keep that near the longest sequence"
        )
    elif model_type in FAMILIES and placement.low is not None and not by_kernels:
        notes.append(
            "norms, rotations and gates of updates are computed by torch's operators, since Triton's kernels "
            "do not run here (the log says why): an update takes up to twice the time"
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


def serving_plan(table: ModelTable, inference: InferenceTable, folder: Path) -> MemoryPlan:
    """Plan the memory of serving the model of a folder, without training it; its weights are not read."""
    placement = place(table.device)
    shape = model_shape(_folder_config(folder), None)
    use = engine_use(inference, placement)
    needs = serving_needs(shape, use, is_gpu=placement.device.type != "cpu")
    return replace(_beside_what_is_free(needs, placement), notes=placement.notes())


def _beside_what_is_free(needs: MemoryNeeds, placement: Placement) -> MemoryPlan:
    main = main_memory()
    return MemoryPlan(
        placement, needs, main if placement.device.type == "cpu" else device_memory(placement), main
    )


def memory_use(config: LearnerConfig, placement: Placement, shape: ModelShape) -> MemoryUse:
    """The limits of [training] and [inference] in the form that `core.memory` counts with."""
    training, inference = config.training, config.inference
    row = max(training.row_tokens, inference.max_model_len)
    masked = isinstance(attention_for(placement, head_dim=shape.head_dim), BlockMask)
    return MemoryUse(
        **asdict(engine_use(inference, placement)),
        masked=masked,
        fused=shape.has_kernels and not masked and computes_by_kernels(placement),
        row_tokens=row,
        micro_batch_tokens=max(training.micro_batch_tokens, row),
        logits_chunk=training.logits_chunk_tokens or chunk_within(placement.logits_bytes(), shape.vocabulary),
        reference=training.needs_reference,
        checkpointing=training.gradient_checkpointing,
        offload=training.optimizer_offload,
        values_by_token=config.update.value_level == "token",
        engines=config.engines,
        processes=config.processes,
        sharing=sharing_of(config.ranks),
    )


def sharing_of(table: LearnerTable) -> Sharing | None:
    """How [learner] shares the weights out; None: one process has them all."""
    if table.ranks == 1:
        return None
    return Sharing(
        parts=table.ranks // table.data_parallel_replicate_degree,
        count=table.ranks,
        here=table.nproc_per_node,
        reshards=table.fsdp_reshard_after_forward,
        offload=table.fsdp_cpu_offload,
    )


def engine_use(inference: InferenceTable, placement: Placement) -> EngineUse:
    return EngineUse(
        low=placement.low is not None,
        running=inference.slots,
        kept=inference.prefix_slots,
        cached_tokens=inference.max_model_len,
        paged=kernels_are_here(placement.device),
        cache_bytes=inference.cache_bytes,
    )


def model_shape(config: Any, lora: LoraTable | None, *, critic: str | None = None) -> ModelShape:
    """Counted on a model without memory, so that any architecture is counted as it is."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        return _shape(model, config.get_text_config(), lora, critic=critic)
    except (AttributeError, ValueError) as error:  # the second: a size that fits no other
        raise ModelFolderError(
            f"{config.model_type!r} is no decoder of layers with attention, which is needed: {error}",
            where="model",
        ) from error


def _shape(model: PreTrainedModel, config: Any, lora: LoraTable | None, *, critic: str | None) -> ModelShape:
    width, heads = config.hidden_size, config.num_attention_heads
    count, in_layers = (
        sum(weight.numel() for weight in part.parameters())
        for part in (model, model.get_decoder().layers)  # type: ignore[no-untyped-call]
    )
    return ModelShape(
        parameters=count,
        ends=count - in_layers,
        layers=config.num_hidden_layers,
        width=width,
        mlp_width=getattr(config, "intermediate_size", None) or 4 * width,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim_of(config),
        vocabulary=config.vocab_size,
        adapters=0 if lora is None else _adapter_weights(model, lora),
        critic=0 if critic is None else width + 1 + count * (critic == "own"),
        vectors=sum(weight.numel() for weight in model.parameters() if weight.dim() == 1),
        head_norms=any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()),
        has_kernels=is_known(model) and gates_are_known(model.config),
    )


def device_memory(placement: Placement) -> int:
    """Free bytes of a GPU."""
    if placement.device.type == "cuda":
        return torch.cuda.mem_get_info(placement.device)[0]
    return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()


def main_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes of main memory that this process may still take: the machine's, or its container's if less."""
    available: int = psutil.virtual_memory().available
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        counts = (cgroup / "memory.stat").read_text(encoding="ascii")
        used = next(int(line.split()[1]) for line in counts.splitlines() if line.startswith("anon "))
        return min(available, int(limit) - used)
    except (OSError, ValueError, StopIteration):  # no cgroup of version 2, or none with a limit ("max")
        return available


def less_memory(config: LearnerConfig) -> str:
    """The keys that lower the need of memory; those that cost least time come first."""
    table = config.training
    sizes = f"training.micro_batch_tokens ({table.micro_batch_tokens}) or row_tokens ({table.row_tokens})"
    knobs = [f"lower {sizes}"]
    if not table.gradient_checkpointing:
        knobs.append("set training.gradient_checkpointing = true")
    if config.update.has_own_critic:  # which neither [lora] nor several ranks go with
        knobs.append("set training.critic = 'head'")
    elif config.lora is None:
        knobs.append("train adapters with [lora]")
    knobs += _of_ranks(config, is_gpu=place(config.model.device).device.type != "cpu")
    knobs.append("lower inference.max_running, max_model_len or kept_prefixes, whose cache shares the device")
    copies = max(config.engines, config.fixed_copies)
    if copies > 1:
        knobs.append(f"lower services.gateways ({copies}), each with a copy and a cache of its own")
    if config.fixed_copies:
        knobs.append("serve the fixed policy elsewhere, and name its rollout_only.inference_url")
    return f"To need less: {'; '.join(knobs)}."


def _of_ranks(config: LearnerConfig, *, is_gpu: bool) -> Iterator[str]:
    """Keys of [learner], and the one that is read where there is one rank."""
    table = config.ranks
    if not table.fsdp_reshard_after_forward:
        yield "set learner.fsdp_reshard_after_forward = true"
    if table.data_parallel_replicate_degree > 1:
        yield f"lower learner.data_parallel_replicate_degree ({table.data_parallel_replicate_degree})"
    if not is_gpu:
        return
    if table.ranks > 1:
        yield f"raise learner.nproc_per_node ({table.nproc_per_node}) or nnodes ({table.nnodes})"
        if not table.fsdp_cpu_offload:
            yield "set learner.fsdp_cpu_offload = true"
        return
    if torch.cuda.device_count() > 1 and not config.update.has_own_critic:
        yield "share the weights out to more GPUs with [cluster] and learner.nproc_per_node"
    if not config.training.optimizer_offload:
        yield "set training.optimizer_offload = true"


def refuse_unknown_targets(table: ModelTable, lora: LoraTable) -> None:
    """Refuse adapters of layers that the job's model lacks, where the model is on this machine.

    Raises:
        JobError: as `adapted_layers`.
    """
    try:
        folder = None if table.preset is not None else model_folder(table, cached_only=True)
        config = _model_config(table, folder, table.vocab_size)
    except ModelFolderError:  # it may be whole on the machine that will train, whose learner checks it
        return
    model_shape(config, lora)


def _model_config(table: ModelTable, checkpoint: Path | None, vocabulary: int) -> Any:
    if checkpoint is None and table.preset is not None:
        return preset_config(PRESETS[table.preset], vocabulary=vocabulary)
    return _folder_config(checkpoint or model_folder(table))


def _folder_config(folder: Path) -> Any:
    refuse_incomplete(folder)
    refuse_untrainable(folder)
    try:
        model = base_folder(folder) or folder
        return AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a dozen types for a value that the library does not take
        raise ModelFolderError(f"config.json cannot be used: {error}", where=str(folder)) from error


def _adapter_weights(model: PreTrainedModel, lora: LoraTable) -> int:
    """rank * (in + out) of every linear layer that gets an adapter."""
    layers = adapted_layers(model, lora.target_modules).values()
    return sum(lora.rank * (layer.in_features + layer.out_features) for layer in layers)
