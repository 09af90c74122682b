"""The flat columns of stored rollouts for an index, without records and tokens."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainer_backend.errors import RunDirectoryError

_ROLLOUT = (
    "rollout_id",
    "group_id",
    "sibling",
    "attempt",
    "policy_name",
    "model",
    "status",
    "seed",
    "outcome_reward",
    "unique_achievements",
    "decision_count",
    "env_steps",
    "stop_reason",
    "failure_code",
)
_DECISION = (
    "turn",
    "action",
    "unique",
    "unique_delta",
    "ach_delta",
    "env_reward",
    "reward",
    "return_to_go",
    "advantage",
    "state_key",
    "invalid_reason",
)
_COLUMNS = (*_ROLLOUT, *(f"decisions.list.element.{name}" for name in _DECISION))
_NOT_WRITTEN: dict[str, Any] = {"return_to_go": None, "state_key": None}  # absent in the first versions
# Stage and iteration in a file's name. A user's copy (iteration_5_old) does not match.
_NAME = re.compile(r"([a-z]+)(?:_(\d+))?")
_STAGES = {"iteration": "train"}


@dataclass(frozen=True, slots=True)
class RolloutFile:
    """A file of stored rollouts."""

    path: Path
    name: str
    """Relative to the run directory, such as rollouts/iteration_3.parquet."""
    stage: str
    """One of train, branches, evaluation, warmup and prompts."""
    iteration: int
    """0 for a stage without iterations."""
    size: int
    modified_ns: int
    """Nanoseconds since 1970; together with the size it shows a rewrite."""


def rollout_files(run: Path) -> list[RolloutFile]:
    """List the files of a run by iteration; none if its folder is gone."""
    files = []
    for path in (run / "rollouts").glob("*.parquet"):
        match = _NAME.fullmatch(path.stem)
        if match is None:
            continue
        try:
            facts = path.stat()
        except FileNotFoundError:
            continue  # deleted just now
        stage, iteration = _STAGES.get(match[1], match[1]), int(match[2] or 0)
        name = f"rollouts/{path.name}"
        files.append(RolloutFile(path, name, stage, iteration, facts.st_size, facts.st_mtime_ns))
    return sorted(files, key=lambda file: (file.iteration, file.name))


def read_index(path: Path) -> list[dict[str, Any]]:
    """Read one dict per rollout: the columns of `write_rollouts` without `rollout` and without tokens."""
    try:
        with pq.ParquetFile(path) as file:
            columns = [file.schema.column(number).path for number in range(len(file.schema))]
            present = [
                column for column in _COLUMNS if any(f"{leaf}.".startswith(f"{column}.") for leaf in columns)
            ]
            rows: list[dict[str, Any]] = file.read(columns=present, use_threads=False).to_pylist()
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from error
    if "decisions.list.element.turn" not in present:
        raise RunDirectoryError(f"{path} holds no rollouts, or is of no version that this one knows")
    for row in rows:
        row["decisions"] = [{**_NOT_WRITTEN, **decision} for decision in row["decisions"] or ()]
    return rows
