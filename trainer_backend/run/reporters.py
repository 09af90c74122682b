"""Reporters that write run.log and state.json and pass metrics to sinks; their errors do not end a run."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

from service_kit.boundary import Boundary, describe_error
from service_kit.errors import ServiceError
from trainer_backend.errors import JobError, RunDirectoryError, TrainerError
from trainer_backend.parts import Reporter
from trainer_backend.plugins import SINKS
from trainer_backend.rundir.files import now
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.state import (
    FINAL,
    GONE,
    ProcessRecord,
    ProcessRole,
    RunState,
    StateName,
    append_log,
    read_state,
    write_state,
)
from trainer_backend.sinks import OpenSink, Sink, SinkRun, SinksTable

# Least seconds between two writes of a stage's progress or a process's message. A new stage, or a new state
# of a process, is written at once.
_EVERY_S = 1.0
_CRASHED = "crashed"


class RecordingReporter:
    """Writes run.log and state.json, and passes each report on to another reporter. Thread-safe."""

    def __init__(
        self, directory: RunDirectory, reporter: Reporter, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._reporter, self._clock = directory.path, reporter, clock
        self._lock = threading.Lock()
        self._failed: set[str] = set()
        self._written_s = clock()
        before = read_state(directory.path) or RunState("starting", 0, starts=0)
        # The previous start's run id, for which task apps may still play rollouts; empty without one. The
        # state keeps this id until `runs_as`: if this start fails early, the next start aborts the rollouts.
        self.left_behind = before.run_id
        starts = before.starts + 1
        self._state = RunState(
            "starting", os.getpid(), before.iteration, since=now(), starts=starts, run_id=before.run_id
        )
        self._write()

    @classmethod
    @contextmanager
    def opened(cls, directory: RunDirectory, reporter: Reporter) -> Iterator[Self]:
        """Yield a reporter. If an exception ends the context, record the final state, unless `end` did so."""
        recording = cls(directory, reporter)
        try:
            yield recording
        except ServiceError as error:
            recording.end("failed", code=error.code, detail=str(error))
            raise
        except Exception as error:
            recording.end("failed", code=_CRASHED, detail=describe_error(error))
            raise
        except BaseException as error:  # cancelled, or interrupted
            recording.end("stopped", detail=f"stopped by {type(error).__name__}")
            raise

    @property
    def resumes(self) -> int:
        return self._state.starts - 1

    def runs_as(self, run_id: str) -> None:
        """Record this start's run id. Call it only after the rollouts of `left_behind` have been aborted."""
        with self._lock:
            self._change(run_id=run_id)

    def starts_again(self) -> None:
        """Record that this process starts the run again, and keep the old run id in `left_behind`."""
        with self._lock:
            self.left_behind = self._state.run_id
            starts = self._state.starts + 1
            self._change(state="starting", stage="", done=0, total=0, starts=starts, processes=(), notes=())

    def goes_on_from(self, iteration: int) -> None:
        """Record the iteration of the checkpoint from which a resumed run continues."""
        with self._lock:
            self._change(iteration=iteration)

    def say(self, text: str) -> None:
        self._reporter.say(text)
        self.log(text)

    def note(self, text: str) -> None:
        self._reporter.note(text)
        self.log(text)
        with self._lock:
            self._change(notes=(*self._state.notes, text))

    def log(self, text: str) -> None:
        """Write a line to run.log without passing it on."""
        self._tolerantly("run.log", lambda: append_log(self._folder, text))

    def stage(self, name: str, done: int, total: int) -> None:
        self._reporter.stage(name, done, total)
        state: StateName = "evaluating" if name.startswith("evaluate") else "training"
        with self._lock:
            same = (state, name) == (self._state.state, self._state.stage)
            self._change(is_small=same, state=state, stage=name, done=done, total=total)

    def metrics(self, row: dict[str, Any], line: str) -> None:
        self._reporter.metrics(row, line)
        self.log(line)
        with self._lock:
            if row["iteration"] != self._state.iteration:
                self._change(iteration=row["iteration"])

    def process(
        self, name: str, *, role: ProcessRole, state: str, version: int | None = None, word: str = "",
        host: str = "",
    ) -> None:  # fmt: skip
        self._reporter.process(name, role=role, state=state, version=version, word=word, host=host)
        with self._lock:
            records = {(one.role, one.name): one for one in self._state.processes}
            before = records.get((role, name)) or ProcessRecord(role, name, "", "", None, "", "")
            since = before.since if state == before.state else now()
            records[role, name] = ProcessRecord(
                role, name, host or before.host, state, before.version if version is None else version, word,
                since,
            )  # fmt: skip
            if state == GONE:
                del records[role, name]
            self._change(is_small=state == before.state, processes=tuple(records.values()))

    def end(self, state: StateName, *, code: str = "", detail: str = "") -> None:
        """Record the run's final state, and the reason in run.log. Later calls change nothing.

        Args:
            detail: the reason; empty for a run that finished.
        """
        with self._lock:
            if self._state.state in FINAL:
                return
            self._change(state=state, stage="", done=0, total=0, code=code, detail=detail)
            if detail:  # run.log keeps it: the next start replaces state.json
                self.log(f"failed: {detail}" if state == "failed" else detail)

    def _change(self, *, is_small: bool = False, **values: Any) -> None:
        """Change the state and write it. Small changes are written at most every `_EVERY_S` seconds."""
        before = self._state
        self._state = replace(before, **values)
        if self._state.state != before.state:
            self._state = replace(self._state, since=now())
        if not is_small or self._clock() - self._written_s >= _EVERY_S:
            self._write()

    def _write(self) -> None:
        self._written_s = self._clock()
        self._tolerantly("state.json", lambda: write_state(self._folder, self._state))

    def _tolerantly(self, name: str, call: Callable[[], None]) -> None:
        # A lost log line must not end the run; on a full disk, writing checkpoints and metrics ends it.
        try:
            call()
        except RunDirectoryError as error:
            if name not in self._failed:
                self._failed.add(name)
                self._reporter.say(str(error))


