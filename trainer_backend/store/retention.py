"""The table [retention] of a job, and the deletion of old rollout files by a sync."""

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

# Only files of these stages are deleted; each iteration adds one. Files of evaluations are few, and the
# report needs them.
_OF_ITERATIONS = ("train", "branches")


class RetentionTable(Table):
    """[retention]: which rollout files `turnwise trainer` keeps when it indexes a run; by default all."""

    rollout_files_iterations: int | None = Field(default=None, ge=1)
    """keep the rollout files of this many newest training iterations; a sync deletes older files of training
    and of branches, also from the index in the database; files of evaluations always stay"""


def read_retention(run: Path) -> RetentionTable:
    """Read the table [retention] of a run's job.

    Other tables are not checked, since a job of an earlier version must be readable.
    """
    path = run / "job.toml"
    try:
        document = tomli.loads(read_text(path))
        return RetentionTable.model_validate(without(document, DROPPED).get("retention", {}))
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{path}: [retention] cannot be read: {error}") from error


def remove_old_files(table: RetentionTable, files: "list[RolloutFile]") -> "list[RolloutFile]":
    """Delete the rollout files that [retention] does not keep; return the remaining files."""
    if table.rollout_files_iterations is None:
        return files
    # [retention] counts back from the last iteration that has training rollouts.
    newest = max((file.iteration for file in files if file.stage == "train"), default=0)
    oldest = newest - table.rollout_files_iterations + 1
    rest = [file for file in files if file.stage not in _OF_ITERATIONS or file.iteration >= oldest]
    for file in files:
        if file not in rest:
            with write_errors(file.path):
                file.path.unlink(missing_ok=True)
    return rest
