"""[retention] of a job: which files of a run each sync keeps. A pure rule."""

from pathlib import Path
from typing import TYPE_CHECKING

import tomli
from pydantic import Field

from shared_schemas.plain_text import read_text
from trainer_backend.core.keys import Table
from trainer_backend.errors import RunDirectoryError
from trainer_backend.job.foreign_keys import DROPPED
from trainer_backend.job.layers import without
from trainer_backend.rundir.files import write_errors

if TYPE_CHECKING:  # pyarrow, which reading a job does not need
    from trainer_backend.rundir.rollout_index import RolloutFile

# Stages with one file per iteration. Evaluations are few, and the report needs them.
_OF_ITERATIONS = ("train", "branches")


class RetentionTable(Table):
    """[retention]: read by `turnwise trainer`, which indexes runs in its database; absent: all stay."""

    rollout_files_iterations: int | None = Field(default=None, ge=1)
    """the run directory keeps the rollout files of this many newest iterations and of evaluations; older ones
    are deleted there and in the database"""


def retention_of(run: Path) -> RetentionTable:
    """Read [retention] of a run's job; the rest may be of an earlier version and is not checked."""
    path = run / "job.toml"
    try:
        document = tomli.loads(read_text(path))
        return RetentionTable.model_validate(without(document, DROPPED).get("retention", {}))
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{path}: [retention] cannot be read: {error}") from error


def keeps_file(table: RetentionTable, file: "RolloutFile", *, newest: int) -> bool:
    """Return whether a file of rollouts stays in the run directory."""
    count = table.rollout_files_iterations
    return count is None or file.stage not in _OF_ITERATIONS or file.iteration > newest - count


def remove_old_files(table: RetentionTable, files: "list[RolloutFile]") -> "list[RolloutFile]":
    """Delete the files that [retention] does not keep; return the others."""
    # [retention] counts back from the last iteration that has rollouts.
    newest = max((file.iteration for file in files if file.stage == "train"), default=0)
    rest = []
    for file in files:
        if keeps_file(table, file, newest=newest):
            rest.append(file)
            continue
        with write_errors(file.path):
            file.path.unlink(missing_ok=True)
    return rest