class SinkReporter:
    """Passes metrics to the job's sinks, and each report on to another reporter. A context manager.

    With the first row, the sinks get all rows of metrics.jsonl, including those of earlier starts. Entering
    the context raises JobError if a sink cannot be opened.

    Args:
        job: the whole job as plain values, without secrets.
    """

    def __init__(
        self,
        sinks: SinksTable,
        directory: RunDirectory,
        reporter: Reporter,
        *,
        job: Mapping[str, Any],
        board: Mapping[str, OpenSink] = SINKS,
    ) -> None:
        self._table, self._run = sinks, SinkRun(directory.path, directory.run_id, job)
        self._directory, self._reporter, self._board = directory, reporter, board
        self.say, self.note = reporter.say, reporter.note
        self.stage, self.process = reporter.stage, reporter.process
        self._sinks: dict[str, Sink] = {}
        self._caught_up = False

    def __enter__(self) -> Self:
        for name, open_sink in self._board.items():
            if keys := getattr(self._table, name):
                try:
                    with Boundary(f"sinks.{name} cannot be opened: it", JobError):
                        self._sinks[name] = open_sink(keys, self._run)
                except JobError:
                    self._close()
                    raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def metrics(self, row: dict[str, Any], line: str) -> None:
        self._reporter.metrics(row, line)
        rows = [row] if self._caught_up or not self._sinks else self._directory.metrics()
        self._caught_up = True
        for name, sink in list(self._sinks.items()):
            self._tolerantly(name, partial(_write, sink, rows))

    def _close(self) -> None:
        for name, sink in list(self._sinks.items()):
            self._tolerantly(name, sink.close)
        self._sinks = {}

    def _tolerantly(self, name: str, call: Callable[[], object]) -> None:
        # A failure of a sink's library, network or disk must not end the run.
        try:
            with Boundary(f"sinks.{name}", TrainerError):
                call()
        except TrainerError as error:
            self._sinks.pop(name, None)
            self._reporter.say(f"{error}; it gets no further rows")


def _write(sink: Sink, rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        sink.write(row)
