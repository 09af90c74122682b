"""`turnwise export` converts a run directory to a file or folder.

The output is written under a temporary name and renamed when it is complete.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from shared_schemas.rollouts import Rollout
from trainer_backend.core.policies import name_player
from trainer_backend.errors import JobError, RunDirectoryError
from trainer_backend.rundir.files import write_errors
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.rundir.rollout_index import read_credits, rollout_files
from trainer_backend.terminal.atif import make_atif
from trainer_backend.terminal.rows import Row, make_rows

# Stages for training. Learning from held-out worlds would make evaluation on them meaningless.
DEFAULT_STAGES = ("train", "warmup")
STAGES = (*DEFAULT_STAGES, "branches", "evaluation", "prompts")


# Rows of messages for supervised training, or an ATIF file for each episode.
FORMS = MESSAGES, ATIF = ("messages", "atif")


@dataclass(frozen=True, slots=True)
class Choice:
    """Conditions that an exported episode must all meet. An absent field is no condition."""

    stages: Sequence[str] = DEFAULT_STAGES
    min_reward: float | None = None
    """Minimum outcome_reward."""
    achievements: Sequence[str] = ()
    """The episode must have unlocked all of these."""
    policy: str | None = None
    """The model's name after its last slash, or the policy's name if no model played."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.stages) - set(STAGES))
        if unknown:
            raise JobError(f"--stage is {unknown[0]!r}; known: {', '.join(STAGES)}")


def why_not(choice: Choice, rollout: Rollout) -> str | None:
    """Return why an episode is not exported, such as `--min-reward`, or None if it is exported."""
    trajectory = rollout.trajectory
    if trajectory is None:
        return f"not finished ({rollout.failure.code if rollout.failure else rollout.status})"
    player = name_player(trajectory.model, trajectory.policy_name)
    if choice.policy is not None and player != choice.policy:
        return f"--policy (by {player})"
    if choice.min_reward is not None and trajectory.outcome_reward < choice.min_reward:
        return "--min-reward"
    counts = trajectory.achievements_counts
    missing = next((name for name in choice.achievements if not counts.get(name)), None)
    return None if missing is None else f"--achievement {missing}"


@dataclass(frozen=True, slots=True)
class ExportResult:
    rows: int
    episodes: int
    skipped: Counter[str]
    """Number of excluded episodes by cause."""
    unit: str = "rows"
    """What `rows` counts: "rows" or "files". The printed result contains this word."""

    def __str__(self) -> str:
        causes = ", ".join(f"{count} {cause}" for cause, count in self.skipped.most_common())
        return f"{self.rows} {self.unit} of {self.episodes} episodes" + (
            f"; left out: {causes}" if causes else ""
        )


_TEXT, _INT, _FLOAT, _TEXTS = pa.string(), pa.int32(), pa.float64(), pa.list_(pa.string())
_FUNCTION = pa.struct([("name", _TEXT), ("arguments", _TEXT)])
_CALL = pa.struct([("id", _TEXT), ("type", _TEXT), ("function", _FUNCTION)])
_MESSAGE = pa.struct([
    ("role", _TEXT), ("content", _TEXT), ("name", _TEXT), ("tool_call_id", _TEXT),
    ("tool_calls", pa.list_(_CALL)), ("weight", pa.int8()),
    ("extra", _TEXT),  # other keys of a message, as JSON
])  # fmt: skip
_ACHIEVEMENTS = pa.struct([(name, _TEXTS) for name in ("new_unique", "turned_true", "cumulative_unique")])
_METADATA = pa.struct([
    ("session_id", _TEXT), ("turn", _INT), ("turns", pa.list_(_INT)), ("model", _TEXT), ("provider", _TEXT),
    ("env_name", _TEXT), ("iteration", _INT), ("group_id", _TEXT), ("seed", pa.int64()),
    ("outcome_reward", _FLOAT), ("reward", _FLOAT), ("achievements", _ACHIEVEMENTS),
])  # fmt: skip
# JSON, because the schemas of two tools have no common type.
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


# Writes an episode with the columns of its decisions, and returns the number of rows.
Put = Callable[[Rollout, Sequence[Mapping[str, Any]]], int]


