"""What of a run is kept, as [retention] of its job says. A pure rule, applied by each sync."""

from pathlib import Path

import tomli
from pydantic import ValidationError

from trainer_backend.errors import RunDirectoryError
from trainer_backend.job.tables import RetentionTable
from trainer_backend.rundir.files import writing
from trainer_backend.rundir.rollout_index import RolloutFile

_DAY_NS = 86_400 * 10**9
# Stages with a file an iteration. A run has few evaluations, and the report needs them.
_OF_ITERATIONS = ("train", "branches")


def retention_of(run: Path) -> RetentionTable:
    """[retention] of a run's job; of the rest of its job.toml nothing is asked, an earlier version may have
    written it.

    Raises:
        RunDirectoryError: job.toml cannot be read, or its [retention] is wrong: nothing is removed then.
    """
    path = run / "job.toml"
    try:
        document = tomli.loads(path.read_text(encoding="utf-8"))
        return RetentionTable.model_validate(document.get("retention", {}))
    except (OSError, tomli.TOMLDecodeError, ValidationError) as error:
        raise RunDirectoryError(f"{path}: [retention] cannot be read: {error}") from error


def newest_iteration(files: list[RolloutFile]) -> int:
    """The last iteration that has rollouts; what `newest so many` counts back from."""
    return max((file.iteration for file in files if file.stage == "train"), default=0)


def keeps_decisions(table: RetentionTable, file: RolloutFile, *, newest: int, now_ns: int) -> bool:
    """Whether the store holds the decisions of a file.

    Args:
        newest: the last iteration of the run.
        now_ns: nanoseconds since 1970, as file times are.
    """
    count, days = table.decisions_iterations, table.decisions_days
    young = days is None or now_ns - file.modified_ns <= days * _DAY_NS
    return young and (count is None or file.iteration > newest - count)


def keeps_file(table: RetentionTable, file: RolloutFile, *, newest: int) -> bool:
    """Whether a file of rollouts stays in the run directory."""
    count = table.rollout_files_iterations
    return count is None or file.stage not in _OF_ITERATIONS or file.iteration > newest - count


def remove_old_files(table: RetentionTable, files: list[RolloutFile]) -> list[RolloutFile]:
    """Delete files that are not kept; return the rest.

    Raises:
        RunDirectoryError: the run directory is read-only.
    """
    newest = newest_iteration(files)
    kept = []
    for file in files:
        if keeps_file(table, file, newest=newest):
            kept.append(file)
            continue
        with writing(file.path):
            file.path.unlink(missing_ok=True)
    return kept
