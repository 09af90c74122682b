"""Decides from a model's config and class how learner and engine compute its layers.

A model is computed "by position" if its layers attend to all earlier positions, by torch's
scaled_dot_product_attention. The learner then packs several token sequences into a row, and the engine caches
keys and values by position. For other models, each row of the learner is one token sequence, and the engine
uses the cache that each kind of layer needs.
"""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from trainer_backend.core.logprobs import LogitMap
from trainer_backend.errors import ModelFolderError

# Kinds of layers, as configs name them. Layers of these kinds attend to all earlier positions.
_FULL = frozenset({"full_attention", "attention"})
# Layers of these kinds have neither attention nor a state.
STATELESS = frozenset({"moe", "mlp", "dense", "sparse"})
# Layers of these kinds have a recurrent state instead of keys and values.
STATES = frozenset({"linear_attention", "conv", "mamba", "mamba2", "hybrid"})
# Models that multiply logits by `logits_scaling`; others, such as Granite, divide by it.
_MULTIPLY = frozenset({"hyperclovax"})


def why_not_by_position(model: PreTrainedModel, *, longest: int) -> str | None:
    """Return why sequences of up to `longest` tokens cannot be computed by position; None if they can."""
    config = model.config.get_text_config()
    if reason := why_layers_not_full(config, longest=longest):
        return reason
    if getattr(config, "attn_logit_softcapping", None):
        return "attention scores are capped (attn_logit_softcapping)"
    if not model._supports_sdpa:
        return f"{type(model).__name__} does not use scaled_dot_product_attention"
    return None


def own_attention(model: PreTrainedModel) -> str:
    """Return the attention implementation to select in transformers, "sdpa" or "eager".

    Only "eager" computes capped attention scores and attention sinks.
    """
    is_capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    return "sdpa" if model._supports_sdpa and not is_capped else "eager"


def logit_map(config: PreTrainedConfig) -> LogitMap:
    """Return the factor and the soft cap that the config prescribes for the model's logits."""
    config = config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)
    by = float(getattr(config, "logits_scaling", None) or 1.0)
    scale = scale * by if config.model_type in _MULTIPLY else scale / by
    return LogitMap(scale, getattr(config, "final_logit_softcapping", None) or None)


def why_layers_not_full(config: Any, *, longest: int) -> str | None:
    """Describe the layers that cannot attend to all of `longest` positions; None if all layers can."""
    window = getattr(config, "sliding_window", None)
    # If the config lists no kinds of layers, the window applies to all layers.
    kinds = set(layer_kinds(config) or ["sliding_attention" if window else "full_attention"])
    if window is not None and window >= longest:
        kinds.discard("sliding_attention")
    if (getattr(config, "attention_chunk_size", None) or 0) >= longest:
        kinds.discard("chunked_attention")
    others = sorted(kinds - _FULL - STATELESS)
    if not others:
        return None
    of_width = f" of {window} tokens" if "sliding_attention" in kinds and window else ""
    return f"layers are {', '.join(others)}{of_width}, not full_attention"


def largest(config: Any, name: str) -> int | None:
    """Return the largest value of the config's key `name` over the layers; None if no layer has the key."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    sizes = (getattr(layer, name, None) for layer in layers)
    return max((int(size) for size in sizes if size is not None), default=None)


def read_head_dim(config: Any) -> int:
    """Return the head dimension of queries; if layers differ, the largest one."""
    return largest(config, "head_dim") or int(config.hidden_size // config.num_attention_heads)


def layer_kinds(config: PreTrainedConfig) -> list[str]:
    """Return the kind of each layer; an empty list if the config does not name them."""
    return list(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or [])


def missing_kernels(config: PreTrainedConfig, is_here: Callable[[str], bool]) -> list[str]:
    """Return the packages that are not installed, but have fast kernels for the model's stateful layers.

    `is_here` returns whether a Python module is installed.
    """
    config = config.get_text_config()
    kinds = set(layer_kinds(config))
    packages = {"causal-conv1d": "causal_conv1d"} if kinds & STATES else {}
    if getattr(config, "linear_num_value_heads", None):
        packages["flash-linear-attention"] = "fla"
    elif "conv" not in kinds and packages:
        packages["mamba-ssm"] = "mamba_ssm"
    return sorted(name for name, module in packages.items() if not is_here(module))


def module_is_here(name: str) -> bool:
    return find_spec(name) is not None


def refuse_rotations_by_length(config: PreTrainedConfig, *, longest: int) -> None:
    """Raise ModelFolderError if rotary embeddings differ among sequence lengths of up to `longest` tokens.

    With such embeddings, a long sequence would change the results of all sequences in its batch.
    """
    config = config.get_text_config()
    made_for = getattr(config, "max_position_embeddings", None)
    stated = getattr(config, "rope_parameters", None) or {}
    # A config describes one rotation for all layers, or one for each kind of layer.
    for rotation in [inner for inner in stated.values() if isinstance(inner, Mapping)] or [stated]:
        kind = str(rotation.get("rope_type", rotation.get("type")))
        if "dynamic" not in kind and kind != "longrope":
            continue
        limits = [made_for] if "dynamic" in kind else []
        limit = min(filter(None, [*limits, rotation.get("original_max_position_embeddings")]), default=0)
        if longest > limit:
            raise ModelFolderError(
                f"its rotary embedding ({kind}) changes in sequences of more than {limit} tokens, so the "
                "result of a short sequence would depend on longer ones in its batch",
                where="model",
                hint=f"Set inference.max_model_len to {limit} or less.",
            )
