"""Is there a model in every folder that a job names? Looked at before a run is begun."""

import difflib
from pathlib import Path

from trainer_backend.errors import JobError, RunDirectoryError
from trainer_backend.jobfile.model_table import HUB_NAME
from trainer_backend.jobfile.overrides import Places
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.rundir.checkpoint_paths import model_in


def refuse_no_model(config: JobConfig, places: Places) -> None:
    """
    Raises:
        JobError: model.path is no folder with a config.json, or model.name is one; rollout_only.model_path is
            neither such a folder nor a run directory with a checkpoint.
    """
    if config.model.path is not None:
        _refuse_empty(config.model.path, "model.path", places, guess_name=True)
    name = config.model.name
    if name is not None and (Path(name) / "config.json").is_file():
        raise JobError(
            f"{places.of('model.name')}: model.name is {name!r}, which is a folder here. "
            "Did you mean model.path?"
        )
    for table in config.fixed_policies:
        if table.model_path is not None:
            _refuse_no_fixed_model(table.model_path, places)


def _refuse_no_fixed_model(folder: Path, places: Places) -> None:
    key = "rollout_only.model_path"
    try:
        found = model_in(folder)
    except RunDirectoryError as error:
        raise JobError(f"{places.of(key)}: {key}: {error}") from error
    _refuse_empty(found, key, places)


def _refuse_empty(folder: Path, key: str, places: Places, *, guess_name: bool = False) -> None:
    place = places.of(key)
    if not folder.is_dir():
        meant = _folder_meant(folder, guess_name=guess_name)
        raise JobError(f"{place}: {key} is {str(folder)!r}, which is no folder{meant}")
    if not (folder / "config.json").is_file():
        raise JobError(f"{place}: {key} is {str(folder)!r}, which holds no model: config.json is missing")


def _folder_meant(folder: Path, *, guess_name: bool) -> str:
    """`". Did you mean 'x'?"` for a misspelt last part of a path, or for a name of the hub."""
    try:
        beside = [path.name for path in folder.parent.iterdir() if path.is_dir()]
    except OSError:
        beside = []
    close = difflib.get_close_matches(folder.name, beside, n=1)
    if close:
        return f". Did you mean {str(folder.with_name(close[0]))!r}?"
    looks_like_a_name = guess_name and len(folder.parts) == 2 and HUB_NAME.fullmatch(folder.as_posix())
    return f". Did you mean model.name = {folder.as_posix()!r}?" if looks_like_a_name else ""
