"""Attention that neither the engine's cache nor packed rows would compute as the model means it: refused."""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from trainer_backend.errors import ModelFolderError


def refuse_unsupported_attention(config: PreTrainedConfig, *, longest: int) -> None:
    """The cache keeps every position of every layer, and segments in a row are told apart by a mask alone.

    Args:
        config: of a model; the part about texts is looked at.
        longest: tokens of the longest sequence.

    Raises:
        ModelFolderError: a layer is recurrent, or attends within a window shorter than `longest`; or the
            rotation of a token depends on how long the sequence is that it stands in.
    """
    texts = config.get_text_config()
    _refuse_windows(texts, longest)
    _refuse_rotations_by_length(texts, longest)


def _refuse_windows(config: PreTrainedConfig, longest: int) -> None:
    """A window that holds every sequence whole is none."""
    window = getattr(config, "sliding_window", None)
    # The models of before `layer_types` have the window in all layers.
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if window is not None and window >= longest:
        kinds.discard("sliding_attention")
    if kinds - {"full_attention"}:
        of_width = f" of {window} tokens" if "sliding_attention" in kinds and window else ""
        raise ModelFolderError(
            f"its layers are {', '.join(sorted(kinds))}{of_width}; full_attention is needed, or a window of "
            f"inference.max_model_len ({longest})",
            where="model",
            hint=f"Set inference.max_model_len to {window} or less." if of_width else None,
        )


def _refuse_rotations_by_length(config: PreTrainedConfig, longest: int) -> None:
    """In one batch the longest sequence would choose the rotation of all."""
    made_for = getattr(config, "max_position_embeddings", None)
    for rotation in _rotations(config):
        kind = str(rotation.get("rope_type", rotation.get("type")))
        if "dynamic" not in kind and kind != "longrope":
            continue
        limits = [made_for] if "dynamic" in kind else []
        limit = min(filter(None, [*limits, rotation.get("original_max_position_embeddings")]), default=0)
        if longest > limit:
            raise ModelFolderError(
                f"its positions ({kind}) are turned otherwise in sequences of more than {limit} tokens, so a "
                "short one computed beside a longer one would not be what it is alone",
                where="model",
                hint=f"Set inference.max_model_len to {limit} or less.",
            )


def _rotations(config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """One for all layers, or one for each kind of layer."""
    stated = getattr(config, "rope_parameters", None) or {}
    yield from [inner for inner in stated.values() if isinstance(inner, Mapping)] or [stated]
