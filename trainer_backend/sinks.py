"""Sinks of metrics: [sinks], their interface, Weights & Biases, Trackio, TensorBoard.

Importing this loads no sink's library.
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
    """user or team; absent: the default one"""
    name: str | None = None
    """name of the run; absent: its directory's name"""
    mode: Literal["online", "offline"] | None = None
    """absent: WANDB_MODE, else online"""


class TrackioKeys(Table):
    project: str = Field(min_length=1)
    """project of the run"""
    name: str | None = None
    """name of the run; absent: its directory's name"""
    space_id: str | None = None
    """a Space of Hugging Face that keeps the run; absent: TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, else the
    folder that `trackio show` reads"""


class SinksTable(Table):
    """[sinks]"""

    tensorboard: bool = False
    """event files in RUN/tensorboard; needs `pip install 'turnwise[tensorboard]'`"""
    wandb: WandbKeys | None = None
    """`{ project = "…" }`, also `entity`, `name`, `mode` (online, offline); needs
    `pip install 'turnwise[wandb]'`"""
    trackio: TrackioKeys | None = None
    """`{ project = "…" }`, also `name`, `space_id`; needs `pip install 'turnwise[trackio]'`"""


class Sink(Protocol):
    """Takes rows of metrics.jsonl, oldest first.

    After an exception, which is reported, it gets no more rows.
    """

    def write(self, row: Mapping[str, Any]) -> None:
        """Take one row, without waiting."""

    def close(self) -> None:
        """Send the rows that are still buffered."""


@dataclass(frozen=True, slots=True)
class SinkRun:
    """The run whose rows a sink gets."""

    folder: Path
    run_id: str
    """The same for every start of the run."""
    job: Mapping[str, Any]
    """The whole job as plain values, without secrets."""


# Opens a sink with its value of [sinks].
OpenSink = Callable[[Any, SinkRun], Sink]


def refuse_missing_libraries(
    table: SinksTable, *, installed: Callable[[str], object] = importlib.util.find_spec
) -> None:
    """Raise JobError for a sink whose library is missing."""
    for name in type(table).model_fields:
        if getattr(table, name) and not installed(name):
            raise JobError(
                f"sinks.{name} needs the package {name}, which is not installed: "
                f"pip install 'turnwise[{name}]'"
            )


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row by tag, for sinks that draw curves.

    A table such as eval/success_rates gives one tag per entry. Rows of kinds other than `iteration` have
    their kind before the name, so that an evaluation's rollout/finished differs from the iteration's. Lists,
    texts, times of day, and numbers that are not finite are left out.
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
    """Starts a W&B run, or continues the one of this run directory without sending its rows again."""

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
            # A separate run, whatever else this process logs, and without output in our live table.
            settings=wandb.Settings(console="off", silent=True),
            reinit="create_new",
        )
        # W&B accepts no row of a step before its current one.
        self._from = self._run.step

    def write(self, row: Mapping[str, Any]) -> None:
        if row["iteration"] >= self._from:
            self._run.log(scalars(row), step=row["iteration"])

    def close(self) -> None:
        self._run.finish()


# Trackio keeps runs in a folder of the user (TRACKIO_DIR), where `trackio show` finds them, or in a Space of
# Hugging Face, or at a server (TRACKIO_SERVER_URL). Runs may share a name there; ours is known by its run id.


class Trackio:
    """Starts a Trackio run. In the local folder it replaces the Trackio run of an earlier start."""

    def __init__(self, keys: TrackioKeys, run: SinkRun) -> None:
        import trackio

        with suppress(ValueError):  # there is no such project yet
            for earlier in list(trackio.Api().runs(keys.project)):
                if (earlier.config or {}).get(_TRACKIO_RUN_ID) == run.run_id:
                    earlier.delete()
        with redirect_stdout(io.StringIO()):  # trackio prints, which would break our live table
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
    """Opens a new event file; it replaces earlier ones of the run, since all rows are written again."""

    def __init__(self, asked: Literal[True], run: SinkRun) -> None:
        # The job asked for it; a missing package was reported before.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(run.folder / "tensorboard"))
        # Readers drop earlier files' data from this step on (event_accumulator.py, purge_orphaned_data).
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=0, session_log=start))

    def write(self, row: Mapping[str, Any]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars(row).items()]
        step, summary = row["iteration"], self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
