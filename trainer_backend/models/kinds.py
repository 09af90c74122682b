"""What a model's layers do that decides how learner and engine compute it, by its config and class alone.

by position    keys and values of each position, under a mask: packed rows, and rows of the engine's cache
otherwise      by the model's own layers, one text a row, with the cache that transformers makes for them
"""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from trainer_backend.core.logprobs import LogitMap
from trainer_backend.errors import ModelFolderError

# What configs call layers that attend to every position before.
_FULL = frozenset({"full_attention", "attention"})
# ... and layers without attention or state, which configs list among the others.
STATELESS = frozenset({"moe", "mlp", "dense", "sparse"})
# ... and those with a state in place of keys and values.
STATES = frozenset({"linear_attention", "conv", "mamba", "mamba2", "hybrid"})
# Where `logits_scaling` is a factor; Granite and its kin divide by it.
_MULTIPLY = frozenset({"hyperclovax"})


def why_not_by_position(model: PreTrainedModel, *, longest: int) -> str | None:
    """Why a mask over keys and values by position does not compute sequences of up to `longest` tokens.

    None where it does.
    """
    config = model.config.get_text_config()
    if reason := why_layers_not_full(config, longest=longest):
        return reason
    if getattr(config, "attn_logit_softcapping", None):
        return "scores of attention have a cap (attn_logit_softcapping)"
    if not model._supports_sdpa:
        return f"{type(model).__name__} has attention of its own, not scaled_dot_product_attention"
    return None


def own_attention(model: PreTrainedModel) -> str:
    """The implementation of attention that computes the model's own: caps and sinks are eager's alone."""
    is_capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    return "sdpa" if model._supports_sdpa and not is_capped else "eager"


def logit_map(config: PreTrainedConfig) -> LogitMap:
    """What the model makes of its head's products, as far as its config names it."""
    config = config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)
    by = float(getattr(config, "logits_scaling", None) or 1.0)
    scale = scale * by if config.model_type in _MULTIPLY else scale / by
    return LogitMap(scale, getattr(config, "final_logit_softcapping", None) or None)


def why_layers_not_full(config: Any, *, longest: int) -> str | None:
    """The layers that do not attend to all of `longest` positions, in words; None where all do."""
    window = getattr(config, "sliding_window", None)
    # Models older than `layer_types` have the window in all layers.
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
    """A size in the layer that has the most of it, since sizes may differ by layer; None: it has none."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    sizes = (getattr(layer, name, None) for layer in layers)
    return max((int(size) for size in sizes if size is not None), default=None)


def read_head_dim(config: Any) -> int:
    """Width of a query's head, of the widest where layers differ."""
    return largest(config, "head_dim") or int(config.hidden_size // config.num_attention_heads)


def layer_kinds(config: PreTrainedConfig) -> list[str]:
    """The kind of each layer; empty where the config has no list of them."""
    return list(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or [])


def missing_kernels(config: PreTrainedConfig, is_here: Callable[[str], bool]) -> list[str]:
    """The packages with fast kernels for the model's layers with a state that are not installed."""
    config = config.get_text_config()
    kinds = set(layer_kinds(config))
    packages = {"causal-conv1d": "causal_conv1d"} if kinds & STATES else {}
    if getattr(config, "linear_num_value_heads", None):
        packages["flash-linear-attention"] = "fla"
    elif "conv" not in kinds and packages:
        packages["mamba-ssm"] = "mamba_ssm"
    return sorted(name for name, module in packages.items() if not is_here(module))


def module_is_here(name: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return find_spec(name) is not None


def refuse_rotations_by_length(config: PreTrainedConfig, *, longest: int) -> None:
    """In one batch the longest sequence would choose the rotation of all."""
    config = config.get_text_config()
    made_for = getattr(config, "max_position_embeddings", None)
    stated = getattr(config, "rope_parameters", None) or {}
    # One for all layers, or one for each kind of layer.
    for rotation in [inner for inner in stated.values() if isinstance(inner, Mapping)] or [stated]:
        kind = str(rotation.get("rope_type", rotation.get("type")))
        if "dynamic" not in kind and kind != "longrope":
            continue
        limits = [made_for] if "dynamic" in kind else []
        limit = min(filter(None, [*limits, rotation.get("original_max_position_embeddings")]), default=0)
        if longest > limit:
            raise ModelFolderError(
                f"its positions ({kind}) are turned otherwise in sequences of more than {limit} tokens, so a "
                "short one in a batch with a longer one would not be what it is alone",
                where="model",
                hint=f"Set inference.max_model_len to {limit} or less.",
            )
