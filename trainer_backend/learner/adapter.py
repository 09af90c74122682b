"""A model with low-rank adapters by `peft`, which only this module imports whole.

Adapters and base are summed in float32 and rounded once, in updates, in the engine and in merged checkpoints.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from trainer_backend.errors import CheckpointError
from trainer_backend.job.training_table import ALL_LINEAR, LoraTable
from trainer_backend.learner.adapter_folder import (
    ADAPTER,
    delta,
    expert_delta,
    read_adapter,
    read_settings,
    refuse_other_settings,
    rename_for_wrapper,
    take_out,
)
from trainer_backend.learner.lora import adapted_experts, adapted_layers, lora_layers, names_experts
from trainer_backend.learner.sharding import replace_whole, whole
from trainer_backend.models.folder import collect_weights
from trainer_backend.models.origin import plain_name, read_origin


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
            for name, layer in lora_layers(model)
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
            target_modules=[one for one in targets if not names_experts(one)] if experts else targets,
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
        rename_for_wrapper(folder, read_origin(self._model).decoder)

    def weights(self) -> dict[str, Tensor]:
        """A and B of every adapted layer, under their names in the model; not copied."""
        return {name: weight.detach() for name, weight in self._model.named_parameters() if ".lora_" in name}

    def copied(self, stored: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """`stored`, or else the current weights, in tensors like ours, for `replaced`."""
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
            for name, tensor in collect_weights(self._model).items()
            if ".lora_" not in name
        }

    @torch.no_grad()
    def begin(self) -> None:
        """To be called where a warm-up has moved the adapters, before RL continues from them.

        A run that is resumed gets its base from iteration_0, where the adapters of that moment are merged in,
        by taking them out again (`adapter_folder.take_out`); a float32 base may differ in its last bit then.
        So that both continue from the same one, this run's base is computed that way too.
        """
        for _, layer in lora_layers(self._model):
            base: Tensor = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
            learned = _layer_delta(layer)
            replace_whole(base, (whole(base).to(device="cpu", dtype=torch.float32) + learned) - learned)


def unmerge(model: PreTrainedModel, folder: Path) -> None:
    """Take merged adapters out of a float32 model's weights and put them next to its base, as in training."""
    take_out(model, folder)
    with torch.random.fork_rng(devices=[]):
        Adapter(_wrapped(model, read_settings(folder))).restore(folder)


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


class AdaptedLinear(LoraLinear):
    """peft's layer, but the sum is rounded once.

    peft adds the adapter's product to an output of the base that is rounded already; of bfloat16, with its
    eight bits, half of what ten optimizer steps of 1e-5 have taught is gone then. Here the base's product is
    added to the adapter's inside one matrix product, whose sums are float32.
    """

    def parts(self) -> tuple[nn.Linear, Tensor, Tensor, float]:
        """The layer below, A [rank, in], B [out, rank] and the scale, for the engine's decoder."""
        base: Any = self.get_base_layer()
        down, up = (matrix[ADAPTER].get_parameter("weight") for matrix in (self.lora_A, self.lora_B))
        return base, down, up, self.scaling[ADAPTER]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[..., in] to [..., out]."""
        base: Any = self.get_base_layer()
        low = self.lora_B[ADAPTER](self.lora_A[ADAPTER](self.lora_dropout[ADAPTER](x)))
        summed = torch.addmm(
            low.flatten(0, -2), x.flatten(0, -2), base.weight.T, beta=self.scaling[ADAPTER]
        ).view(low.shape)
        biased: Tensor = summed if base.bias is None else summed + base.bias.to(summed.dtype)
        return biased


class AdaptedExperts(ParamWrapper):
    """peft's adapter of the experts of a layer, which are one tensor: the layer computes with W + s B A.

    peft puts the sum in its place by a cache that all threads of a process share: while an engine computes, a
    learner may be given the sum of an earlier step.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer itself."""
        own: Any = self
        below = own.base_layer
        left, right, scale = own.get_delta_factors(ADAPTER)
        summed = torch.baddbmm(own.get_param(), left, right, alpha=scale)
        depth = sum(isinstance(module, ParamWrapper) for module in below.modules())
        name = "base_layer." * depth + self.parameter_name
        return functional_call(below, {name: summed}, (x, *args), kwargs)
