"""Low-rank adapters by `peft`: the [lora] table.

    y = x W^T + (alpha / rank) * x A^T B^T        A [rank, in], B [out, rank]; B is 0 at first

Only A and B are trained, in float32; W stays what the job's model has. Learner and engine compute the sum
alike, and never as x (W + (alpha / rank) * B A)^T: adding a small product to W in bfloat16 would round it
away. Only the model folders of checkpoints are merged, in float32.

The policy that RL starts from is the model with the adapters of that moment (after a warm-up they are not 0),
so the KL term needs no second copy of the model either.

Source: Hu et al., LoRA, arXiv:2106.09685.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import getsource
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from shared_schemas.base import did_you_mean
from trainer_backend.errors import CheckpointError, JobError
from trainer_backend.job.training_table import ALL_LINEAR, LoraTable
from trainer_backend.learner.adapter_folder import (
    ADAPTER,
    AdaptedExperts,
    AdaptedLinear,
    delta,
    expert_delta,
    read_adapter,
    read_settings,
    refuse_other_settings,
    rename_for_wrapper,
    take_out,
)
from trainer_backend.learner.sharding import replace_whole, whole
from trainer_backend.models.folder import weights_of
from trainer_backend.models.origin import origin_of, plain_name


class Adapter:
    """The adapters of a model, which peft puts into it in place; `model` keeps its class and its methods."""

    def __init__(self, wrapped: PeftModel) -> None:
        wrapped.eval()  # what peft adds begins in training mode
        self._wrapped = wrapped
        model: Any = wrapped.base_model.model
        self._model: Any = model
        self._settings: Any = wrapped.peft_config[ADAPTER]
        self._adapted = {
            f"{plain_name(name)}.{getattr(layer, 'parameter_name', 'weight')}": layer
            for name, layer in _layers(model)
        }

    @classmethod
    def fresh(cls, model: PreTrainedModel, table: LoraTable, *, seed: int, base: str | None) -> "Adapter":
        """Adapters that change nothing yet; torch's global generator is left as it was.

        `base` is the path or hub name of the model, for whatever loads the saved adapters.
        """
        adapted = adapted_layers(model, table.target_modules)
        targets: str | list[str] = list(table.target_modules)
        if table.adapts_all:
            linear = (module for module in model.modules() if isinstance(module, nn.Linear))
            # peft's word takes in every subclass of a linear layer, and what it knows as experts.
            targets = ALL_LINEAR if len(adapted) == sum(1 for _ in linear) - 1 else sorted(adapted)
        experts = adapted_experts(model, table.target_modules)
        config = LoraConfig(
            r=table.rank,
            lora_alpha=table.alpha,
            lora_dropout=table.dropout,
            target_modules=[one for one in targets if not _names_experts(one)] if experts else targets,
            target_parameters=sorted(experts) or None,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            wrapped = _wrapped(model, config)
        adapter = cls(wrapped)
        adapter._settings.base_model_name_or_path = base  # peft has put the model's own folder there
        return adapter

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Become the adapters that `save` wrote."""
        stored = read_adapter(folder)
        layers = [
            name.removesuffix(".weight")
            for name, layer in self._adapted.items()
            if not isinstance(layer, AdaptedExperts)
        ]
        refuse_other_settings(folder, self._settings, layers)
        own = self.weights()
        shapes, stored_shapes = ({name: x.shape for name, x in part.items()} for part in (own, stored))
        if shapes != stored_shapes:
            raise CheckpointError(f"{folder}: the adapters are those of another model")
        for name, tensor in own.items():
            tensor.copy_(stored[name])

    def save(self, folder: Path) -> None:
        """adapter_model.safetensors and adapter_config.json, as peft lays them out."""
        # "auto" would ask the hub whether the base's embedding was changed.
        self._wrapped.save_pretrained(str(folder), save_embedding_layers=False)
        rename_for_wrapper(folder, origin_of(self._model).decoder)

    def weights(self) -> dict[str, Tensor]:
        """A and B of every adapted layer, under their names in the model; not copied."""
        return {name: weight.detach() for name, weight in self._model.named_parameters() if ".lora_" in name}

    def copied(self, stored: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """`stored`, or else the weights of now, in tensors like ours, for `replaced`."""
        given = stored or self.weights()
        return {name: torch.empty_like(own).copy_(given[name]) for name, own in self.weights().items()}

    @contextmanager
    def replaced(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Give the adapters other weights inside this context, such as those that RL started from."""
        trained = [(self._model.get_parameter(name), tensor) for name, tensor in weights.items()]
        own = [parameter.data for parameter, _ in trained]
        try:
            # Not copied into them: a backward pass that is still to come needs them unchanged.
            for parameter, tensor in trained:
                parameter.data = tensor
            yield
        finally:
            for (parameter, _), tensor in zip(trained, own, strict=True):
                parameter.data = tensor

    @torch.no_grad()
    def merged(self) -> dict[str, Tensor]:
        """The weights of the plain model that computes the same, float32 in main memory, one by one."""
        return {name: self.merged_in(name, tensor) for name, tensor in self.under().items()}

    @torch.no_grad()
    def merged_in(self, name: str, weight: Tensor) -> Tensor:
        """A whole weight of `under` with its adapter merged in; float32, in main memory."""
        plain, layer = weight.to(device="cpu", dtype=torch.float32), self._adapted.get(name)
        return plain if layer is None else plain + _layer_delta(layer)

    def under(self) -> dict[str, Tensor]:
        """The weights under the adapters, by their names in the plain model; of tied ones the first alone."""
        return {
            plain_name(name): tensor
            for name, tensor in weights_of(self._model).items()
            if ".lora_" not in name
        }

    @torch.no_grad()
    def begin(self) -> None:
        """To be called where a warm-up has moved the adapters, before RL goes on from them.

        A run that is resumed gets its base from iteration_0, where the adapters of that moment are merged in,
        by taking them out again (`adapter_folder.take_out`); a float32 base may differ in its last bit then.
        So that both go on from the same one, this run's base takes that way too.
        """
        for _, layer in _layers(self._model):
            base: Tensor = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
            learned = _layer_delta(layer)
            replace_whole(base, (whole(base).to(device="cpu", dtype=torch.float32) + learned) - learned)


def set_beside(model: PreTrainedModel, folder: Path) -> None:
    """Take merged adapters out of a float32 model's weights, and put them beside its base, as in training."""
    take_out(model, folder)
    with torch.random.fork_rng(devices=[]):
        Adapter(_wrapped(model, read_settings(folder))).restore(folder)


def adapter_dropouts(model: PreTrainedModel) -> list[nn.Module]:
    """The dropout modules of the adapters; none where there are no adapters."""
    return [dropout for _, layer in _layers(model) for dropout in layer.lora_dropout.values()]


def _wrapped(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    config._register_custom_module({nn.Linear: AdaptedLinear})
    settings: Any = model.config
    model_type = settings.model_type
    # By this name peft would turn names of linear layers into those of fused experts, which are not adapted.
    settings.model_type = ""
    try:
        with warnings.catch_warnings():
            # peft asks by a name that transformers 5 still has, and prints a warning into the run's output.
            warnings.simplefilter("ignore", FutureWarning)
            wrapped = get_peft_model(model, config)
    finally:
        settings.model_type = model_type
    for module in model.modules():
        if type(module) is ParamWrapper:
            module.__class__ = AdaptedExperts  # peft makes this kind itself, whatever is registered
    return wrapped


def _layer_delta(layer: Any) -> Tensor:
    down, up = (matrix[ADAPTER].weight.detach() for matrix in (layer.lora_A, layer.lora_B))
    if isinstance(layer, AdaptedExperts):
        is_by_input = getattr(layer.get_base_layer(), "is_transposed", False)
        return expert_delta(down, up, layer.r[ADAPTER], layer.scaling[ADAPTER], is_by_input)
    return delta(down, up, layer.scaling[ADAPTER])


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


def adapted_layers(model: PreTrainedModel, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """Return the layers that get an adapter, by their names in the model, which may be without memory.

    A target is a layer's whole name or the end of it, as in peft. peft refuses targets only where none of
    them is there, and skips the others in silence; here one that names no linear layer of the model, or one
    whose adapter would not be computed, is a JobError.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    ends = {id(model.get_input_embeddings()): "the embedding", id(head): "the head"}
    for name, module in model.named_modules():
        if id(module) in ends and any(_is_target(target, name) for target in targets):
            raise JobError(
                f"lora.target_modules takes in {ends[id(module)]} ({name}), which may be one matrix with the "
                "model's other end, and which scoring reads directly; leave it out"
            )
    every = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    reasons = {name: _why_not_adapted(model, name, module) for name, module in every.items()}
    linear = {name: module for name, module in every.items() if reasons[name] is None}
    if ALL_LINEAR in targets:
        return linear
    for target in targets:
        if left_out := [name for name in every if _is_target(target, name) and name not in linear]:
            raise JobError(
                f"lora.target_modules takes in {left_out[0]}, {reasons[left_out[0]]}; leave it out"
            )
        if not any(_is_target(target, name) for name in (*linear, *adapted_experts(model, [target]))):
            known = {ALL_LINEAR, *(name.rpartition(".")[2] for name in linear)}
            raise JobError(
                f"lora.target_modules: the model has no linear layer {target!r}{did_you_mean(target, known)}"
                f"{_of_experts(model)}"
            )
    return {name: layer for name, layer in linear.items() if any(_is_target(one, name) for one in targets)}


def _why_not_adapted(model: PreTrainedModel, name: str, layer: nn.Linear) -> str | None:
    """Why an adapter of a linear layer would not be computed; None where it is."""
    if type(layer).forward is not nn.Linear.forward:
        return f"a {type(layer).__name__}, which computes more than a product"
    parent, _, own = name.rpartition(".")
    if f"self.{own}.weight" in getsource(type(model.get_submodule(parent))):
        return "whose weight a kernel of its layer reads without an adapter"
    return None


def adapted_experts(model: PreTrainedModel, targets: Sequence[str]) -> dict[str, nn.Parameter]:
    """Return the experts that get an adapter, which are one tensor a layer, by their names in the model.

    They are named with their module, as experts.down_proj: a linear layer may have the same name.
    """
    named = [target for target in targets if _names_experts(target)]
    fused = _fused_experts(model) if named else {}
    return {name: one for name, one in fused.items() if any(_is_target(target, name) for target in named)}


def refuse_experts(model: PreTrainedModel, table: LoraTable, *, engine: str, ranks: int) -> None:
    """Refuse (JobError) adapters of experts, which are added to the weights themselves, where that fails."""
    found = adapted_experts(model, table.target_modules)
    low = next((weight.dtype for weight in found.values() if weight.dtype != torch.float32), None)
    reasons = {
        f"lora.dropout is {table.dropout}, and no input of theirs can be dropped": table.dropout > 0,
        f"in {str(low).removeprefix('torch.')} most of a small product is rounded away": low is not None,
        f"{ranks} ranks share these weights out": ranks > 1,
        "vLLM servers are given adapters of linear layers alone": engine == "vllm",
    }
    for reason, holds in reasons.items():
        if found and holds:
            raise JobError(
                f"lora.target_modules takes in {next(iter(found))}: adapters of experts are added to their "
                f"weights, and {reason}; leave it out"
            )


def _fused_experts(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Tensors [E, ., .] of all experts of a layer; their biases have no adapter."""
    weights = model.named_parameters()
    return {name: weight for name, weight in weights if _names_experts(name) and weight.dim() == 3}


def _names_experts(name: str) -> bool:
    return ".experts." in f".{name}"


def _of_experts(model: PreTrainedModel) -> str:
    fused = next(iter(_fused_experts(model)), None)
    if fused is None:
        return ""
    return f"; its experts are one tensor a layer ({fused}), named as experts.{fused.rpartition('.')[2]}"


def _is_target(target: str, name: str) -> bool:
    return f".{name}".endswith(f".{target}")
