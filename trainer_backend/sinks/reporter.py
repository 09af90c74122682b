"""Hands every row of metrics on to the job's sinks. None of them can end a run."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from trainer_backend.errors import JobError
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.plugins import SINKS
from trainer_backend.protocols import Reporter
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.sinks.sink import Opening, OpenSink, Sink


class SinkReporter:
    """Use as a context manager; a `protocols.Reporter` around another one.

    The first row brings all that metrics.jsonl holds: what was written before anybody looked, and, in a
    resumed run, what an earlier start may have told its sinks and then done again.

    Raises (on entering):
        JobError: a sink cannot be opened; it was asked for, so nothing is trained without it.
    """

    def __init__(
        self,
        job: JobConfig,
        directory: RunDirectory,
        reporter: Reporter,
        *,
        board: Mapping[str, OpenSink] = SINKS,
    ) -> None:
        self._opening = Opening(
            job.sinks,
            directory.path,
            directory.run_id,
            job.model_dump(mode="json", exclude={"services": {"task_api_key"}}),
        )
        self._directory, self._reporter, self._board = directory, reporter, board
        self._sinks: dict[str, Sink] = {}
        self._caught_up = False

    def __enter__(self) -> Self:
        for name, open_sink in self._board.items():
            if getattr(self._opening.table, name):
                try:
                    self._sinks[name] = open_sink(self._opening)
                except Exception as error:
                    self._close()
                    raise JobError(f"sinks.{name} cannot be opened: {_told(error)}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def say(self, text: str) -> None:
        self._reporter.say(text)

    def stage(self, name: str, done: int, total: int) -> None:
        self._reporter.stage(name, done, total)

    def metrics(self, row: dict[str, Any]) -> None:
        self._reporter.metrics(row)
        rows = [row] if self._caught_up or not self._sinks else self._directory.metrics()
        self._caught_up = True
        for name, sink in list(self._sinks.items()):
            self._tolerantly(name, partial(_write, sink, rows))

    def _close(self) -> None:
        for name, sink in list(self._sinks.items()):
            self._tolerantly(name, sink.close)
        self._sinks = {}

    def _tolerantly(self, name: str, call: Callable[[], object]) -> None:
        # Somebody else's library, a network, a disk: whatever it is, the run is worth more.
        try:
            call()
        except Exception as error:
            self._sinks.pop(name, None)
            self._reporter.say(f"sinks.{name} failed and gets no further rows: {_told(error)}")


def _write(sink: Sink, rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        sink.write(row)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
