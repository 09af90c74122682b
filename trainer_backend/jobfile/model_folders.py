"""Is there a model in every folder that a job names, and a file at every path? Asked before a run."""

import difflib
from collections.abc import Callable
from pathlib import Path

from trainer_backend.errors import JobError, RunDirectoryError
from trainer_backend.jobfile.layers import Places
from trainer_backend.jobfile.model_table import HUB_NAME
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


def refuse_no_file(config: JobConfig, places: Places) -> None:
    """Of the files that the job's own task app reads at its start, seconds later and in its own words.

    Raises:
        JobError: multi_turn.interaction_config_path or one of services.task_plugins is no file.
    """
    interactions = config.multi_turn.interaction_config_path
    named = [("services.task_plugins", file) for file in config.services.task_plugins]
    named += [("multi_turn.interaction_config_path", interactions)] if interactions is not None else []
    for key, file in named:
        if not file.is_file():
            meant = _meant(file, Path.is_file)
            raise JobError(f"{places.of(key)}: {key} is {str(file)!r}, which is no file{meant}")


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
    if meant := _meant(folder, Path.is_dir):
        return meant
    looks_like_a_name = guess_name and len(folder.parts) == 2 and HUB_NAME.fullmatch(folder.as_posix())
    return f". Did you mean model.name = {folder.as_posix()!r}?" if looks_like_a_name else ""


def _meant(path: Path, kind: Callable[[Path], bool]) -> str:
    """`". Did you mean 'x'?"` for what is called much like it beside it, and of that kind."""
    try:
        beside = [other.name for other in path.parent.iterdir() if kind(other)]
    except OSError:
        beside = []
    close = difflib.get_close_matches(path.name, beside, n=1)
    return f". Did you mean {str(path.with_name(close[0]))!r}?" if close else ""
