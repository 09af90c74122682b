"""Sends metrics to Weights & Biases, Trackio and TensorBoard, as the job's table [sinks] asks.

A sink's library is imported only when the sink is opened.
"""

import importlib.util
import io
import math
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from trainer_backend.core.keys import Table
from trainer_backend.errors import JobError
from trainer_backend.run.timeline import PREFIX


class WandbKeys(Table):
    project: str = Field(min_length=1)
    """project of the run"""
    entity: str | None = None
    """user or team; absent: the default of the W&B account"""
    name: str | None = None
    """name of the run; absent: its directory's name"""
    mode: Literal["online", "offline"] | None = None
    """whether rows are sent at once or stored locally; absent: the value of WANDB_MODE, or else online"""


class TrackioKeys(Table):
    project: str = Field(min_length=1)
    """project of the run"""
    name: str | None = None
    """name of the run; absent: its directory's name"""
    space_id: str | None = None
    """a Space of Hugging Face that stores the run; absent: the place that TRACKIO_SPACE_ID or
    TRACKIO_SERVER_URL names, or else the local folder that `trackio show` reads"""


class SinksTable(Table):
    """[sinks]: the services and files that receive a run's metrics."""

    tensorboard: bool = False
    """event files in RUN/tensorboard; needs `pip install 'turnwise[tensorboard]'`"""
    wandb: WandbKeys | None = None
    """`{ project = "…" }`, also `entity`, `name`, `mode` (online, offline); needs
    `pip install 'turnwise[wandb]'`"""
    trackio: TrackioKeys | None = None
    """`{ project = "…" }`, also `name`, `space_id`; needs `pip install 'turnwise[trackio]'`"""


class Sink(Protocol):
    """Receives the rows of metrics.jsonl, oldest first.

    If a method raises an error, the caller reports the error and sends no more rows to the sink.
    """

    def write(self, row: Mapping[str, Any]) -> None:
        """Accept one row. Does not wait until the row has been sent over a network."""

    def close(self) -> None:
        """Send the rows that are still buffered."""


@dataclass(frozen=True, slots=True)
class SinkRun:
    """The run whose rows a sink receives."""

    folder: Path
    run_id: str
    """Id of the run. It stays the same when the run is resumed."""
    job: Mapping[str, Any]
    """The whole job as plain values, without secrets."""


# (the sink's value in [sinks], the run) -> the opened sink.
OpenSink = Callable[[Any, SinkRun], Sink]


def refuse_missing_libraries(
    table: SinksTable, *, installed: Callable[[str], object] = importlib.util.find_spec
) -> None:
    """Raise JobError if the job names a sink whose library is not installed."""
    for name in type(table).model_fields:
        if getattr(table, name) and not installed(name):
            raise JobError(
                f"sinks.{name} needs the package {name}, which is not installed: "
                f"pip install 'turnwise[{name}]'"
            )


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a row of metrics.jsonl by tag, the name of the curve that a sink draws.

    The tag is the name of the metric. An entry of a table such as eval/success_rates has the tag NAME/KEY.
    In a row of an evaluation, all tags begin with `eval/`, so that rollout/finished of an evaluation is
    another curve than rollout/finished of an iteration. Tags of warm-up rows begin with `warmup/`, and so on.
    Lists, texts and times of day are left out.
    """
    kind = row["kind"]
    tags: dict[str, float] = {}
    for name, value in row.items():
        if name in ("kind", "iteration") or name.startswith(PREFIX):
            continue
        prefix = {"iteration": "", "evaluation": "eval/"}.get(kind, f"{kind}/")
        tag = name if name.startswith(prefix) else prefix + name
        if isinstance(value, Mapping):
            tags |= {f"{tag}/{key}": number for key, number in value.items() if _is_number(number)}
        elif _is_number(value):
            tags[tag] = value
    return {tag: float(value) for tag, value in tags.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class Wandb:
    """Sends rows to a W&B run. A resumed run continues its W&B run, and does not send earlier rows again."""

    def __init__(self, keys: WandbKeys, run: SinkRun) -> None:
        import wandb

        self._run = wandb.init(
            project=keys.project,
            entity=keys.entity,
            name=keys.name or run.folder.name,
            mode=keys.mode,
            id=run.run_id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.job),
            # Create a separate W&B run even if this process has another one. Print nothing, because output
            # would break the trainer's live table.
            settings=wandb.Settings(console="off", silent=True),
            reinit="create_new",
        )
        # W&B refuses rows whose step is below its current step.
        self._from = self._run.step

    def write(self, row: Mapping[str, Any]) -> None:
        if row["iteration"] >= self._from:
            self._run.log(scalars(row), step=row["iteration"])

    def close(self) -> None:
        self._run.finish()


# Trackio stores runs in a folder of the user (TRACKIO_DIR), which `trackio show` reads, or in a Space of
# Hugging Face, or at a server (TRACKIO_SERVER_URL). Several Trackio runs may have the same name, so the
# run id in the config identifies the Trackio run of a run directory.


class Trackio:
    """Sends rows to a new Trackio run; deletes the Trackio run of an earlier start from the local folder."""

    def __init__(self, keys: TrackioKeys, run: SinkRun) -> None:
        import trackio

        with suppress(ValueError):  # there is no such project yet
            for earlier in list(trackio.Api().runs(keys.project)):
                if (earlier.config or {}).get(_TRACKIO_RUN_ID) == run.run_id:
                    earlier.delete()
        with redirect_stdout(io.StringIO()):  # trackio prints, which would break the trainer's live table
            self._run = trackio.init(
                project=keys.project,
                name=keys.name or run.folder.name,
                group=run.folder.name,
                space_id=keys.space_id,
                config={**run.job, _TRACKIO_RUN_ID: run.run_id},
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def write(self, row: Mapping[str, Any]) -> None:
        self._run.log(scalars(row), step=row["iteration"])

    def close(self) -> None:
        with redirect_stdout(io.StringIO()):
            self._run.finish()


_TRACKIO_RUN_ID = "turnwise_run_id"


# TensorBoard gets a scalar for each metric, by iteration, in event files under RUN/tensorboard.


class TensorBoard:
    """Writes all rows to a new event file, and makes TensorBoard ignore the run's earlier event files."""

    def __init__(self, asked: Literal[True], run: SinkRun) -> None:
        # The job asked for it; a missing package was reported before.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(run.folder / "tensorboard"))
        # At this event, readers drop the data of earlier files from step 0 on (event_accumulator.py,
        # purge_orphaned_data).
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=0, session_log=start))

    def write(self, row: Mapping[str, Any]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars(row).items()]
        step, summary = row["iteration"], self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
