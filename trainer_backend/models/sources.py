"""Where the model of a job comes from: a local folder, or a name on the Hugging Face hub and its cache."""

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

# What `transformers` reads of a repository. No pickle is ever fetched, nor the weights that many keep there
# a second time in another form.
WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model")
UNWANTED = ("*/*.safetensors", "*/*.json", "*/*.txt", "consolidated*")


def model_folder(table: ModelTable, *, cached_only: bool = False) -> Path:
    """The folder that holds the model of [model]; a hub name is fetched into the hub's cache, or found there.

    ModelFolderError: the hub knows no such model or does not give it out, or it is neither cached nor
    reachable; with `cached_only` the hub is not asked.
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
            "the hub gives it out only to who accepted its terms",
            where=where,
            hint="Accept them on its page, then log in with `hf auth login`.",
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ModelFolderError(
            "the hub has no such model or revision, or it is private", where=where, hint=_LOCAL
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelFolderError(
            f"it is not whole in the hub's cache ({constants.HF_HUB_CACHE}), and the hub cannot be reached",
            where=where,
            hint=f"Where there is a network, run `hf download {table.name}`. {_LOCAL}",
        ) from error
    # A full disk, a proxy, the HTTP client below it: each has errors of its own.
    except Exception as error:
        raise ModelFolderError(f"it cannot be fetched: {error}", where=where, hint=_LOCAL) from error
    return Path(folder)


_LOCAL = "A folder on this machine is named by model.path."


def remember_chat_settings(tokenizer: PreTrainedTokenizerFast, table: ModelTable) -> None:
    """Write what the job says of the chat into the tokenizer's settings: checkpoints keep it there."""
    if table.tool_call_format is not None:
        tokenizer.init_kwargs[TOOL_CALL_FORMAT_KEY] = table.tool_call_format
    if table.chat_template_kwargs:
        tokenizer.init_kwargs[CHAT_TEMPLATE_KWARGS_KEY] = dict(table.chat_template_kwargs)


def tokenizer_in(folder: Path, table: ModelTable) -> PreTrainedTokenizerFast:
    """Load a folder's tokenizer with the chat settings of [model], as for the actor."""
    tokenizer = load_tokenizer(folder)
    remember_chat_settings(tokenizer, table)
    return tokenizer


def in_folder(table: ModelTable, folder: Path) -> ModelTable:
    """Return the job's [model] table for another folder, with the same chat and device settings."""
    return table.model_copy(update={"preset": None, "name": None, "path": folder})
