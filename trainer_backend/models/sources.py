"""Finds the model of a job: a local folder, or a name on the Hugging Face hub or in its cache."""

from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import PreTrainedTokenizerFast

from trainer_backend.errors import ModelFolderError
from trainer_backend.job.tables import ModelTable
from trainer_backend.models.folder import load_tokenizer
from trainer_backend.models.tokenizer import CHAT_TEMPLATE_KWARGS_KEY, TOOL_CALL_FORMAT_KEY

# The files of a repository that `transformers` reads. The patterns leave out pickles, and further copies of
# the weights in other formats.
WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model")
UNWANTED = ("*/*.safetensors", "*/*.json", "*/*.txt", "consolidated*")


def model_folder(table: ModelTable, *, cached_only: bool = False) -> Path:
    """Return the folder of the model that [model] names. A model of the hub is downloaded if needed.

    Args:
        table: [model]; it has `path`, or the `name` of a model on the Hugging Face hub.
        cached_only: look for a model of the hub only in its local cache, without contacting the hub.

    Raises:
        ModelFolderError: the hub has no such model or denies access; or the model is not in the cache, and
            the hub cannot be reached.
    """
    if table.path is not None:
        return table.path
    assert table.name is not None, "a preset has no folder"
    where = f"model.name {table.name!r}" + (f" at {table.revision!r}" if table.revision else "")
    try:
        folder = snapshot_download(
            table.name,
            revision=table.revision,
            allow_patterns=list(WANTED),
            ignore_patterns=list(UNWANTED),
            local_files_only=cached_only,
        )
    except GatedRepoError as error:
        raise ModelFolderError(
            "the hub requires that you accept the model's terms",
            where=where,
            hint="Accept them on the model's page, then log in with `hf auth login`.",
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ModelFolderError(
            "the hub has no such model or revision, or it is private", where=where, hint=_LOCAL
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelFolderError(
            f"it is incomplete in the hub's cache ({constants.HF_HUB_CACHE}), and the hub cannot be reached",
            where=where,
            hint=f"Run `hf download {table.name}` with a network. {_LOCAL}",
        ) from error
    # Disk, proxy and HTTP client have error types of their own.
    except Exception as error:
        raise ModelFolderError(f"it cannot be fetched: {error}", where=where, hint=_LOCAL) from error
    return Path(folder)


_LOCAL = "Set model.path to use a folder on this machine."


def remember_chat_settings(tokenizer: PreTrainedTokenizerFast, table: ModelTable) -> None:
    """Copy [model]'s chat settings into the tokenizer's `init_kwargs`, so that checkpoints store them."""
    if table.tool_call_format is not None:
        tokenizer.init_kwargs[TOOL_CALL_FORMAT_KEY] = table.tool_call_format
    if table.chat_template_kwargs:
        tokenizer.init_kwargs[CHAT_TEMPLATE_KWARGS_KEY] = dict(table.chat_template_kwargs)


def tokenizer_in(folder: Path, table: ModelTable) -> PreTrainedTokenizerFast:
    tokenizer = load_tokenizer(folder)
    remember_chat_settings(tokenizer, table)
    return tokenizer


def in_folder(table: ModelTable, folder: Path) -> ModelTable:
    """Return a copy of [model] that names the model in `folder` and keeps all other settings."""
    return table.model_copy(update={"preset": None, "name": None, "path": folder})
