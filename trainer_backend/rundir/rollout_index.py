"""Reads only the small columns of stored rollouts and of their decisions, which is fast."""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainer_backend.errors import RunDirectoryError

_ROLLOUT = (
    "rollout_id", "group_id", "sibling", "attempt", "policy_name", "model", "status", "seed",
    "outcome_reward", "unique_achievements", "decision_count", "env_steps", "stop_reason", "failure_code",
)  # fmt: skip
_OF_CREDIT = (
    "turn", "action", "unique", "unique_delta", "ach_delta", "env_reward", "reward", "return_to_go",
    "advantage", "state_key", "invalid_reason",
)  # fmt: skip
_CREDIT = [f"decisions.list.element.{name}" for name in _OF_CREDIT]
_TURN, _REWARD = "decisions.list.element.turn", "decisions.list.element.reward"
_NOT_WRITTEN: dict[str, Any] = {"return_to_go": None, "state_key": None}  # absent in the first versions
# Stage and iteration in a file's name. A user's copy (iteration_5_old) does not match.
_NAME = re.compile(r"([a-z]+)(?:_(\d+))?")
_STAGES = {"iteration": "train"}


@dataclass(frozen=True, slots=True)
class RolloutFile:
    path: Path
    name: str
    """Path relative to the run directory, such as rollouts/iteration_3.parquet."""
    stage: str
    """One of train, branches, evaluation, warmup and prompts."""
    iteration: int
    """0 for a stage without iterations."""
    size: int
    modified_ns: int
    """Time of the last write, in nanoseconds since 1970. A rewrite changes `modified_ns` or `size`."""


def rollout_files(run: Path) -> list[RolloutFile]:
    """List the files of a run's rollouts, sorted by iteration; empty if the folder is gone."""
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
    """Read the flat columns of each rollout, and `reward`, the sum of its decisions' rewards.

    `reward` is None if there are no decisions, or if a decision has no reward.
    """
    with _opened(path) as file:
        table = file.read(columns=[*_ROLLOUT, _REWARD], use_threads=False)
        rows: list[dict[str, Any]] = table.drop_columns("decisions").to_pylist()
        decisions = table.column("decisions").combine_chunks()
        rewards = iter(decisions.flatten().field("reward").to_pylist())
        counts = decisions.value_lengths().to_pylist()
    for row, count in zip(rows, counts, strict=True):
        own = list(islice(rewards, count or 0))
        row["reward"] = sum(own) if own and None not in own else None
    return rows


def read_credits(path: Path, places: Collection[int] | None = None) -> list[list[dict[str, Any]]]:
    """Return, for each rollout, the credit of its decisions.

    Args:
        places: the numbers of the rows to read, from 0. Rows are returned in ascending order. None: all rows.
    """
    with _opened(path) as file:
        names = [file.schema.column(number).path for number in range(len(file.schema))]
        columns = [name for name in _CREDIT if any(f"{leaf}.".startswith(f"{name}.") for leaf in names)]
        decisions: list[list[dict[str, Any]] | None] = []
        if places is None:
            decisions = file.read(columns=columns, use_threads=False).column("decisions").to_pylist()
        else:
            for table, rows in _row_groups(file, sorted(places), columns):
                decisions += table.column("decisions").take(rows).to_pylist()
    return [[{**_NOT_WRITTEN, **decision} for decision in rollout or ()] for rollout in decisions]


def _row_groups(
    file: pq.ParquetFile, places: Sequence[int], columns: Sequence[str]
) -> Iterator[tuple[pa.Table, list[int]]]:
    """Yield each row group that contains rows of `places`, and the numbers of these rows within the group."""
    begin = 0
    for group in range(file.num_row_groups):
        end = begin + file.metadata.row_group(group).num_rows
        rows = [place - begin for place in places if begin <= place < end]
        if rows:
            yield file.read_row_group(group, columns=list(columns), use_threads=False), rows
        begin = end


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a file of rollouts. Raise RunDirectoryError if it is damaged or contains something else."""
    try:
        with pq.ParquetFile(path) as file:
            if not any(file.schema.column(i).path == _TURN for i in range(len(file.schema))):
                raise RunDirectoryError(f"{path} holds no rollouts, or is of no version that this one knows")
            yield file
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from error
