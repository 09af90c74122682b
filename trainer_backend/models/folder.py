"""A local Hugging Face folder, read and written: config, safetensors, tokenizer. No network, no pickle."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from trainer_backend.errors import ModelFolderError

# One of these holds a tokenizer's vocabulary. Without any, the library makes an empty tokenizer in silence.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_model_folder(
    path: str | Path, *, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model (in evaluation mode) and the tokenizer of a folder.

    Raises:
        ModelFolderError: no such folder, no config, weights or tokenizer in it, files that cannot be read,
            or a tokenizer with more tokens than the model has embeddings.
    """
    folder = Path(path)
    _refuse_incomplete(folder)
    # The libraries raise a dozen types for a broken file; each means the same to the caller.
    try:
        with _no_progress_bar():
            model = AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, dtype=dtype
            )
    except Exception as error:
        raise ModelFolderError(f"the model cannot be loaded: {error}", where=str(folder)) from error
    model.eval()  # type: ignore[no-untyped-call]
    return model, load_tokenizer(folder, known_ids=embedding_rows(model))


def load_tokenizer(folder: str | Path, *, known_ids: int | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder; it must fit a model that embeds `known_ids` ids, when given."""
    if not any((Path(folder) / name).is_file() for name in VOCABULARY_FILES):
        raise ModelFolderError("the tokenizer is missing", where=str(folder), hint="Add tokenizer.json.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ModelFolderError(f"the tokenizer cannot be loaded: {error}", where=str(folder)) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelFolderError(
            "the tokenizer is of the slow kind; one with tokenizer.json is needed", where=str(folder)
        )
    if known_ids is not None and len(tokenizer) > known_ids:
        raise ModelFolderError(
            f"the tokenizer has {len(tokenizer)} tokens but the model only {known_ids} embeddings",
            where=str(folder),
            hint="The files of two models were mixed, or the embedding was not resized.",
        )
    return tokenizer


def embedding_rows(model: PreTrainedModel) -> int:
    """How many token ids a model knows."""
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, torch.nn.Embedding), "every causal model of transformers embeds token ids"
    return embedding.num_embeddings


def save_model_folder(
    path: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None = None
) -> None:
    """Write config.json, model.safetensors and, when given, the tokenizer with its chat template."""
    with _no_progress_bar():
        model.save_pretrained(path, safe_serialization=True)
    if tokenizer is not None:
        tokenizer.save_pretrained(path, save_jinja_files=False)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """The library draws a bar for a file of one megabyte, across the live display of a run."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _refuse_incomplete(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelFolderError(
            "no such folder", where=str(folder), hint="A path to a local folder is needed."
        )
    if not (folder / "config.json").is_file():
        raise ModelFolderError("no config.json in this folder", where=str(folder))
    if not any(folder.glob("*.safetensors")):
        found = "only pickled weights, which are refused" if any(folder.glob("*.bin")) else "no weights"
        raise ModelFolderError(
            f"{found} in this folder", where=str(folder), hint="model.safetensors is needed."
        )