def export_run(run: RunDirectory, to: Path, choice: Choice, *, form: str = MESSAGES) -> ExportResult:
    """Write the selected episodes of a run. Memory holds the episodes of only one iteration at a time.

    Args:
        to: for rows of messages, x.jsonl, x.parquet, or a new folder for `datasets.load_dataset`; for ATIF, a
            new folder.
    """
    if to.exists():
        raise RunDirectoryError(f"{to} exists; nothing is replaced: name another --to, or remove it")
    if form not in FORMS:
        raise JobError(f"--form is {form!r}; known: {', '.join(FORMS)}")
    if form == ATIF and to.suffix:
        raise RunDirectoryError(f"--to is {to}; --form atif writes a folder, whose name has no dot")
    if to.suffix not in ("", ".jsonl", ".parquet"):
        raise RunDirectoryError(
            f"--to is {to}; known: a .jsonl file, a .parquet file, a folder without a dot"
        )
    aside = to.with_name(f".{to.name}.tmp")
    with write_errors(to, pa.ArrowException):
        _clear(aside)
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            result = _write(run, aside, to.suffix, choice, form)
            if not result.rows:
                raise RunDirectoryError(f"{run.path}: nothing to export: {result}")
            os.replace(aside, to)
        finally:
            _clear(aside)
    return result


def _write(run: RunDirectory, aside: Path, suffix: str, choice: Choice, form: str) -> ExportResult:
    if form == ATIF:
        aside.mkdir()
        return replace(_export(run, choice, partial(_put_document, aside)), unit="files")
    if suffix == ".jsonl":
        with aside.open("w", encoding="utf-8") as file:
            return _export(run, choice, partial(_put_lines, file))
    if suffix == ".parquet":
        with _parquet(aside) as put:
            return _export(run, choice, put)
    (aside / "data").mkdir(parents=True)
    with _parquet(aside / "data/train-00000-of-00001.parquet") as put:
        result = _export(run, choice, put)
    (aside / "README.md").write_text(_CARD.format(run=run.path.name, told=result), encoding="utf-8")
    return result


def _export(run: RunDirectory, choice: Choice, put: Put) -> ExportResult:
    skipped: Counter[str] = Counter()
    row_count = episodes = 0
    files = [file for file in rollout_files(run.path) if file.stage in choice.stages]
    # In the order of the stages: readers of JSONL infer types from the first rows, and rows of a warm-up have
    # no reward.
    for file in sorted(files, key=lambda file: choice.stages.index(file.stage)):
        rollouts, credits = _read_file(file.path)
        for rollout in rollouts:
            why = why_not(choice, rollout)
            written = 0 if why else put(rollout, credits[rollout.rollout_id])
            if not written:
                skipped[why or "without a decision worth imitating"] += 1
                continue
            row_count, episodes = row_count + written, episodes + 1
    return ExportResult(row_count, episodes, skipped)


def _read_file(path: Path) -> tuple[list[Rollout], dict[str, list[dict[str, Any]]]]:
    """Return the rollouts of a file, and the credit columns of their decisions by rollout id."""
    try:
        rollouts = read_rollouts(path)
        ids = [rollout.rollout_id for rollout in rollouts]
        return rollouts, dict(zip(ids, read_credits(path), strict=True))
    except FileNotFoundError as error:
        # Not an OSError, which the caller would attribute to the output file.
        raise RunDirectoryError(
            f"{path} was removed while it was exported", hint="[retention] removes old ones; export again."
        ) from error


def _put_lines(file: TextIO, rollout: Rollout, credits: Sequence[Mapping[str, Any]]) -> int:
    rows = make_rows(rollout, credits)
    for row in rows:
        file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
    return len(rows)


def _put_document(folder: Path, rollout: Rollout, credits: Sequence[Mapping[str, Any]]) -> int:
    """Write the ATIF file of a rollout; return 1. Its name is the rollout id with `+` instead of `/`."""
    document = json.dumps(make_atif(rollout, credits), ensure_ascii=False, allow_nan=False)
    path = folder / f"{rollout.rollout_id.replace('/', '+')}.json"
    path.write_text(document + "\n", encoding="utf-8")
    return 1


@contextmanager
def _parquet(path: Path) -> Iterator[Put]:
    waiting: list[Row] = []
    with pq.ParquetWriter(path, _SCHEMA, compression="zstd") as writer:

        def write(at_least: int) -> None:
            if len(waiting) >= at_least:
                writer.write_table(pa.Table.from_pylist(waiting, schema=_SCHEMA))
                waiting.clear()

        def put(rollout: Rollout, credits: Sequence[Mapping[str, Any]]) -> int:
            rows = make_rows(rollout, credits)
            waiting.extend(map(_flat, rows))
            write(2_000)
            return len(rows)

        yield put
        write(1)


def _flat(row: Row) -> Row:
    columns = {field.name for field in _MESSAGE}
    messages = []
    for message in row["messages"]:
        extra = {key: value for key, value in message.items() if key not in columns}
        messages.append(message | ({"extra": json.dumps(extra)} if extra else {}))
    return {**row, "messages": messages, "tools": json.dumps(row["tools"])}


def _clear(aside: Path) -> None:
    """Remove the temporary output, which a killed export may have left."""
    if aside.is_dir():
        shutil.rmtree(aside)
    aside.unlink(missing_ok=True)
