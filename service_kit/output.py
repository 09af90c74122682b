"""Copies the output of a child process to the service's log, up to a size limit.

A separate thread reads the output, so a child that prints endlessly neither blocks nor slows down the
service's event loop.
"""

import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial

import structlog

log = structlog.get_logger("service_kit")

# Most logged bytes per call of the child. Calls that begin within the same _PERIOD_S share one allowance.
MAX_LOG_BYTES = 65_536
_PERIOD_S = 1.0
_CHUNK_BYTES = 4_096
# When MAX_LOG_BYTES is used up, the thread reads larger chunks and pauses after each chunk, so that the event
# loop gets the interpreter's lock.
_LARGE_CHUNK_BYTES = 65_536
_PAUSE_S = 0.001
_TAIL_BYTES = 2_000


class Output:
    """A pipe that receives the output of a child process and copies it to the log.

        output = Output("environment", "mcp:files")
        with output.given() as descriptor:
            process = Popen(command, stderr=descriptor)

    In this example, the output is logged as events named `environment_printed`. If the child prints more than
    the limit, an event `environment_prints_left_out` gives the number of bytes that were not logged, and the
    end of the output, which often explains why a child ended. Both events contain `environment=mcp:files`.

    Args:
        kind: the kind of child; begins the names of the events.
        name: the name of the child.
        is_for_debugging: whether to log both events at level debug.
        secret: a text, such as an API key, that is replaced by `[key]` in the output.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        *,
        is_for_debugging: bool = False,
        secret: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kind, self._name = kind, name
        self._is_for_debugging, self._secret, self._clock = is_for_debugging, secret.encode(), clock
        self._rest = self._tail = b""
        self._logged_bytes = self._omitted_bytes = 0
        self._since_s = clock()
        self._lock = threading.Lock()
        # Run the thread in a copy of this context, so that its log lines contain the ids of the request or
        # rollout that starts the child.
        drain = partial(copy_context().run, self._drain)
        self._thread = threading.Thread(target=drain, name=f"output of {name}", daemon=True)
        ends: list[int] = []
        try:
            for _ in "ab":
                ends += os.pipe()
            self._pipe, self._far_end, self._end_pipe, self._end_signal = ends
            self._thread.start()
        except BaseException:  # for example because no further descriptor or thread is available
            for end in ends:
                os.close(end)
            raise

    @contextmanager
    def given(self) -> Iterator[int]:
        """Yield the descriptor to pass to the child as its stdout or stderr.

        Start the child inside the `with` block. If the block raises, the pipe is closed.
        """
        try:
            yield self._far_end
        except BaseException:
            os.close(self._far_end)
            self.end()
            raise
        os.close(self._far_end)

    def begin_call(self) -> None:
        """Allow MAX_LOG_BYTES of further output, because a new call of the child begins.

        Also log how many bytes were left out so far. If the allowance was last renewed less than _PERIOD_S
        ago, do nothing.
        """
        with self._lock:
            if self._clock() - self._since_s >= _PERIOD_S:
                self._begin_period()

    def last_text(self) -> str:
        """Return the end of the output so far, at most _TAIL_BYTES characters."""
        with self._lock:
            return _text(self._tail + self._rest)[-_TAIL_BYTES:]

    def end(self) -> None:
        """Log the output that has arrived, then stop reading and close the pipe.

        This does not wait until all writers have closed the pipe, because a descendant of the child may keep
        it open forever.
        """
        if self._end_signal < 0:
            return
        os.close(self._end_signal)
        self._end_signal = -1
        self._thread.join()
        os.close(self._pipe)
        os.close(self._end_pipe)

    def _drain(self) -> None:
        both = select.poll()
        both.register(self._pipe, select.POLLIN)
        both.register(self._end_pipe, select.POLLIN)
        # After `end` was called, read at most as much as a full pipe holds, because another process may
        # continue to write.
        rest = _LARGE_CHUNK_BYTES
        while rest > 0:
            ready = {descriptor for descriptor, _ in both.poll()}
            if self._pipe not in ready:
                break
            has_room = self._logged_bytes < MAX_LOG_BYTES
            chunk = os.read(self._pipe, _CHUNK_BYTES if has_room else _LARGE_CHUNK_BYTES)
            if not chunk:
                break
            if self._end_pipe in ready:
                rest -= len(chunk)
            self._add(chunk)
            if not has_room:
                time.sleep(_PAUSE_S)
        with self._lock:
            last, self._rest = self._rest, b""
            self._take(last)
            self._begin_period()

    def _add(self, chunk: bytes) -> None:
        """Log all complete lines of the output, and keep an incomplete last line until its rest arrives.

        If the incomplete line is long already, log its beginning now.
        """
        with self._lock:
            text = self._rest + chunk
            if self._secret:
                text = text.replace(self._secret, b"[key]")
            whole, newline, self._rest = text.rpartition(b"\n")
            if len(self._rest) > _CHUNK_BYTES:
                # Keep the last bytes, because they may be the beginning of the secret.
                most = len(self._rest) - len(self._secret)
                newline, self._rest = newline + self._rest[:most], self._rest[most:]
            self._take(whole + newline)

    def _take(self, piece: bytes) -> None:
        self._tail = (self._tail + piece)[-_TAIL_BYTES:]
        shown = piece[: max(0, MAX_LOG_BYTES - self._logged_bytes)]
        self._logged_bytes += len(shown)
        self._omitted_bytes += len(piece) - len(shown)
        if text := _text(shown):
            self._log(f"{self._kind}_printed", text=text)

    def _begin_period(self) -> None:
        if self._omitted_bytes:
            self._log(f"{self._kind}_prints_left_out", bytes=self._omitted_bytes, last=_text(self._tail))
        self._logged_bytes = self._omitted_bytes = 0
        self._since_s = self._clock()

    def _log(self, event: str, **facts: object) -> None:
        level = "debug" if self._is_for_debugging else "info" if "text" in facts else "warning"
        # If logging fails, the thread must continue, because a child whose output is not read would block.
        with suppress(OSError, ValueError):
            getattr(log, level)(event, **{self._kind: self._name}, **facts)


def _text(printed: bytes) -> str:
    return printed.decode("utf-8", "replace").strip()
