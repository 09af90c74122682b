"""`turnwise export`: from a run directory to a file or folder; written aside, then renamed."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from shared_schemas.rollouts import Rollout
from trainer_backend.errors import RunDirectoryError
from trainer_backend.export.choose import Choice, Exported, why_not
from trainer_backend.export.rows import Row, rows_of
from trainer_backend.rundir.boundary import writing
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.rundir.rollout_index import read_index, rollout_files

_CALL = pa.struct(
    [
        ("id", pa.string()),
        ("type", pa.string()),
        ("function", pa.struct([("name", pa.string()), ("arguments", pa.string())])),
    ]
)
_MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("name", pa.string()),
        ("tool_call_id", pa.string()),
        ("tool_calls", pa.list_(_CALL)),
        ("weight", pa.int8()),
        ("extra", pa.string()),  # what else a message has, as JSON
    ]
)
_NAMES = pa.list_(pa.string())
_METADATA = pa.struct(
    [
        ("session_id", pa.string()),
        ("turn", pa.int32()),
        ("turns", pa.list_(pa.int32())),
        ("model", pa.string()),
        ("provider", pa.string()),
        ("env_name", pa.string()),
        ("iteration", pa.int32()),
        ("group_id", pa.string()),
        ("seed", pa.int64()),
        ("outcome_reward", pa.float64()),
        ("reward", pa.float64()),
        (
            "achievements",
            pa.struct([("new_unique", _NAMES), ("turned_true", _NAMES), ("cumulative_unique", _NAMES)]),
        ),
    ]
)
# JSON: the schemas of two tools have no common type, and a union of all their keys would be no schema of any.
_SCHEMA = pa.schema([("messages", pa.list_(_MESSAGE)), ("tools", pa.string()), ("metadata", _METADATA)])
_CARD = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
---
Rows of messages from the run {run}, by `turnwise export`: {told}.
"""


class _Sink(Protocol):
    def put(self, rows: list[Row]) -> None: ...


def export_run(run: RunDirectory, to: Path, choice: Choice) -> Exported:
    """Write the chosen episodes of a run as rows of messages; memory is that of one iteration.

    Args:
        to: x.jsonl, x.parquet, or a folder to make, which `datasets.load_dataset` reads.

    Raises:
        RunDirectoryError: `to` exists, ends otherwise, or cannot be written; a file of the run cannot be
            read, or was removed meanwhile; no episode is left, with the causes.
    """
    if to.exists():
        raise RunDirectoryError(f"{to} exists; nothing is replaced: name another --to, or remove it")
    if to.suffix not in ("", ".jsonl", ".parquet"):
        raise RunDirectoryError(
            f"--to is {to}; known: a .jsonl file, a .parquet file, a folder without a dot"
        )
    aside = to.with_name(f".{to.name}.tmp")
    with writing(to, pa.ArrowException):
        _clear(aside)
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            exported = _written(run, aside, to.suffix, choice)
            if not exported.rows:
                raise RunDirectoryError(f"{run.path}: nothing to export: {exported}")
            os.replace(aside, to)
        finally:
            _clear(aside)
    return exported


def _written(run: RunDirectory, aside: Path, suffix: str, choice: Choice) -> Exported:
    if suffix == ".jsonl":
        with aside.open("w", encoding="utf-8") as file:
            return _export(run, choice, _Lines(file))
    if suffix == ".parquet":
        with _parquet(aside) as table:
            return _export(run, choice, table)
    (aside / "data").mkdir(parents=True)
    with _parquet(aside / "data/train-00000-of-00001.parquet") as table:
        exported = _export(run, choice, table)
    (aside / "README.md").write_text(_CARD.format(run=run.path.name, told=exported), encoding="utf-8")
    return exported


def _export(run: RunDirectory, choice: Choice, sink: _Sink) -> Exported:
    left_out: Counter[str] = Counter()
    row_count = episodes = 0
    files = [file for file in rollout_files(run.path) if file.stage in choice.stages]
    # In the order of the stages: who reads JSONL takes the types from the first rows, and those of a warm-up
    # have no reward.
    for file in sorted(files, key=lambda file: choice.stages.index(file.stage)):
        rollouts, credits = _stored(file.path)
        for rollout in rollouts:
            rows = [] if (why := why_not(choice, rollout)) else rows_of(rollout, credits[rollout.rollout_id])
            if not rows:
                left_out[why or "without a decision worth imitating"] += 1
                continue
            sink.put(rows)
            row_count, episodes = row_count + len(rows), episodes + 1
    return Exported(row_count, episodes, left_out)


def _stored(path: Path) -> tuple[list[Rollout], dict[str, list[dict[str, Any]]]]:
    """The rollouts of a file, and by their ids the columns of their decisions."""
    try:
        return read_rollouts(path), {row["rollout_id"]: row["decisions"] for row in read_index(path)}
    except FileNotFoundError as error:
        # Not OSError, which around here is one of the file that is written.
        raise RunDirectoryError(
            f"{path} was removed while it was exported", hint="[retention] removes old ones; export again."
        ) from error


class _Lines:
    def __init__(self, file: Any) -> None:
        self._file = file

    def put(self, rows: list[Row]) -> None:
        for row in rows:
            self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


class _Table:
    def __init__(self, writer: pq.ParquetWriter) -> None:
        self._writer = writer
        self._rows: list[Row] = []

    def put(self, rows: list[Row]) -> None:
        self._rows += map(_flat, rows)
        if len(self._rows) >= 2_000:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=_SCHEMA))
            self._rows = []


@contextmanager
def _parquet(path: Path) -> Iterator[_Table]:
    with pq.ParquetWriter(path, _SCHEMA, compression="zstd") as writer:
        table = _Table(writer)
        yield table
        table.flush()


def _flat(row: Row) -> Row:
    known = {field.name for field in _MESSAGE}
    messages = []
    for message in row["messages"]:
        extra = {key: value for key, value in message.items() if key not in known}
        messages.append(message | ({"extra": json.dumps(extra)} if extra else {}))
    return {**row, "messages": messages, "tools": json.dumps(row["tools"])}


def _clear(aside: Path) -> None:
    """What an export that was killed has left."""
    if aside.is_dir():
        shutil.rmtree(aside)
    aside.unlink(missing_ok=True)
