"""Checks of a model folder before any weights are read: is it whole, and can it be trained here.

No model code runs here, that of `transformers` included, and none of the folder's own ever.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers import __version__ as transformers_version
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from trainer_backend.errors import ModelFolderError

# In a checkpoint of adapters alone: the folder beside it whose model they are over, and its digest.
BASE = "base.json"
CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_NEEDED = "a causal language model (decoder only) is needed"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def refuse_incomplete(folder: Path) -> None:
    """Refuse a folder without config or weights, with pickled weights only, or without one of the shards."""
    if not folder.is_dir():
        raise ModelFolderError(
            "no such folder", where=str(folder), hint="A path to a local folder is needed."
        )
    model = base_folder(folder) or folder
    if not (model / CONFIG).is_file():
        raise ModelFolderError(f"no {CONFIG} in this folder", where=str(model))
    weight_files(model)


def base_folder(folder: Path) -> Path | None:
    """The folder whose model the adapters of a checkpoint are over; None for a folder with a model."""
    if not (folder / BASE).is_file():
        return None
    name = read_object(folder / BASE).get("folder")
    base = folder.parent / str(name)
    if not isinstance(name, str) or not _is_a_name(name) or not base.is_dir():
        raise ModelFolderError(
            f"it holds adapters alone, and the model that they are over, {name!r}, is not beside it",
            where=str(folder),
            hint="Leave it in its run, or copy both.",
        )
    return base


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the model's weights, as `transformers` chooses them; no other one is read."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return _shards(folder)
    if (folder / BASE).is_file():
        raise ModelFolderError(
            "it holds adapters alone, and no model",
            where=str(folder),
            hint=f"`turnwise merge {folder} --to FOLDER` writes the model with its adapters merged.",
        )
    pickled = any(path for pattern in PICKLES for path in folder.glob(pattern))
    found = "only pickled weights, which are refused," if pickled else "no weights"
    raise ModelFolderError(
        f"{found} in this folder", where=str(folder), hint=f"{WEIGHTS} or {INDEX} is needed."
    )


def refuse_untrainable(folder: Path) -> None:
    """Refuse a model that is no causal language model, or that `transformers` cannot build by itself."""
    config = read_config(folder)
    kind = config.get("model_type")
    where = str(folder / CONFIG)
    if kind not in CONFIG_MAPPING and "auto_map" in config:
        raise ModelFolderError(
            f"model_type {kind!r} brings Python code of its own (auto_map), and no code of a model is run",
            where=where,
            hint="Take a model that transformers knows itself.",
        )
    if kind not in CONFIG_MAPPING:
        raise ModelFolderError(
            f"model_type is {kind!r}, which transformers {transformers_version} does not know",
            where=where,
            hint="A newer release of transformers may.",
        )
    if "quantization_config" in config:
        raise ModelFolderError(
            "its weights are quantised (quantization_config), and training needs them whole",
            where=where,
            hint="Take the model that it was made from.",
        )
    architecture = str((config.get("architectures") or [kind])[0])
    if config.get("is_encoder_decoder"):
        raise ModelFolderError(f"{architecture} is an encoder with a decoder; {_NEEDED}", where=where)
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(kind), ())
    known = {names} if isinstance(names, str) else set(names)
    if not known & set(config.get("architectures") or known):
        raise ModelFolderError(f"it holds {architecture}; {_NEEDED}", where=where)


def refuse_own_tokenizer(folder: Path) -> None:
    """Refuse a tokenizer with code of its own: read as a plain one, it may give other ids."""
    path = folder / TOKENIZER_CONFIG
    settings = read_object(path) if path.is_file() else {}
    name = str(settings.get("tokenizer_class"))
    if "auto_map" in settings and tokenizer_class_from_name(name) is None:
        raise ModelFolderError(
            f"tokenizer_class {name!r} brings Python code of its own (auto_map), and none of it is run",
            where=str(path),
        )


def read_config(folder: Path) -> Mapping[str, Any]:
    """config.json as it stands, for adapters alone that of their base; ModelFolderError as `read_object`."""
    return read_object((base_folder(folder) or folder) / CONFIG)


def read_object(path: Path) -> Mapping[str, Any]:
    """A JSON file of a model folder."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(f"it cannot be read: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise ModelFolderError("it is no JSON object", where=str(path))
    return value


def described(config: Mapping[str, Any]) -> str:
    """Architecture and size in words, equal for models whose tensors have the same names and shapes.

    By `model_type`: every config.json has it, while `architectures` is what the class that saved it adds.
    """
    layers, width = config.get("num_hidden_layers"), config.get("hidden_size")
    return f"{config.get('model_type')} with {layers} layers of width {width}"


def _shards(folder: Path) -> list[Path]:
    shards = read_object(folder / INDEX).get("weight_map")
    files = set(map(str, shards.values())) if isinstance(shards, dict) else set()
    if not files:
        raise ModelFolderError("it names no files (weight_map)", where=str(folder / INDEX))
    outside = sorted(name for name in files if not _is_a_name(name))
    if outside:
        raise ModelFolderError(
            f"weight_map names {outside[0]!r}, which is no name of a file in this folder",
            where=str(folder / INDEX),
        )
    missing = sorted(name for name in files if not (folder / name).is_file())
    if missing:
        raise ModelFolderError(
            f"{len(missing)} of {len(files)} shards are missing, such as {missing[0]}",
            where=str(folder),
            hint="The copy or download was not finished.",
        )
    return [folder / name for name in sorted(files)]


def _is_a_name(name: str) -> bool:
    """Of something in a folder itself, whatever is there."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


# Kinds of attention that neither the engine's cache nor packed rows compute as the model means are refused.


def refuse_unsupported_attention(config: PreTrainedConfig, *, longest: int) -> None:
    """The cache keeps every position of every layer, and segments in a row are told apart by a mask alone.

    Of the config the part about texts is looked at; `longest` are tokens of the longest sequence.
    """
    texts = config.get_text_config()
    _refuse_windows(texts, longest)
    _refuse_rotations_by_length(texts, longest)


# Names of `layer_types` whose layers carry a state from token to token: Qwen3-Next, Qwen3.5, LFM2 and others.
_RECURRENT = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})


def _refuse_windows(config: PreTrainedConfig, longest: int) -> None:
    """Refuse layers without full attention; a window that holds the longest sequence counts as full."""
    window = getattr(config, "sliding_window", None)
    # The models of before `layer_types` have the window in all layers.
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if window is not None and window >= longest:
        kinds.discard("sliding_attention")
    if recurrent := sorted(kinds & _RECURRENT):
        raise ModelFolderError(
            f"its layers are {', '.join(sorted(kinds))}; {recurrent[0]} keeps one state of the whole prefix "
            "in place of keys and values by position: the engine's cache cannot go on from a part of a "
            "prefix, which siblings and turns share, and no mask keeps texts of one packed row of the "
            "learner apart",
            where="model",
            hint="Take a model whose layers all have full_attention, such as Qwen3.",
        )
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
                "short one computed beside a longer one would not be what it is alone",
                where="model",
                hint=f"Set inference.max_model_len to {limit} or less.",
            )
