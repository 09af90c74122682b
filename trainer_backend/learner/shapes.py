"""The shape of a job's model: the sizes that decide how much memory it needs, without its weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from trainer_backend.core.presets import PRESETS
from trainer_backend.errors import ModelFolderError
from trainer_backend.job.tables import ModelTable
from trainer_backend.job.training_table import LoraTable
from trainer_backend.learner.attention import head_dim_of
from trainer_backend.learner.lora import adapted_layers
from trainer_backend.learner.operators import gates_are_known
from trainer_backend.learner.packed_decoder import is_known
from trainer_backend.models.folder import folder_config
from trainer_backend.models.presets import preset_config
from trainer_backend.models.sources import model_folder
from trainer_backend.models.text_part import empty_model

FLOAT32, BFLOAT16 = 4, 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder that decide how much memory it needs.

    parameters: all weights, tied ones once.
    adapters: weights of the adapters; 0 without [lora].
    critic: weights of a critic's head, and of its own layers where it has some; 0 without one.
    head_norms: whether queries and keys are normed head by head, as in Qwen3.
    vectors: weights of norms and biases, which are float32 everywhere; `parameters` counts them too.
    ends: weights outside of the layers, such as embedding and head; `parameters` counts them too.
    has_kernels: whether the learner has kernels for its layers (`learner.operators`).
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
    critic: int = 0
    head_norms: bool = False
    vectors: int = 0
    ends: int = 0
    has_kernels: bool = False

    @property
    def layer(self) -> int:
        """Weights of a layer."""
        return (self.parameters - self.ends) // self.layers

    @property
    def cached_numbers(self) -> int:
        """Of the keys and values of a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def frozen_bytes(self, matrices: int) -> int:
        """Bytes of a copy without adapters and value head, with `matrices` bytes a number in a matrix."""
        return self.parameters * matrices + self.vectors * (FLOAT32 - matrices)


def model_shape(config: Any, lora: LoraTable | None, *, critic: str | None = None) -> ModelShape:
    """Counted on a model without memory, so that any architecture is counted as it is."""
    try:
        return _shape(empty_model(config), config.get_text_config(), lora, critic=critic)
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
    layers = [] if lora is None else [*adapted_layers(model, lora.target_modules).values()]
    rank = 0 if lora is None else lora.rank
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
        adapters=sum(rank * (layer.in_features + layer.out_features) for layer in layers),
        critic=0 if critic is None else width + 1 + count * (critic == "own"),
        vectors=sum(weight.numel() for weight in model.parameters() if weight.dim() == 1),
        head_norms=any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()),
        has_kernels=is_known(model) and gates_are_known(model.config),
    )


def refuse_unknown_targets(table: ModelTable, lora: LoraTable) -> None:
    """Refuse adapters (JobError) of layers that the job's model lacks, where the model is on this machine."""
    try:
        folder = None if table.preset is not None else model_folder(table, cached_only=True)
        config = model_config(table, folder, table.vocab_size)
    except ModelFolderError:  # it may be whole on the machine that will train, whose learner checks it
        return
    model_shape(config, lora)


def model_config(table: ModelTable, checkpoint: Path | None, vocabulary: int) -> Any:
    if checkpoint is None and table.preset is not None:
        return preset_config(PRESETS[table.preset], vocabulary=vocabulary)
    return folder_config(checkpoint or model_folder(table))
