"""Copies the output of a child process to the service's log, up to a limit.

A thread drains the pipe, so a child that prints endlessly neither blocks nor loads the service's event loop.
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

# Most logged bytes per call of the child; calls within the same _PERIOD_S count as one.
MAX_LOG_BYTES = 65_536
_PERIOD_S = 1.0
_CHUNK_BYTES = 4_096
# Beyond the limit the thread reads larger chunks and pauses after each, so that the event loop gets the
# interpreter's lock.
_LARGE_CHUNK_BYTES = 65_536
_PAUSE_S = 0.001
_TAIL_BYTES = 2_000


class Output:
    """The pipe for a child's output.

        output = Output("environment", "mcp:files")
        with output.given() as descriptor:
            process = Popen(command, stderr=descriptor)

    The log gets `environment_printed` with the text. It gets `environment_prints_left_out` with the number of
    bytes beyond the limit and the last text, which often explains why a child ended. Both events name the
    child: `environment=mcp:files`. Their level is debug if `is_for_debugging` is true.

    `[key]` replaces the `secret` in the text.
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
        # Copy the context: the log lines have the ids of the request or rollout that starts the child.
        drain = partial(copy_context().run, self._drain)
        self._thread = threading.Thread(target=drain, name=f"output of {name}", daemon=True)
        ends: list[int] = []
        try:
            for _ in "ab":
                ends += os.pipe()
            self._pipe, self._far_end, self._end_pipe, self._end_signal = ends
            self._thread.start()
        except BaseException:  # no more descriptors or threads
            for end in ends:
                os.close(end)
            raise

    @contextmanager
    def given(self) -> Iterator[int]:
        """Yield the descriptor for the child to inherit; end the output if the child does not start."""
        try:
            yield self._far_end
        except BaseException:
            os.close(self._far_end)
            self.end()
            raise
        os.close(self._far_end)

    def begin_call(self) -> None:
        """Reset the limit, at most once per _PERIOD_S, and log how many bytes have exceeded it."""
        with self._lock:
            if self._clock() - self._since_s >= _PERIOD_S:
                self._begin_period()

    def last_text(self) -> str:
        """Return the last output so far."""
        with self._lock:
            return _text(self._tail + self._rest)[-_TAIL_BYTES:]

    def end(self) -> None:
        """Log the output so far and stop reading, because another process may keep the pipe open for ever."""
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
        # After `end`, read only what one full pipe may hold, because another process may keep writing.
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
        """Log the complete lines, and the beginning of a line that is too long; keep the rest."""
        with self._lock:
            text = self._rest + chunk
            if self._secret:
                text = text.replace(self._secret, b"[key]")
            whole, newline, self._rest = text.rpartition(b"\n")
            if len(self._rest) > _CHUNK_BYTES:
                # Keep the end, which may be the beginning of a secret.
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
        # An error of the log must not end the thread, which would block the child.
        with suppress(OSError, ValueError):
            getattr(log, level)(event, **{self._kind: self._name}, **facts)


def _text(printed: bytes) -> str:
    return printed.decode("utf-8", "replace").strip()
