"""The shape of a job's model: the sizes that decide its memory, without its weights."""

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
    """The sizes of a decoder that decide its memory."""

    parameters: int
    """Number of weights, tied ones counted once."""
    layers: int
    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    adapters: int = 0
    """Weights of the adapters; 0 without [lora]."""
    adapted_experts: int = 0
    """Weights of experts with adapters; a layer computes with the sums of both."""
    critic: int = 0
    """Weights of a critic's head and own layers; 0 without a critic."""
    head_norms: bool = False
    """Whether queries and keys are normed per head, as in Qwen3."""
    vectors: int = 0
    """Weights of norms and biases, which are always float32; part of `parameters`."""
    ends: int = 0
    """Weights outside of the layers, such as embedding and head; part of `parameters`."""
    has_kernels: bool = False
    """Whether the learner has kernels for its layers (`learner.operators`)."""
    own_pass: bool = True
    """Whether the learner has its own forward pass for it (`learner.packed_decoder`)."""
    apart: str = ""
    """Why each segment needs a row of its own; empty: rows are packed (`models.kinds`)."""
    eager: bool = False
    """Whether attention scores, [heads, length, length], are saved."""
    states: int = 0
    """Number of layers with a state instead of keys and values."""
    state_bytes: int = 0
    """Bytes per token that autograd saves in a layer with a state, without norms and MLP."""
    state_numbers: int = 0
    """How many numbers a layer's state has, per row of an engine."""
    mlps: int = 0
    """Number of layers that are only an MLP, in models whose other layers have no MLP."""
    norms: float = 2.0
    """Norms per layer over its whole width; Gemma has four."""

    @property
    def attending(self) -> int:
        """Number of layers with attention; unknown states are counted as attention."""
        return self.layers - self.mlps - (self.states if self.state_bytes else 0)

    @property
    def layer(self) -> int:
        """Weights of a layer."""
        return (self.parameters - self.ends) // self.layers

    @property
    def cached_numbers(self) -> int:
        """How many numbers the keys and values of a token have."""
        return 2 * (self.layers - self.mlps - self.states) * self.kv_heads * self.head_dim

    def frozen_bytes(self, matrices: int) -> int:
        """Return the bytes of a copy without adapters and value head, with `matrices` per matrix entry."""
        return self.parameters * matrices + self.vectors * (FLOAT32 - matrices)


def model_shape(
    config: Any, lora: LoraTable | None, *, critic: str | None = None, longest: int | None = None
) -> ModelShape:
    """Count the sizes on a model on the meta device, which works for any architecture.

    `longest` is the most tokens of a sequence; None: the model's number of positions.
    """
    try:
        model = empty_model(config)
        shape = _shape(model, config.get_text_config(), lora, critic=critic)
        longest = longest or getattr(config.get_text_config(), "max_position_embeddings", None) or 1
        apart = why_not_by_position(model, longest=longest) or ""
        return replace(shape, apart=apart, eager=bool(apart) and own_attention(model) == "eager")
    except (AttributeError, ValueError) as error:  # ValueError: inconsistent sizes
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
    """Return the MLP width of a token; of experts, that of the chosen ones, each with a copy of the state."""
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
    """Estimate the bytes per token that autograd saves for a layer's state, without projections.

    Fitted to counts on random layers of transformers 5.24 in float32, within 10 %; a chunk of the delta rule
    has 64 tokens.
    """
    if heads := getattr(config, "linear_num_value_heads", None):
        keys, values = config.linear_key_head_dim, config.linear_value_head_dim
        by_key = 29 * config.linear_num_key_heads * keys
        return int(heads * (42 * keys + 55 * values + 19 * 64) + by_key)
    heads, size, state, groups, _, chunk = _state_space(config)
    return heads * (57 * size + 37 * state + 12 * chunk) + 24 * groups * state


def _state_numbers(config: Any) -> int:
    """Count the numbers of a row's state in a layer, with the last inputs of its convolution."""
    if heads := getattr(config, "linear_num_value_heads", None):
        keys, values = config.linear_key_head_dim, config.linear_value_head_dim
        mixed = 2 * config.linear_num_key_heads * keys + heads * values
        return int(heads * keys * values + mixed * config.linear_conv_kernel_dim)
    heads, size, state, groups, kernel, _ = _state_space(config)
    convolved: int = config.hidden_size * int(getattr(config, "conv_L_cache", None) or 0)
    return heads * size * state + (heads * size + 2 * groups * state) * kernel + convolved


def _state_space(config: Any) -> tuple[int, ...]:
    """Read the sizes of state spaces by the first names that the config has; zeros without any."""
    sizes = (tuple(int(getattr(config, name, None) or 0) for name in names) for names in _STATE_SPACES)
    return next((each for each in sizes if each[0]), (0,) * len(_STATE_SPACES[0]))


# Names in configs of: heads, their width, state size, groups, width of the convolution, tokens of a chunk.
_STATE_SPACES = (
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "chunk_size"),
    (*(f"mamba_{name}" for name in ("n_heads", "d_head", "d_state", "n_groups", "d_conv", "chunk_size")),),
)


def count_checkpointed(wish: bool | int, layers: int) -> int:
    """Return how many layers `training.gradient_checkpointing` checkpoints; JobError: the model has fewer."""
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
    """Refuse more layers (JobError) than the job's model has, if the model is on this machine."""
    if not isinstance(wish, bool) and (config := config_here(table)) is not None:
        count_checkpointed(wish, model_shape(config, None).layers)


def config_here(table: ModelTable) -> Any | None:
    """Read the config of the job's model; None if it is not, or not completely, on this machine."""
    try:
        folder = None if table.preset is not None else model_folder(table, cached_only=True)
        return model_config(table, folder, table.vocab_size)
    except ModelFolderError:  # the learner will check it on its own machine
        return None


def refuse_unknown_targets(table: ModelTable, lora: LoraTable) -> None:
    """Refuse adapters (JobError) of layers that the job's model lacks, if it is on this machine."""
    if (config := config_here(table)) is not None:
        model_shape(config, lora)


def model_config(table: ModelTable, checkpoint: Path | None, vocabulary: int) -> Any:
    if checkpoint is None and table.preset is not None:
        return preset_config(PRESETS[table.preset], vocabulary=vocabulary)
    return folder_config(checkpoint or model_folder(table))


def cached_config(table: ModelTable, vocabulary: int) -> Any:
    """Read the config of a model on this machine, with or without weights; the hub is not contacted."""
    if table.preset is not None:
        return model_config(table, None, vocabulary)
    return config_alone(model_folder(table, cached_only=True))
