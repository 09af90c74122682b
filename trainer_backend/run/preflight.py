"""Checks, before a run starts, that its fixed policies fit the actor. Reads no weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import SecretStr

from trainer_backend.collect.endpoints import key_from
from trainer_backend.errors import JobError, ModelFolderError, RunDirectoryError
from trainer_backend.inference.chat_check import Tokenizer, first_difference, refuse_without_tools
from trainer_backend.job.mixture_table import RolloutOnlyTable
from trainer_backend.job.tables import ModelTable
from trainer_backend.models.layout import refuse_incomplete, refuse_untrainable
from trainer_backend.models.sources import model_folder, tokenizer_in
from trainer_backend.rundir.checkpoint_paths import model_in


def checked_folders(
    tables: Sequence[RolloutOnlyTable], model: ModelTable, checkpoint: Path | None = None
) -> dict[str, Path]:
    """Check the fixed policies, and return the model folders of those with a local model, by policy name.

    Their tokenizers must equal the actor's: that of the checkpoint, or, without a checkpoint, of [model].
    """
    folders = {table.name: _folder(table) for table in tables if not table.is_remote}
    for table in tables:
        server_key(table)
    reference = actors_tokenizer(model, checkpoint) if folders else None
    for name, folder in folders.items():
        with naming(name):
            refuse_incomplete(folder)
            refuse_untrainable(folder)
            tokenizer = tokenizer_in(folder, model)
            refuse_without_tools(tokenizer)
        if reference is not None:
            refuse_other_tokens(name, reference, tokenizer)
        reference = reference or tokenizer  # a preset takes the tokenizer of the first fixed policy
    return folders


def refuse_other_tokens(name: str, actors: Tokenizer, own: Tokenizer) -> None:
    """Raise JobError if a fixed policy's tokenizer differs from the actor's.

    The actor must compute log-probs of the fixed policy's tokens, so both need the same ids.
    """
    difference = first_difference(actors, own)
    if difference is not None:
        raise JobError(
            f"it cannot be weighed against the actor: {difference}",
            where=place(name),
            hint="Both must have the same tokenizer and chat template: take models of one family, or let a "
            "preset be the actor, which takes this one's.",
        )


def server_key(table: RolloutOnlyTable) -> SecretStr | None:
    """Read the key of a remote policy's server from the environment variable that the job names, if any."""
    if table.api_key_env is None:
        return None
    return key_from(table.api_key_env, where=f"{place(table.name)}: api_key_env")


def place(name: str) -> str:
    """Return the name that error messages use for a fixed policy's table."""
    return f"[rollout_only] {name!r}"


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Add the fixed policy's name to ModelFolderErrors that the context raises."""
    try:
        yield
    except ModelFolderError as error:
        raise ModelFolderError(str(error), where=place(name)) from error


def _folder(table: RolloutOnlyTable) -> Path:
    path = table.model_path
    assert path is not None, "remote policies have no folder"
    try:
        return model_in(path)
    except RunDirectoryError as error:
        raise JobError(f"model_path is a run directory, and {error}", where=place(table.name)) from error


def actors_tokenizer(table: ModelTable, checkpoint: Path | None = None) -> Tokenizer | None:
    """Load the actor's tokenizer; None for a preset, and for a hub model that is not in the cache yet."""
    if checkpoint is not None:
        return tokenizer_in(checkpoint, table)
    if table.preset is not None:
        return None
    try:
        folder = model_folder(table, cached_only=True)
    except ModelFolderError:
        return None
    return tokenizer_in(folder, table)
