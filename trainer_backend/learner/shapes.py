"""Reads from a model's config the sizes that decide its memory, without loading its weights."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from trainer_backend.core.presets import PRESETS
from trainer_backend.errors import JobError, ModelFolderError
from trainer_backend.job.tables import ModelTable
from trainer_backend.job.training_table import LoraTable
from trainer_backend.learner.lora import adapted_experts, adapted_layers
from trainer_backend.learner.operators import gates_are_known
from trainer_backend.learner.packed_decoder import is_known
from trainer_backend.models.folder import config_alone, folder_config
from trainer_backend.models.kinds import (
    STATELESS,
    STATES,
    largest,
    layer_kinds,
    own_attention,
    read_head_dim,
    why_not_by_position,
)
from trainer_backend.models.presets import preset_config
from trainer_backend.models.sources import model_folder
from trainer_backend.models.text_part import decoder_layers, empty_model

FLOAT32, BFLOAT16 = 4, 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder from which its memory is estimated."""

    parameters: int
    """Number of weights; tied weights count once."""
    layers: int
    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    adapters: int = 0
    """Number of weights of the adapters; 0 without [lora]."""
    adapted_experts: int = 0
    """Number of expert weights that have adapters. A layer adds the adapters to a copy of these weights."""
    critic: int = 0
    """Number of weights of the critic: its head, and its own layers if it has any; 0 without a critic."""
    head_norms: bool = False
    """Whether each head's queries and keys are normalised, as in Qwen3."""
    vectors: int = 0
    """Number of weights in norms and biases, which are always float32; included in `parameters`."""
    ends: int = 0
    """Number of weights outside of the layers (embedding, last norm, head); included in `parameters`."""
    has_kernels: bool = False
    """Whether the learner has kernels for the model's layers (`learner.operators`)."""
    own_pass: bool = True
    """Whether the learner has its own forward pass for the model (`learner.packed_decoder`)."""
    apart: str = ""
    """Why several segments cannot be packed into one row (`models.kinds`); empty: they can."""
    eager: bool = False
    """Whether attention saves its scores, [heads, length, length], for the backward pass."""
    states: int = 0
    """Number of layers with a recurrent state instead of keys and values."""
    state_bytes: int = 0
    """Bytes per token that autograd saves in a layer with a recurrent state, without norms and MLP."""
    state_numbers: int = 0
    """How many numbers the recurrent state of one layer has, for each sequence in an engine."""
    mlps: int = 0
    """Number of layers that are only an MLP, in models whose other layers have no MLP."""
    norms: float = 2.0
    """Mean number of norms over the whole width in a layer; Gemma has four."""

    @property
    def attending(self) -> int:
        """Number of layers with attention, plus those with a recurrent state of unknown size."""
        return self.layers - self.mlps - (self.states if self.state_bytes else 0)

    @property
    def layer(self) -> int:
        """Mean number of weights of a layer."""
        return (self.parameters - self.ends) // self.layers

    @property
    def cached_numbers(self) -> int:
        """How many numbers the keys and values of one token have in all layers."""
        return 2 * (self.layers - self.mlps - self.states) * self.kv_heads * self.head_dim

    def frozen_bytes(self, matrices: int) -> int:
        """Return the bytes of the model's own weights, with `matrices` bytes for each entry of a matrix.

        Norms and biases are float32; adapters and critic are not included.
        """
        return self.parameters * matrices + self.vectors * (FLOAT32 - matrices)


def model_shape(
    config: Any, lora: LoraTable | None, *, critic: str | None = None, longest: int | None = None
) -> ModelShape:
    """Read the sizes from an empty model on the meta device, which works for any architecture.

    `longest` is the maximal length of a sequence in tokens; None: the model's number of positions. Raises
    ModelFolderError if the config does not describe a decoder with attention.
    """
    try:
        model = empty_model(config)
        shape = _shape(model, config.get_text_config(), lora, critic=critic)
        longest = longest or getattr(config.get_text_config(), "max_position_embeddings", None) or 1
        apart = why_not_by_position(model, longest=longest) or ""
        return replace(shape, apart=apart, eager=bool(apart) and own_attention(model) == "eager")
    except (AttributeError, ValueError) as error:  # ValueError: sizes that contradict each other
        raise ModelFolderError(
            f"{config.model_type!r} is not a decoder of layers with attention, as needed: {error}",
            where="model",
        ) from error


def _shape(model: PreTrainedModel, config: Any, lora: LoraTable | None, *, critic: str | None) -> ModelShape:
    width, heads = config.hidden_size, config.num_attention_heads
    count, in_layers = (
        sum(weight.numel() for weight in part.parameters()) for part in (model, decoder_layers(model))
    )
    targets, rank = ((), 0) if lora is None else (lora.target_modules, lora.rank)
    sizes = [(1, layer.in_features + layer.out_features) for layer in adapted_layers(model, targets).values()]
    experts = adapted_experts(model, targets).values()
    sizes += [(len(one), sum(one.shape[1:])) for one in experts]
    kinds = layer_kinds(config)
    return ModelShape(
        parameters=count,
        ends=count - in_layers,
        layers=len(decoder_layers(model)),
        width=width,
        mlp_width=_mlp_width(config),
        heads=heads,
        kv_heads=largest(config, "num_key_value_heads") or heads,
        head_dim=read_head_dim(config),
        vocabulary=config.vocab_size,
        adapters=sum(rank * count * size for count, size in sizes),
        adapted_experts=sum(one.numel() for one in experts),
        critic=0 if critic is None else width + 1 + count * (critic == "own"),
        vectors=sum(weight.numel() for weight in model.parameters() if weight.dim() == 1),
        head_norms=any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()),
        has_kernels=is_known(model) and gates_are_known(model.config),
        own_pass=is_known(model),
        states=sum(kind in STATES for kind in kinds),
        state_bytes=_state_bytes(config),
        state_numbers=_state_numbers(config),
        mlps=sum(kind in STATELESS for kind in kinds),
        norms=_count_norms(decoder_layers(model), width),
    )


