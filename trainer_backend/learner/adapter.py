"""Low-rank adapters of a model by `peft`; the only module that imports peft as a whole.

Adapters and base are summed in float32 and rounded once: in updates, in the engine, in merged checkpoints.
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
    """The adapters of a model, into which peft inserts them; the model keeps its class and methods."""

    def __init__(self, wrapped: PeftModel) -> None:
        wrapped.eval()  # peft's modules begin in training mode
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
        """Insert new adapters, whose product is 0; torch's global generator is not changed.

        `base` is the path or hub name of the model, which is stored with the adapters.
        """
        adapted = adapted_layers(model, table.target_modules)
        targets: str | list[str] = list(table.target_modules)
        if table.adapts_all:
            linear = (module for module in model.modules() if isinstance(module, nn.Linear))
            # peft's ALL_LINEAR includes subclasses of linear layers, and experts.
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
            wrapped = _wrap(model, config)
        adapter = cls(wrapped)
        adapter._settings.base_model_name_or_path = base  # peft has set the model's own folder
        return adapter

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Load the adapters that `save` wrote."""
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
            raise CheckpointError(f"{folder}: the adapters belong to another model")
        for name, tensor in own.items():
            tensor.copy_(stored[name])

    def save(self, folder: Path) -> None:
        """Write adapter_model.safetensors and adapter_config.json in peft's layout."""
        # With "auto", peft would query the hub for changes of the base's embedding.
        self._wrapped.save_pretrained(str(folder), save_embedding_layers=False)
        rename_for_wrapper(folder, read_origin(self._model).decoder)

    def weights(self) -> dict[str, Tensor]:
        """Return A and B of every adapted layer by their names in the model, without copies."""
        return {name: weight.detach() for name, weight in self._model.named_parameters() if ".lora_" in name}

    def copied(self, stored: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Copy `stored`, or the current weights, to tensors for `replaced`."""
        given = stored or self.weights()
        return {name: torch.empty_like(own).copy_(given[name]) for name, own in self.weights().items()}

    @contextmanager
    def replaced(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Give the adapters other weights inside the context, such as those from the start of RL."""
        trained = [(self._model.get_parameter(name), tensor) for name, tensor in weights.items()]
        own = [parameter.data for parameter, _ in trained]
        try:
            # Exchanged, not overwritten, because a later backward pass needs the trained weights unchanged.
            for parameter, tensor in trained:
                parameter.data = tensor
            yield
        finally:
            for (parameter, _), tensor in zip(trained, own, strict=True):
                parameter.data = tensor

    @torch.no_grad()
    def merged(self) -> dict[str, Tensor]:
        """Return the merged weights, float32 in main memory, by their names in the plain model."""
        return {name: self.merged_in(name, tensor) for name, tensor in self.under().items()}

    @torch.no_grad()
    def merged_in(self, name: str, weight: Tensor) -> Tensor:
        """Merge the adapter into a weight of `under` that is not sharded; float32, in main memory."""
        plain, layer = weight.to(device="cpu", dtype=torch.float32), self._adapted.get(name)
        return plain if layer is None else plain + _layer_delta(layer)

    def under(self) -> dict[str, Tensor]:
        """Return the weights without adapters, by their names in the plain model; tied weights once."""
        return {
            plain_name(name): tensor
            for name, tensor in collect_weights(self._model).items()
            if ".lora_" not in name
        }

    @torch.no_grad()
    def begin(self) -> None:
        """Prepare the base for RL, after a warm-up has moved the adapters.

        A resumed run computes its base from iteration_0 by subtracting the merged adapters
        (`adapter_folder.take_out`), which may change a float32 base in its last bit. The base is computed in
        the same way here, so that both runs continue from the same weights.
        """
        for _, layer in lora_layers(self._model):
            base: Tensor = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
            learned = _layer_delta(layer)
            replace_whole(base, (whole(base).to(device="cpu", dtype=torch.float32) + learned) - learned)


def unmerge(model: PreTrainedModel, folder: Path) -> None:
    """Subtract merged adapters from a float32 model's weights, and insert them as adapters again."""
    take_out(model, folder)
    with torch.random.fork_rng(devices=[]):
        Adapter(_wrap(model, read_settings(folder))).restore(folder)


def _wrap(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    config._register_custom_module({nn.Linear: AdaptedLinear})
    settings: Any = model.config
    model_type = settings.model_type
    # By model_type, peft would change names of linear layers to those of fused experts.
    settings.model_type = ""
    try:
        with warnings.catch_warnings():
            # peft uses an old name of transformers 5, whose warning would appear in the run's output.
            warnings.simplefilter("ignore", FutureWarning)
            wrapped = get_peft_model(model, config)
    finally:
        settings.model_type = model_type
    for module in model.modules():
        if type(module) is ParamWrapper:
            module.__class__ = AdaptedExperts  # peft ignores what is registered for this class
    return wrapped


def _layer_delta(layer: Any) -> Tensor:
    down, up = (matrix[ADAPTER].weight.detach() for matrix in (layer.lora_A, layer.lora_B))
    if isinstance(layer, AdaptedExperts):
        is_by_input = getattr(layer.get_base_layer(), "is_transposed", False)
        return expert_delta(down, up, layer.r[ADAPTER], layer.scaling[ADAPTER], is_by_input)
    return delta(down, up, layer.scaling[ADAPTER])


class AdaptedLinear(LoraLinear):
    """peft's adapted linear layer, with a sum that is rounded once.

    peft adds the adapter's product to the rounded output of the base. In bfloat16, half of the effect of ten
    optimizer steps of 1e-5 is then lost. Here one matrix product with float32 sums adds both.
    """

    def parts(self) -> tuple[nn.Linear, Tensor, Tensor, float]:
        """Return the base layer, A [rank, in], B [out, rank] and the scale, for the engine's decoder."""
        base: Any = self.get_base_layer()
        down, up = (matrix[ADAPTER].get_parameter("weight") for matrix in (self.lora_A, self.lora_B))
        return base, down, up, self.scaling[ADAPTER]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map [..., in] to [..., out]."""
        base: Any = self.get_base_layer()
        low = self.lora_B[ADAPTER](self.lora_A[ADAPTER](self.lora_dropout[ADAPTER](x)))
        summed = torch.addmm(
            low.flatten(0, -2), x.flatten(0, -2), base.weight.T, beta=self.scaling[ADAPTER]
        ).view(low.shape)
        biased: Tensor = summed if base.bias is None else summed + base.bias.to(summed.dtype)
        return biased


class AdaptedExperts(ParamWrapper):
    """peft's adapter of a layer's experts, which are one tensor: the layer computes with W + s B A.

    peft caches the sum for all threads of a process. While an engine computes, a learner could get the sum of
    an earlier step; so it is not cached here.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer with adapted weights."""
        own: Any = self
        below = own.base_layer
        left, right, scale = own.get_delta_factors(ADAPTER)
        summed = torch.baddbmm(own.get_param(), left, right, alpha=scale)
        depth = sum(isinstance(module, ParamWrapper) for module in below.modules())
        name = "base_layer." * depth + self.parameter_name
        return functional_call(below, {name: summed}, (x, *args), kwargs)
