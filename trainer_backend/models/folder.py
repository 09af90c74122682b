"""Reads and writes models in local Hugging Face folders, without network access and without pickle files."""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from trainer_backend.errors import EngineOutOfMemory, ModelFolderError
from trainer_backend.models.allowed_tokens import restrict_as_configured
from trainer_backend.models.layout import (
    TOKENIZER_CONFIG,
    base_folder,
    refuse_incomplete,
    refuse_own_tokenizer,
    refuse_untrainable,
)
from trainer_backend.models.origin import (
    WRAPPED_NAMES,
    quiet_library,
    read_origin,
    remember_origin,
    text_name,
)
from trainer_backend.models.text_part import causal_class, text_config
from trainer_backend.models.tokenizer import id_count

# Files with a tokenizer's vocabulary. If none exists, transformers silently makes an empty tokenizer.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_model_folder(
    path: str | Path, *, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load the model (in evaluation mode) and the tokenizer of a folder; convert the weights to `dtype`."""
    folder = Path(path)
    refuse_incomplete(folder)
    refuse_untrainable(folder)
    # The libraries raise a dozen error types for a broken file.
    try:
        with quiet_library():
            config = text_config(folder)
            loaded: Any = causal_class(config).from_pretrained(
                folder,
                config=config,
                key_mapping=WRAPPED_NAMES,
                local_files_only=True,
                use_safetensors=True,
                dtype=dtype,
                output_loading_info=True,
            )
    except Exception as error:
        raise ModelFolderError(f"the model cannot be loaded: {error}", where=str(folder)) from error
    model: PreTrainedModel = loaded[0]
    remember_origin(model, folder)
    _refuse_other_weights(loaded[1], set(read_origin(model).kept), folder)
    model.eval()  # type: ignore[no-untyped-call]
    tokenizer = load_tokenizer(folder, known_ids=embedding_rows(model))
    _refuse_foreign_tokenizer(model, tokenizer, folder)
    restrict_as_configured(model)
    return model, tokenizer


def folder_config(folder: Path) -> Any:
    """Read the config of a folder's model, or of the base model of its adapters. Weight files must exist."""
    refuse_incomplete(folder)
    return config_alone(folder)


def config_alone(folder: Path) -> Any:
    """Read the config like `folder_config`, but do not require weight files."""
    refuse_untrainable(folder)
    try:
        model = base_folder(folder) or folder
        return text_config(model)
    except Exception as error:  # the library has a dozen error types for an invalid value
        raise ModelFolderError(f"config.json cannot be used: {error}", where=str(folder)) from error


def load_tokenizer(folder: str | Path, *, known_ids: int | None = None) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a folder; refuse a tokenizer with more than `known_ids` ids, if that is given."""
    if not any((Path(folder) / name).is_file() for name in VOCABULARY_FILES):
        raise ModelFolderError("the tokenizer is missing", where=str(folder), hint="Add tokenizer.json.")
    refuse_own_tokenizer(Path(folder))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelFolderError(f"the tokenizer cannot be loaded: {error}", where=str(folder)) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelFolderError(
            "the tokenizer is a slow one; a fast one, with tokenizer.json, is needed", where=str(folder)
        )
    if known_ids is not None and id_count(tokenizer) > known_ids:
        raise ModelFolderError(
            f"the tokenizer has {id_count(tokenizer)} tokens but the model only {known_ids} embeddings",
            where=str(folder),
            hint="The files of two models were mixed, or the embedding was not resized.",
        )
    return tokenizer


def embedding_rows(model: PreTrainedModel) -> int:
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, torch.nn.Embedding), "every causal model of transformers embeds token ids"
    return embedding.num_embeddings


def save_model_folder(
    path: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a model folder: config.json, weights and, if given, the tokenizer with its chat template.

    If `weights` are given, such as weights with merged adapters, they replace the model's own weights.
    """
    with quiet_library():
        model.save_pretrained(path, safe_serialization=True, state_dict=dict(weights) if weights else None)
    dtype = next(iter(weights.values())).dtype if weights else model.dtype
    read_origin(model).write_settings(Path(path), dtype)
    read_origin(model).write_kept(Path(path))
    _save_tokenizer(path, tokenizer)


