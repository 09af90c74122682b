"""`turnwise export`: converts a run directory to a file or folder, written aside and then renamed."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from shared_schemas.messages import Message
from shared_schemas.rewards import DecisionRewards
from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import StepData, Trajectory, prompts
from trainer_backend.core.policies import player_of
from trainer_backend.core.statistics import step_deltas
from trainer_backend.errors import JobError, RunDirectoryError
from trainer_backend.learner.warmup import worth_imitating
from trainer_backend.rundir.files import write_errors
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.rundir.rollout_index import read_index, rollout_files

# Rows for supervised training. Every answer that is worth imitating is in exactly one row. Pure.
#
# A row is the model's view at one moment, with its answer: `messages` as in chat completions. Decisions whose
# prompts continue one another share a row, that of the last of them; where a prompt starts anew (each time in
# Crafter, after an edit in a conversation) a row begins. An assistant message has `weight` 1 if it is to be
# learned, as fine-tuning services read it, and 0 if another row has it or if it was refused.
#
# Source: names of the row, synth_task_app.md section 5.3b; `weight`, OpenAI's chat format for fine-tuning.

Row = dict[str, Any]


@dataclass(slots=True)
class _View:
    """The material of a row: a growing prompt, and which of its messages are answers."""

    prompt: tuple[Message, ...]
    steps: list[StepData]
    answers: dict[int, StepData] = field(default_factory=dict)


@dataclass(frozen=True)
class _About:
    """The facts that all rows of a rollout need; `credits` and `deltas` are by turn."""

    rollout: Rollout
    trajectory: Trajectory
    credits: Mapping[int, Mapping[str, Any]]
    deltas: Mapping[int, DecisionRewards]


def rows_of(rollout: Rollout, credits: Sequence[Mapping[str, Any]] = ()) -> list[Row]:
    """Return the rows of a rollout; a failed one, or one without good decisions, has none.

    Args:
        credits: the stored columns of each decision (`reward`, `advantage`); absent: None.
    """
    trajectory = rollout.trajectory
    if trajectory is None:
        return []
    about = _About(
        rollout,
        trajectory,
        {credit["turn"]: credit for credit in credits},
        {step.turn: step_deltas(step) for step in trajectory.steps},
    )
    return [row for view in _views(trajectory) if (row := _row(about, view)) is not None]


def _views(trajectory: Trajectory) -> Iterator[_View]:
    view: _View | None = None
    for step, prompt in zip(trajectory.steps, prompts(trajectory.steps), strict=True):
        if view is not None and _goes_on(view, step, prompt):
            view.answers[len(view.prompt)] = view.steps[-1]
            view.prompt = prompt
            view.steps.append(step)
            continue
        if view is not None:
            yield view
        view = _View(prompt, [step])
    if view is not None:
        yield view


def _goes_on(view: _View, step: StepData, prompt: Sequence[Message]) -> bool:
    """Return whether the prompt continues the previous one and its answer."""
    observation, length = step.observation_data, len(view.prompt)
    whole = observation.messages_reused >= length and not observation.changed
    return whole and len(prompt) > length and prompt[length].role == "assistant"


def _row(about: _About, view: _View) -> Row | None:
    learned = [step for step in view.steps if worth_imitating(step)]
    if not learned:
        return None
    messages = [
        _message(message, learn=index in view.answers and worth_imitating(view.answers[index]))
        for index, message in enumerate(view.prompt)
    ]
    messages.append(_message(_answer(view.steps[-1]), learn=worth_imitating(view.steps[-1])))
    end = max(index for index, message in enumerate(messages) if message.get("weight"))
    return {
        "messages": messages[: end + 1],  # later messages teach nothing
        "tools": [tool.model_dump(mode="json") for tool in about.trajectory.tools],
        "metadata": _metadata(about, [step.turn for step in learned]),
    }


def _answer(step: StepData) -> Message:
    # The raw output contains a call's text, which tool_calls holds already.
    content = step.action_taken.get("content", step.raw_policy_output) or ""
    return Message(role="assistant", content=content, tool_calls=step.tool_calls or None)


def _message(message: Message, *, learn: bool) -> Row:
    row = message.model_dump(mode="json", exclude_none=True)
    return row | {"weight": int(learn)} if message.role == "assistant" else row


def _metadata(about: _About, turns: Sequence[int]) -> Row:
    """Return metadata of the learned decisions: `turns`, their achievements, and their total reward."""
    rollout, trajectory = about.rollout, about.trajectory
    rewards = [about.credits.get(turn, {}).get("reward") for turn in turns]
    deltas = [about.deltas[turn] for turn in turns]
    so_far = (delta for turn, delta in about.deltas.items() if turn <= turns[-1])
    return {
        "session_id": rollout.rollout_id,
        "turn": turns[-1],
        "turns": turns,
        "model": trajectory.model or trajectory.policy_name,
        "provider": "turnwise",
        "env_name": trajectory.env_name,
        "iteration": rollout.iteration,
        "group_id": rollout.group_id,
        "seed": trajectory.seed,
        "outcome_reward": trajectory.outcome_reward,
        "reward": None if None in rewards else sum(rewards),
        "achievements": {
            "new_unique": sorted({name for delta in deltas for name in delta.unique}),
            "turned_true": sorted({name for delta in deltas for name in delta.all}),
            "cumulative_unique": sorted({name for delta in so_far for name in delta.unique}),
        },
    }


# Skipped episodes are counted by their cause.

# Stages for training. Learning from held-out worlds would make evaluation on them meaningless.
DEFAULT_STAGES = ("train", "warmup")
STAGES = (*DEFAULT_STAGES, "branches", "evaluation", "prompts")


@dataclass(frozen=True, slots=True)
class Choice:
    """A filter of episodes. Absent fields do not filter.

    Attributes:
        min_reward: minimum outcome_reward.
        achievements: the episode must have unlocked all of these.
        policy: last part of its model, or the policy's name.
    """

    stages: Sequence[str] = DEFAULT_STAGES
    min_reward: float | None = None
    achievements: Sequence[str] = ()
    policy: str | None = None

    def __post_init__(self) -> None:
        unknown = sorted(set(self.stages) - set(STAGES))
        if unknown:
            raise JobError(f"--stage is {unknown[0]!r}; known: {', '.join(STAGES)}")


def why_not(choice: Choice, rollout: Rollout) -> str | None:
    """Return the option that excludes an episode, or None."""
    trajectory = rollout.trajectory
    if trajectory is None:
        return f"not finished ({rollout.failure.code if rollout.failure else rollout.status})"
    player = player_of(trajectory.model, trajectory.policy_name)
    if choice.policy is not None and player != choice.policy:
        return f"--policy (by {player})"
    if choice.min_reward is not None and trajectory.outcome_reward < choice.min_reward:
        return "--min-reward"
    counts = trajectory.achievements_counts
    missing = next((name for name in choice.achievements if not counts.get(name)), None)
    return None if missing is None else f"--achievement {missing}"


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The result of an export.

    Attributes:
        skipped: excluded episodes by cause.
    """

    rows: int
    episodes: int
    skipped: Counter[str]

    def __str__(self) -> str:
        causes = ", ".join(f"{count} {cause}" for cause, count in self.skipped.most_common())
        return f"{self.rows} rows of {self.episodes} episodes" + (f"; left out: {causes}" if causes else "")


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
        ("extra", pa.string()),  # other keys of a message, as JSON
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