def _count_norms(layers: nn.ModuleList, width: int) -> float:
    norms = (
        weight
        for name, weight in layers.named_parameters()
        if "norm" in name and weight.dim() == 1 and len(weight) == width
    )
    return sum(1 for _ in norms) / len(layers)


def _mlp_width(config: Any) -> int:
    """Return the width of the MLP that a token passes through, as a measure of the memory it needs.

    With experts, this is the sum of the widths of a token's chosen and shared experts. Half of the hidden
    size is added for each chosen expert, because it has a copy of the hidden state.
    """
    width = config.hidden_size
    dense = largest(config, "intermediate_size") or 4 * width
    names = ("num_experts_per_tok", "top_k_experts")
    chosen = next((int(value) for name in names if (value := getattr(config, name, None))), 0)
    if not chosen:
        return int(dense)
    routed = getattr(config, "moe_intermediate_size", None) or dense
    names = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    always = [getattr(config, name, None) for name in names]
    shared = sum(filter(None, always)) or routed * int(getattr(config, "n_shared_experts", None) or 0)
    return int(chosen * (routed + width // 2) + shared)


def _state_bytes(config: Any) -> int:
    """Estimate the bytes per token that autograd saves in a layer's recurrence, without its projections.

    The coefficients were fitted to measurements on random float32 layers of transformers 5.24, within 10 %. A
    chunk of the delta rule has 64 tokens.
    """
    if heads := getattr(config, "linear_num_value_heads", None):
        keys, values = config.linear_key_head_dim, config.linear_value_head_dim
        by_key = 29 * config.linear_num_key_heads * keys
        return int(heads * (42 * keys + 55 * values + 19 * 64) + by_key)
    heads, size, state, groups, _, chunk = _state_space(config)
    return heads * (57 * size + 37 * state + 12 * chunk) + 24 * groups * state


def _state_numbers(config: Any) -> int:
    """Count the numbers in the recurrent state of one layer, for one sequence.

    They include the last inputs of the layer's convolution.
    """
    if heads := getattr(config, "linear_num_value_heads", None):
        keys, values = config.linear_key_head_dim, config.linear_value_head_dim
        mixed = 2 * config.linear_num_key_heads * keys + heads * values
        return int(heads * keys * values + mixed * config.linear_conv_kernel_dim)
    heads, size, state, groups, kernel, _ = _state_space(config)
    convolved: int = config.hidden_size * int(getattr(config, "conv_L_cache", None) or 0)
    return heads * size * state + (heads * size + 2 * groups * state) * kernel + convolved


def _state_space(config: Any) -> tuple[int, ...]:
    """Read the sizes of a state-space layer; all are 0 if the config has none.

    _STATE_SPACES lists tuples of names of the sizes; the first tuple that the config has is used.
    """
    sizes = (tuple(int(getattr(config, name, None) or 0) for name in names) for names in _STATE_SPACES)
    return next((each for each in sizes if each[0]), (0,) * len(_STATE_SPACES[0]))


# Config keys of: number of heads, head width, state size, groups, convolution width, tokens of a chunk.
_STATE_SPACES = (
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "chunk_size"),
    (*(f"mamba_{name}" for name in ("n_heads", "d_head", "d_state", "n_groups", "d_conv", "chunk_size")),),
)


def count_checkpointed(wish: bool | int, layers: int) -> int:
    """Return how many of `layers` the key `training.gradient_checkpointing` (`wish`) checkpoints.

    Raises JobError if it asks for more layers than the model has.
    """
    if isinstance(wish, bool):
        return layers if wish else 0
    if wish > layers:
        raise JobError(
            f"it names {wish} layers, but the model has {layers}",
            where="training.gradient_checkpointing",
            hint=f"Set true for all of them, or a number up to {layers}.",
        )
    return wish


def refuse_more_layers(table: ModelTable, wish: bool | int) -> None:
    """Raise JobError if `training.gradient_checkpointing` names more layers than the model has.

    Without the model on this machine, nothing is checked.
    """
    if not isinstance(wish, bool) and (config := config_here(table)) is not None:
        count_checkpointed(wish, model_shape(config, None).layers)


def config_here(table: ModelTable) -> Any | None:
    """Read the config of the job's model; return None if the model is not completely on this machine."""
    try:
        folder = None if table.preset is not None else model_folder(table, cached_only=True)
        return model_config(table, folder, table.vocab_size)
    except ModelFolderError:  # the learner will check it on its own machine
        return None


def refuse_unknown_targets(table: ModelTable, lora: LoraTable) -> None:
    """Raise JobError if the job adapts layers that its model does not have.

    Without the model on this machine, nothing is checked.
    """
    if (config := config_here(table)) is not None:
        model_shape(config, lora)


def model_config(table: ModelTable, checkpoint: Path | None, vocabulary: int) -> Any:
    if checkpoint is None and table.preset is not None:
        return preset_config(PRESETS[table.preset], vocabulary=vocabulary)
    return folder_config(checkpoint or model_folder(table))


def cached_config(table: ModelTable, vocabulary: int) -> Any:
    """Read the config of a model on this machine, even if its weights are not here; never ask the hub."""
    if table.preset is not None:
        return model_config(table, None, vocabulary)
    return config_alone(model_folder(table, cached_only=True))