def save_settings(path: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a model folder like `save_model_folder`, but without weights."""
    model.config.save_pretrained(path)
    read_origin(model).write_settings(Path(path), model.dtype)
    model.generation_config.save_pretrained(path)
    _save_tokenizer(path, tokenizer)


def _save_tokenizer(path: str | Path, tokenizer: PreTrainedTokenizerFast | None) -> None:
    if tokenizer is None:
        return
    tokenizer.save_pretrained(path, save_jinja_files=False)
    file = Path(path) / TOKENIZER_CONFIG
    settings = json.loads(file.read_text(encoding="utf-8"))
    # Servers with transformers 4 refuse this class name; versions 4 and 5 both accept the older name.
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _refuse_other_weights(loading: Mapping[str, Any], kept: Collection[str], folder: Path) -> None:
    """Raise if weights are missing (they would stay random) or unknown (they would be ignored)."""
    known = {*kept, *map(text_name, kept)}
    for what, meaning in (("missing", "would be random"), ("unexpected", "would be left out")):
        names: Collection[str] = set(loading[f"{what}_keys"]) - known
        if names:
            raise ModelFolderError(
                f"the weights do not fit config.json: {len(names)} {meaning}, such as {min(names)}",
                where=str(folder),
                hint="The files of two models were mixed, or config.json was edited.",
            )


def _refuse_foreign_tokenizer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Raise if an end-of-text id of the model's configs is not a special token of the tokenizer."""
    special = tokenizer.added_tokens_decoder
    for name, config in (("config.json", model.config), ("generation_config.json", model.generation_config)):
        stated = getattr(config, "eos_token_id", None)
        for token in stated if isinstance(stated, list) else [stated]:
            if token is not None and token not in special:
                text = tokenizer.convert_ids_to_tokens(token) if token < id_count(tokenizer) else None
                raise ModelFolderError(
                    f"{name} ends texts with id {token}, but the tokenizer's {text!r} is no special token",
                    where=str(folder),
                    hint="The tokenizer is probably another model's.",
                )


# Parts of the messages of out-of-memory errors: of the CPU allocator, Metal and CUDA, cuBLAS and cuDNN.
_TEXTS = ("can't allocate memory", "out of memory", "alloc_failed")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error means that memory ran out, judged by its class (CUDA) or its message."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error).lower() for text in _TEXTS)


def out_of_memory(doing: str, *, running: int, max_model_len: int) -> EngineOutOfMemory:
    """Return an error which says that the engine ran out of memory, and which job keys to lower."""
    return EngineOutOfMemory(
        f"the engine ran out of memory while {doing}, with {running} requests running and room for "
        f"{max_model_len} tokens each",
        where="[inference]",
        hint="Lower max_running, max_model_len or kept_prefixes.",
    )


def collect_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and saved buffers by name; tied weights appear only under their first name."""
    saved = model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *buffers)}


def fingerprint(model: nn.Module) -> str:
    """Return the hex sha256 of names, dtypes, shapes and bytes of the tensors of `collect_weights`."""
    digest = hashlib.sha256()
    for name, weight in sorted(collect_weights(model).items()):
        tensor = weight.cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # View the numbers as bytes, because numpy has no bfloat16.
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def drop_rows_beyond(model: PreTrainedModel, rows: int) -> int:
    """Cut the model's embedding and head to the first `rows` ids; return the number of dropped ids.

    A large model often has more padding ids than a small model of its family. If the large model sampled
    such an id, the small model could not score it.
    """
    beyond = max(embedding_rows(model) - rows, 0)
    if beyond:
        model.resize_token_embeddings(rows, mean_resizing=False)
    return beyond
