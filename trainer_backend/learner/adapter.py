"""Low-rank adapters (LoRA) of a model, inserted by `peft`.

An adapter's contribution is added to the base model's contribution in float32, and only the sum is rounded.
This holds in updates, in the inference engine and in merged checkpoints.
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
    """The low-rank adapters of one model. peft replaces layers of the model, but not the model's class."""

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
        """Insert new adapters into `model`. Their matrices B are 0, so the model's outputs do not change.

        `seed` determines the random values of A; torch's global random state is left unchanged. `base` is the
        path or hub name of the model, which `save` writes to the adapters' config.
        """
        adapted = adapted_layers(model, table.target_modules)
        targets: str | list[str] = list(table.target_modules)
        if table.adapts_all:
            linear = (module for module in model.modules() if isinstance(module, nn.Linear))
            # peft's ALL_LINEAR also selects experts and subclasses of nn.Linear. It is used only if that is
            # the same set of layers: all linear layers except the LM head.
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
        adapter._settings.base_model_name_or_path = base  # peft has stored the model's own folder here
        return adapter

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Load adapters that `save` wrote. Raises CheckpointError if they do not fit the model."""
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
        """Return the matrices A and B of every adapted layer, by parameter name. Tensors are not copied."""
        return {name: weight.detach() for name, weight in self._model.named_parameters() if ".lora_" in name}

    def copied(self, stored: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return copies of adapter weights, on the model's device and in its dtype, to pass to `replaced`.

        The copied weights are `stored`, or the current weights if `stored` is None.
        """
        given = stored or self.weights()
        return {name: torch.empty_like(own).copy_(given[name]) for name, own in self.weights().items()}

    @contextmanager
    def replaced(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Use `weights` as the model's adapters inside the context, such as those of the reference."""
        trained = [(self._model.get_parameter(name), tensor) for name, tensor in weights.items()]
        own = [parameter.data for parameter, _ in trained]
        try:
            # The tensors are exchanged, because overwriting the trained weights would invalidate a backward
            # pass that comes later.
            for parameter, tensor in trained:
                parameter.data = tensor
            yield
        finally:
            for (parameter, _), tensor in zip(trained, own, strict=True):
                parameter.data = tensor

    @torch.no_grad()
    def merged(self) -> dict[str, Tensor]:
        """Return all weights with merged adapters, float32 on the CPU, named as in the model without peft."""
        return {name: self.merged_in(name, tensor) for name, tensor in self.under().items()}

    @torch.no_grad()
    def merged_in(self, name: str, weight: Tensor) -> Tensor:
        """Return one base weight with its adapter merged, if it has one, in float32 on the CPU.

        `name` is a key of `under`; `weight` is the whole tensor, gathered from all ranks.
        """
        plain, layer = weight.to(device="cpu", dtype=torch.float32), self._adapted.get(name)
        return plain if layer is None else plain + _layer_delta(layer)

    def under(self) -> dict[str, Tensor]:
        """Return the base weights, without adapters, named as in the model without peft.

        Tied weights are included once, under their first name.
        """
        return {
            plain_name(name): tensor
            for name, tensor in collect_weights(self._model).items()
            if ".lora_" not in name
        }

    @torch.no_grad()
    def begin(self) -> None:
        """Make the base weights equal to those of a resumed run; called after the warm-up, before RL.

        A resumed run loads the merged weights of iteration_0 and subtracts the adapters
        (`adapter_folder.take_out`), which may change a float32 weight in its last bit. Adding and subtracting
        the adapters here makes the same change, so that both runs continue from equal weights.
        """
        for _, layer in lora_layers(self._model):
            base: Tensor = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
            learned = _layer_delta(layer)
            replace_whole(base, (whole(base).to(device="cpu", dtype=torch.float32) + learned) - learned)


def unmerge(model: PreTrainedModel, folder: Path) -> None:
    """Separate merged adapters from a float32 model: subtract them, then insert them as peft's adapters.

    `folder` contains the adapters that were merged into the weights of `model`.
    """
    take_out(model, folder)
    with torch.random.fork_rng(devices=[]):
        Adapter(_wrap(model, read_settings(folder))).restore(folder)


def _wrap(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    config._register_custom_module({nn.Linear: AdaptedLinear})
    settings: Any = model.config
    model_type = settings.model_type
    # For some values of model_type, peft would replace the names of linear layers by names of fused experts.
    settings.model_type = ""
    try:
        with warnings.catch_warnings():
            # peft uses a deprecated name of transformers 5; the warning would appear in the run's output.
            warnings.simplefilter("ignore", FutureWarning)
            wrapped = get_peft_model(model, config)
    finally:
        settings.model_type = model_type
    for module in model.modules():
        if type(module) is ParamWrapper:
            module.__class__ = AdaptedExperts  # peft ignores a class registered in its place
    return wrapped


def _layer_delta(layer: Any) -> Tensor:
    down, up = (matrix[ADAPTER].weight.detach() for matrix in (layer.lora_A, layer.lora_B))
    if isinstance(layer, AdaptedExperts):
        is_by_input = getattr(layer.get_base_layer(), "is_transposed", False)
        return expert_delta(down, up, layer.r[ADAPTER], layer.scaling[ADAPTER], is_by_input)
    return delta(down, up, layer.scaling[ADAPTER])


class AdaptedLinear(LoraLinear):
    """peft's linear layer with an adapter, whose output is rounded only once.

    peft itself rounds the output of the base layer before it adds the adapter's output. In bfloat16, this
    loses half of the effect of ten optimizer steps with learning rate 1e-5. This class computes the sum by
    one `addmm`, which accumulates in float32.
    """

    def parts(self) -> tuple[nn.Linear, Tensor, Tensor, float]:
        """Return base layer, A [rank, in], B [out, rank] and scale alpha / rank, for the engine's decoder."""
        base: Any = self.get_base_layer()
        down, up = (matrix[ADAPTER].get_parameter("weight") for matrix in (self.lora_A, self.lora_B))
        return base, down, up, self.scaling[ADAPTER]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the output of the layer with its adapter, [..., out], from x [..., in]."""
        base: Any = self.get_base_layer()
        low = self.lora_B[ADAPTER](self.lora_A[ADAPTER](self.lora_dropout[ADAPTER](x)))
        summed = torch.addmm(
            low.flatten(0, -2), x.flatten(0, -2), base.weight.T, beta=self.scaling[ADAPTER]
        ).view(low.shape)
        biased: Tensor = summed if base.bias is None else summed + base.bias.to(summed.dtype)
        return biased


class AdaptedExperts(ParamWrapper):
    """peft's adapter for the experts of a layer, whose weights are stacked in one tensor.

    The layer computes with the sum of its weights and the scaled product of the adapter's matrices. peft
    caches this sum for all threads of a process, so a learner could read the sum of an earlier step while an
    engine computes in another thread. This class computes the sum in every forward pass.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute the experts' output with the adapter added to their weights."""
        own: Any = self
        below = own.base_layer
        left, right, scale = own.get_delta_factors(ADAPTER)
        summed = torch.baddbmm(own.get_param(), left, right, alpha=scale)
        depth = sum(isinstance(module, ParamWrapper) for module in below.modules())
        name = "base_layer." * depth + self.parameter_name
        return functional_call(below, {name: summed}, (x, *args), kwargs)
