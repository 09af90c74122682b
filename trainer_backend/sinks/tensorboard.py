"""TensorBoard: a scalar a metric, by iteration, in event files under RUN/tensorboard."""

import time
from collections.abc import Mapping
from typing import Any

from trainer_backend.sinks.sink import Opening, Sink, scalars


def open_tensorboard(opening: Opening) -> Sink:
    """A new event file; earlier ones of the run are superseded, since all rows are written again."""
    return _TensorBoard(str(opening.folder / "tensorboard"))


class _TensorBoard:
    def __init__(self, folder: str) -> None:
        # The job asked for it, and the sentence about a missing package was said before.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(folder)
        # Readers drop what earlier files hold from this step on (event_accumulator.py, purge_orphaned_data).
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=0, session_log=start))

    def write(self, row: Mapping[str, Any]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars(row).items()]
        step, summary = row["iteration"], self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
