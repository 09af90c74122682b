"""Records the SHA-256 of the files that a job's own task apps run, and refuses files that have changed.

These are the files of `services.task_plugins` and `multi_turn.interaction_config_path`. `load_job` does not
read them, because a machine that only loads the job, such as that of a remote learner, may lack them.
`load_job` itself records and checks the files of `job.trainer_plugins`, because it runs these files.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli
import yaml

from shared_schemas.plain_text import read_text
from shared_schemas.rollouts import default_interaction_name
from trainer_backend.errors import JobError
from trainer_backend.job.layers import DIGESTS
from trainer_backend.job.load import LoadedJob
from trainer_backend.job.schema import JobConfig
from trainer_backend.operator_plugins import digest_files, refuse_changed

_CLASS_NAME = re.compile(r"\w+(\.\w+)+")


def with_known_files(loaded: LoadedJob) -> LoadedJob:
    """Return the job with the SHA-256 of each file that its task apps run.

    Raises JobError if a file has changed since the run began, or cannot be read.
    """
    for key, value, files in _task_files(loaded.config):
        try:
            refuse_changed(files, digests_in(loaded.config)[key], option=key, value=value)
        except JobError as error:
            raise JobError(f"{loaded.places.of(key)}: {error}") from error
    return replace(loaded, config=with_files_of_now(loaded.config))


def with_files_of_now(job: JobConfig) -> JobConfig:
    """Return the job with the SHA-256 that the task apps' files have now; recorded values are replaced.

    Raises JobError if a file cannot be read.
    """
    for key, _, files in _task_files(job):
        table, _, name = DIGESTS[key].partition(".")
        section = getattr(job, table).model_copy(update={name: tuple(digest_files(files, option=key))})
        job = job.model_copy(update={table: section})
    return job


def _task_files(job: JobConfig) -> Iterator[tuple[str, Any, Sequence[Path]]]:
    """Yield each key that names files of task apps, with its value in TOML and with the files."""
    plugins = job.services.task_plugins
    yield "services.task_plugins", [*map(str, plugins)], plugins
    path = job.multi_turn.interaction_config_path
    files = [] if path is None else [path]
    # The file names classes. If the module of a class is in the folder of the file, it is included.
    interactions = interactions_in(path) if path is not None else ()
    for name in dict.fromkeys(class_name.rpartition(".")[0] for class_name, _ in interactions):
        module = files[0].resolve().parent.joinpath(*name.split("."))
        modules = (module.with_suffix(".py"), module / "__init__.py")
        files += [module for module in modules if module.is_file()]
    yield "multi_turn.interaction_config_path", str(path), files


def interactions_in(file: Path) -> Sequence[tuple[str, str]]:
    """Return a pair for each interaction that a file lists: its class as `module.Class`, and its name.

    The result is empty if the file cannot be read, because the task app reports that fault.
    """
    read = tomli.loads if file.suffix.lower() == ".toml" else yaml.safe_load
    try:
        document = read(read_text(file))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return ()
    entries = document.get("interaction") if isinstance(document, Mapping) else None
    rows = [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
    classes = [(str(row.get("class_name")), row.get("name")) for row in rows]
    return [
        (kind, str(name or default_interaction_name(kind)))
        for kind, name in classes
        if _CLASS_NAME.fullmatch(kind)
    ]


def digests_in(job: JobConfig) -> dict[str, Sequence[str]]:
    """Return the SHA-256 values that a job records, by the key that names the files."""
    places = {key: digests.partition(".") for key, digests in DIGESTS.items()}
    return {key: getattr(getattr(job, table), name) for key, (table, _, name) in places.items()}
