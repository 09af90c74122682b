"""Checks, before weights are read, whether a model folder is complete and its model can be trained.

No model class of `transformers` is imported here. Code in a model folder is never run.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING
from transformers import __version__ as transformers_version
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from trainer_backend.errors import ModelFolderError

# File in a checkpoint that contains only adapters: the name of the base model's folder, and its digest.
BASE = "base.json"
CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# File in a checkpoint with the tensors of the original folder that are not part of the trained model.
KEPT = "model-kept.safetensors"
_NEEDED = "a causal language model (decoder only) is needed"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def refuse_incomplete(folder: Path) -> None:
    """Raise ModelFolderError if config, weights or shards are missing, or all weights are pickled."""
    if not folder.is_dir():
        raise ModelFolderError(
            "no such folder", where=str(folder), hint="A path to a local folder is needed."
        )
    model = base_folder(folder) or folder
    if not (model / CONFIG).is_file():
        raise ModelFolderError(f"no {CONFIG} in this folder", where=str(model))
    weight_files(model)


def base_folder(folder: Path) -> Path | None:
    """Return the folder of the base model if `folder` is a checkpoint with only adapters; otherwise None."""
    if not (folder / BASE).is_file():
        return None
    name = read_object(folder / BASE).get("folder")
    base = folder.parent / str(name)
    if not isinstance(name, str) or not _is_a_name(name) or not base.is_dir():
        raise ModelFolderError(
            f"it holds only adapters, and their base model {name!r} is not next to it",
            where=str(folder),
            hint="Leave it in its run, or copy both folders.",
        )
    return base


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that `transformers` would read; ModelFolderError if there are none."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return _shards(folder)
    if (folder / BASE).is_file():
        raise ModelFolderError(
            "it holds only adapters, no model",
            where=str(folder),
            hint=f"`turnwise merge {folder} --to FOLDER` writes the model with its adapters merged.",
        )
    pickled = any(path for pattern in PICKLES for path in folder.glob(pattern))
    found = "only pickled weights, which are refused," if pickled else "no weights"
    raise ModelFolderError(
        f"{found} in this folder", where=str(folder), hint=f"{WEIGHTS} or {INDEX} is needed."
    )


def refuse_untrainable(folder: Path) -> None:
    """Raise ModelFolderError if the model is unknown to `transformers`, quantised or not a causal LM."""
    config = read_config(folder)
    kind = config.get("model_type")
    where = str(folder / CONFIG)
    if kind not in CONFIG_MAPPING and "auto_map" in config:
        raise ModelFolderError(
            f"model_type {kind!r} has Python code of its own (auto_map), which is never run",
            where=where,
            hint="Use a model whose code is part of transformers.",
        )
    if kind not in CONFIG_MAPPING:
        raise ModelFolderError(
            f"model_type is {kind!r}, which transformers {transformers_version} does not know",
            where=where,
            hint="A newer release of transformers may know it.",
        )
    if "quantization_config" in config:
        raise ModelFolderError(
            "its weights are quantised (quantization_config), and training needs full precision",
            where=where,
            hint="Use the model from which it was quantised.",
        )
    architecture = str((config.get("architectures") or [kind])[0])
    if config.get("is_encoder_decoder"):
        raise ModelFolderError(f"{architecture} is an encoder with a decoder; {_NEEDED}", where=where)
    if "text_config" in config and str(kind) in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
        # A multimodal wrapper, for example of a text and a vision model: the text model must be a decoder.
        text_kind = str(text_sizes(config).get("model_type") or "")
        has_class = text_kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or MODEL_MAPPING_NAMES.get(text_kind)
        if text_sizes(config).get("is_encoder_decoder") or (text_kind and not has_class):
            raise ModelFolderError(f"its text part is of model_type {text_kind!r}; {_NEEDED}", where=where)
        return
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(kind), ())
    known = {names} if isinstance(names, str) else set(names)
    if not known & set(config.get("architectures") or known):
        raise ModelFolderError(f"it holds {architecture}; {_NEEDED}", where=where)


def text_sizes(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `text_config` of a multimodal wrapper's config.json, otherwise the whole config."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


def refuse_own_tokenizer(folder: Path) -> None:
    """Raise ModelFolderError if only Python code in the folder defines the tokenizer's class.

    Without this code, which is never run, the tokenizer might produce other ids.
    """
    path = folder / TOKENIZER_CONFIG
    settings = read_object(path) if path.is_file() else {}
    name = str(settings.get("tokenizer_class"))
    if "auto_map" in settings and tokenizer_class_from_name(name) is None:
        raise ModelFolderError(
            f"tokenizer_class {name!r} has Python code of its own (auto_map), which is never run",
            where=str(path),
        )


def read_config(folder: Path) -> Mapping[str, Any]:
    """Read config.json of a folder, or of the base model if the folder contains only adapters."""
    return read_object((base_folder(folder) or folder) / CONFIG)


def read_object(path: Path) -> Mapping[str, Any]:
    """Read a JSON object from a file; raise ModelFolderError if that is not possible."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(f"it cannot be read: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise ModelFolderError("it is no JSON object", where=str(path))
    return value


def described(config: Mapping[str, Any]) -> str:
    """Describe a model's architecture and size, so that two models can be compared.

    The text contains `model_type` and not `architectures`, which depends on the class that saved the folder.
    """
    sizes = text_sizes(config)
    layers, width = sizes.get("num_hidden_layers"), sizes.get("hidden_size")
    return f"{config.get('model_type')} with {layers} layers of width {width}"


def _shards(folder: Path) -> list[Path]:
    shards = read_object(folder / INDEX).get("weight_map")
    files = set(map(str, shards.values())) if isinstance(shards, dict) else set()
    if not files:
        raise ModelFolderError("it names no files (weight_map)", where=str(folder / INDEX))
    outside = sorted(name for name in files if not _is_a_name(name))
    if outside:
        raise ModelFolderError(
            f"weight_map names {outside[0]!r}, which is not a file in this folder",
            where=str(folder / INDEX),
        )
    missing = sorted(name for name in files if not (folder / name).is_file())
    if missing:
        raise ModelFolderError(
            f"{len(missing)} of {len(files)} shards are missing, such as {missing[0]}",
            where=str(folder),
            hint="The copy or download is incomplete.",
        )
    return [folder / name for name in sorted(files)]


def _is_a_name(name: str) -> bool:
    """Return whether a name is a plain file name, without a folder."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name
