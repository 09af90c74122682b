"""What an index of stored rollouts needs of their Parquet files: the flat columns, no records, no tokens."""

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
_NOT_WRITTEN: dict[str, Any] = {"return_to_go": None, "state_key": None}  # by the first versions
# What a stage's file is called, and its iteration; a copy that somebody made (iteration_5_old) is not ours.
_NAME = re.compile(r"([a-z]+)(?:_(\d+))?")
_STAGES = {"iteration": "train"}


@dataclass(frozen=True, slots=True)
class RolloutFile:
    """A file of stored rollouts as it lies there.

    Attributes:
        name: below the run directory, such as rollouts/iteration_3.parquet.
        stage: train, or as the file is called: branches, evaluation, warmup, prompts.
        iteration: 0 for a stage that has none.
        modified_ns: with the size, what tells that it was written anew; nanoseconds since 1970.
    """

    path: Path
    name: str
    stage: str
    iteration: int
    size: int
    modified_ns: int


def rollout_files(run: Path) -> list[RolloutFile]:
    """The files of a run, in order of iterations; none where its folder is gone."""
    found = []
    for path in (run / "rollouts").glob("*.parquet"):
        match = _NAME.fullmatch(path.stem)
        if match is None:
            continue
        try:
            facts = path.stat()
        except FileNotFoundError:
            continue  # removed just now
        stage, iteration = _STAGES.get(match[1], match[1]), int(match[2] or 0)
        name = f"rollouts/{path.name}"
        found.append(RolloutFile(path, name, stage, iteration, facts.st_size, facts.st_mtime_ns))
    return sorted(found, key=lambda file: (file.iteration, file.name))


def read_index(path: Path) -> list[dict[str, Any]]:
    """A dict a rollout: the columns of `rollout_files.write_rollouts` but for `rollout`; of each of its
    `decisions` the columns without tokens.

    Raises:
        FileNotFoundError: it was removed meanwhile.
        RunDirectoryError: it is no Parquet file of ours.
    """
    try:
        with pq.ParquetFile(path) as file:
            known = [file.schema.column(number).path for number in range(len(file.schema))]
            present = [
                column for column in _COLUMNS if any(f"{leaf}.".startswith(f"{column}.") for leaf in known)
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
