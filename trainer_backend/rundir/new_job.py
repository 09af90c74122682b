"""Loads the job of a new run, and checks that its models, files and libraries exist."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from trainer_backend.data.layout import suggest_path
from trainer_backend.errors import JobError, RunDirectoryError
from trainer_backend.job.code_files import with_known_files
from trainer_backend.job.layers import Places
from trainer_backend.job.load import LoadedJob, load_job
from trainer_backend.job.mixture_table import RolloutOnlyTable
from trainer_backend.job.tables import HUB_NAME, TASK_APP_SETTINGS, ModelTable
from trainer_backend.rundir.checkpoint_paths import model_in
from trainer_backend.sinks import refuse_missing_libraries


def load_new_job(paths: Path | Sequence[Path], overrides: Sequence[str] = ()) -> LoadedJob:
    """Load the job of a new run. Raise JobError if a part that it names is missing.

    For an existing run, use `load_job`: it has checkpoints, so its first model folder may be gone.
    """
    loaded = load_job(paths, overrides)
    refuse_missing_parts(loaded)
    return with_known_files(loaded)


def refuse_missing_parts(loaded: LoadedJob) -> None:
    """Raise JobError if a model folder, file, Python interpreter or library of a sink is missing."""
    config, places = loaded.config, loaded.places
    _refuse_no_model(config.model, config.fixed_policies, places)
    interactions = config.multi_turn.interaction_config_path
    files = [("services.task_plugins", file) for file in config.services.task_plugins]
    files += [("multi_turn.interaction_config_path", interactions)] if interactions is not None else []
    for name in TASK_APP_SETTINGS:
        file = getattr(config.services, name)
        # A Python interpreter may be a command on PATH.
        if isinstance(file, Path) and not (name.endswith("_python") and shutil.which(file)):
            files.append((f"services.{name}", file))
    for key, file in files:
        if not file.is_file():
            meant = suggest_path(file, Path.is_file)
            raise JobError(f"{places.of(key)}: {key} is {str(file)!r}, which is no file{meant}")
    refuse_missing_libraries(config.sinks)


def _refuse_no_model(model: ModelTable, fixed: Sequence[RolloutOnlyTable], places: Places) -> None:
    if model.path is not None:
        _refuse_empty(model.path, "model.path", places, guess_name=True)
    name = model.name
    if name is not None and (Path(name) / "config.json").is_file():
        raise JobError(
            f"{places.of('model.name')}: model.name is {name!r}, which is a folder here. "
            "Did you mean model.path?"
        )
    for table in fixed:
        if table.model_path is not None:
            key = "rollout_only.model_path"
            try:
                folder = model_in(table.model_path)
            except RunDirectoryError as error:
                raise JobError(f"{places.of(key)}: {key}: {error}") from error
            _refuse_empty(folder, key, places)


def _refuse_empty(folder: Path, key: str, places: Places, *, guess_name: bool = False) -> None:
    place = places.of(key)
    if not folder.is_dir():
        is_name = guess_name and len(folder.parts) == 2 and HUB_NAME.fullmatch(folder.as_posix())
        named = f". Did you mean model.name = {folder.as_posix()!r}?" if is_name else ""
        meant = suggest_path(folder, Path.is_dir) or named
        raise JobError(f"{place}: {key} is {str(folder)!r}, which is no folder{meant}")
    # A checkpoint that contains only adapters has a base.json in place of a config.json.
    if not any((folder / name).is_file() for name in ("config.json", "base.json")):
        raise JobError(f"{place}: {key} is {str(folder)!r}, which holds no model: config.json is missing")
