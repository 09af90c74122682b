"""The files that a job's own task apps run: a run records the SHA-256 of each, and a resume refuses others.

`load_job` does the same with `job.trainer_plugins`, which run where the job is read. It does not read these,
since crediting stored rollouts, and a learner on another machine, need none of them.
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
    """The job of a run whose task apps are to start: with the digests of their files, as the run began.

    JobError: a file has changed since then, or cannot be read.
    """
    for key, value, files in _task_files(loaded.config):
        try:
            refuse_changed(files, digests_in(loaded.config)[key], option=key, value=value)
        except JobError as error:
            raise JobError(f"{loaded.places.of(key)}: {error}") from error
    return replace(loaded, config=with_files_of_now(loaded.config))


def with_files_of_now(job: JobConfig) -> JobConfig:
    """The job with the digests of the files as they are; JobError: a file cannot be read."""
    for key, _, files in _task_files(job):
        table, _, name = DIGESTS[key].partition(".")
        section = getattr(job, table).model_copy(update={name: tuple(digest_files(files, option=key))})
        job = job.model_copy(update={table: section})
    return job


def _task_files(job: JobConfig) -> Iterator[tuple[str, Any, Sequence[Path]]]:
    """The keys that name files, their values in TOML, and the files."""
    plugins = job.services.task_plugins
    yield "services.task_plugins", [*map(str, plugins)], plugins
    path = job.multi_turn.interaction_config_path
    files = [] if path is None else [path]
    # With the modules in its folder whose classes it names.
    interactions = interactions_in(path) if path is not None else ()
    for name in dict.fromkeys(class_name.rpartition(".")[0] for class_name, _ in interactions):
        module = files[0].resolve().parent.joinpath(*name.split("."))
        modules = (module.with_suffix(".py"), module / "__init__.py")
        files += [module for module in modules if module.is_file()]
    yield "multi_turn.interaction_config_path", str(path), files


def interactions_in(file: Path) -> Sequence[tuple[str, str]]:
    """The class, with its module, and the name of each interaction in a file.

    Empty for a file that cannot be read: the task app that reads it says what is wrong.
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
    """The digests that a job holds, by the key that names the files."""
    places = {key: digests.partition(".") for key, digests in DIGESTS.items()}
    return {key: getattr(getattr(job, table), name) for key, (table, _, name) in places.items()}