class _Sink(Protocol):
    def put(self, rows: list[Row]) -> None: ...


def export_run(run: RunDirectory, to: Path, choice: Choice) -> ExportResult:
    """Write the selected episodes of a run as rows of messages, in the memory of one iteration.

    Args:
        to: x.jsonl, x.parquet, or a new folder, which `datasets.load_dataset` reads.
    """
    if to.exists():
        raise RunDirectoryError(f"{to} exists; nothing is replaced: name another --to, or remove it")
    if to.suffix not in ("", ".jsonl", ".parquet"):
        raise RunDirectoryError(
            f"--to is {to}; known: a .jsonl file, a .parquet file, a folder without a dot"
        )
    aside = to.with_name(f".{to.name}.tmp")
    with write_errors(to, pa.ArrowException):
        _clear(aside)
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            result = _write(run, aside, to.suffix, choice)
            if not result.rows:
                raise RunDirectoryError(f"{run.path}: nothing to export: {result}")
            os.replace(aside, to)
        finally:
            _clear(aside)
    return result


def _write(run: RunDirectory, aside: Path, suffix: str, choice: Choice) -> ExportResult:
    if suffix == ".jsonl":
        with aside.open("w", encoding="utf-8") as file:
            return _export(run, choice, _Lines(file))
    if suffix == ".parquet":
        with _parquet(aside) as table:
            return _export(run, choice, table)
    (aside / "data").mkdir(parents=True)
    with _parquet(aside / "data/train-00000-of-00001.parquet") as table:
        result = _export(run, choice, table)
    (aside / "README.md").write_text(_CARD.format(run=run.path.name, told=result), encoding="utf-8")
    return result


def _export(run: RunDirectory, choice: Choice, sink: _Sink) -> ExportResult:
    skipped: Counter[str] = Counter()
    row_count = episodes = 0
    files = [file for file in rollout_files(run.path) if file.stage in choice.stages]
    # In the order of the stages: readers of JSONL infer types from the first rows, and those of a warm-
    # up have
    # no reward.
    for file in sorted(files, key=lambda file: choice.stages.index(file.stage)):
        rollouts, credits = _read_file(file.path)
        for rollout in rollouts:
            rows = [] if (why := why_not(choice, rollout)) else rows_of(rollout, credits[rollout.rollout_id])
            if not rows:
                skipped[why or "without a decision worth imitating"] += 1
                continue
            sink.put(rows)
            row_count, episodes = row_count + len(rows), episodes + 1
    return ExportResult(row_count, episodes, skipped)


def _read_file(path: Path) -> tuple[list[Rollout], dict[str, list[dict[str, Any]]]]:
    """Return the rollouts of a file, and the columns of their decisions by id."""
    try:
        return read_rollouts(path), {row["rollout_id"]: row["decisions"] for row in read_index(path)}
    except FileNotFoundError as error:
        # Not an OSError, which the caller would attribute to the output file.
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
    columns = {field.name for field in _MESSAGE}
    messages = []
    for message in row["messages"]:
        extra = {key: value for key, value in message.items() if key not in columns}
        messages.append(message | ({"extra": json.dumps(extra)} if extra else {}))
    return {**row, "messages": messages, "tools": json.dumps(row["tools"])}


def _clear(aside: Path) -> None:
    """Remove the remains of a killed export."""
    if aside.is_dir():
        shutil.rmtree(aside)
    aside.unlink(missing_ok=True)
