"""The boundary around plug-ins: it converts any exception of their code into one error of the service.

Every call of an operator's code runs inside a `Boundary`: environments, policies, interactions, reward
functions, estimators, losses, schedules and sinks. No other broad `except` surrounds such code.
"""

import asyncio
import signal
import sysconfig
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import structlog

from service_kit.errors import ServiceError
from shared_schemas.plain_text import encodable

log = structlog.get_logger("service_kit")

_MOST_CHARS = 200
# Characters kept at each end of a logged traceback, because an exception's text may have any length.
_MOST_LOGGED = 4_000
_OURS = tuple(
    f"{Path(__file__).parents[1] / package}/"
    for package in ("service_kit", "shared_schemas", "task_app", "trainer_backend", "turnwise")
)
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib"))
# The file name of code without a file, such as the import system.
_NO_FILE = "<"
_SIGINT_RAISES = f"{Path(asyncio.__file__).parent}/runners.py"


class Boundary:
    """Converts an exception of a plug-in into an error of the service, so that only one piece of work ends.

    A ServiceError passes unchanged, and so does a CancelledError, GeneratorExit or KeyboardInterrupt that the
    plug-in did not raise itself. Any other exception becomes an `error`, including SystemExit, a
    CancelledError of the plug-in, and an exception whose text cannot be read. The log gets the traceback. The
    error names exception, file and line. Its `recurs` is False for OSError and MemoryError.

    `what` names the call in the error, as "environment.step". `call` is the plug-in's function. If the
    function's return value makes our code raise, the error names the place where the function is defined.
    """

    # A class, because it surrounds every step, and @contextmanager costs three times as much.
    __slots__ = ("_call", "_error", "_task", "_what")

    def __init__(
        self, what: str, error: type[ServiceError], call: Callable[..., object] | None = None
    ) -> None:
        self._what, self._error, self._call = what, error, call
        self._task = _current_task()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc is None or isinstance(exc, ServiceError) or self._was_requested(exc):
            return
        # A log on a full disk must not turn this error into another one.
        with suppress(Exception):
            # Pass text, because a logger would read the exception's own text, which may raise.
            log.error("boundary", what=self._what, exception=_format(exc))
        error = self._error(encodable(f"{self._what} raised {describe_error(exc, self._call)}"))
        error.recurs = not isinstance(exc, OSError | MemoryError)
        raise error from exc

    def _was_requested(self, exc: BaseException) -> bool:
        """Whether the caller, not the plug-in, ends the call."""
        if isinstance(exc, asyncio.CancelledError):
            return self._task is not None and self._task.cancelling() > 0
        if isinstance(exc, GeneratorExit):
            # A coroutine is closed from outside its task; a plug-in raises inside the task.
            return _current_task() is not self._task
        if (
            not isinstance(exc, KeyboardInterrupt)
            or threading.current_thread() is not threading.main_thread()
        ):
            return False  # only the main thread gets signals
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            return True
        frames = list(traceback.walk_tb(exc.__traceback__))
        return bool(frames) and frames[-1][0].f_code.co_filename == _SIGINT_RAISES


def describe_error(exc: BaseException, call: Callable[..., object] | None = None) -> str:
    """Describe an exception in a line: `KeyError: 'oops' (plug.py:14)`; see `Boundary` for `call`."""
    if isinstance(exc, RuntimeError) and isinstance(exc.__cause__, StopIteration | StopAsyncIteration):
        exc = exc.__cause__  # Python wraps a StopIteration of a coroutine; the cause has the plug-in's frames
    text = _first_line(exc)
    # A SyntaxError's own text has the place; its frames are those of the import system.
    place = "" if isinstance(exc, SyntaxError) else _place(exc, call)
    return f"{type(exc).__name__}{': ' * bool(text)}{text}{f' ({place})' if place else ''}"


def _format(exc: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(exc)).rstrip()
    except BaseException:  # an attribute of the exception raises, such as __notes__
        text = "".join([*traceback.format_tb(exc.__traceback__), describe_error(exc)])
    left_out = len(text) - 2 * _MOST_LOGGED
    if left_out <= 0:
        return text
    return f"{text[:_MOST_LOGGED]}\n... {left_out:,} characters are left out ...\n{text[-_MOST_LOGGED:]}"


def _first_line(exc: BaseException) -> str:
    try:
        return (str(exc).splitlines() or [""])[0][:_MOST_CHARS]
    except BaseException as error:
        return f"its text cannot be read, which raises {type(error).__name__}"


def describe_line(call: Callable[..., object] | None) -> str:
    """Return file and line of a function's definition, as `plug.py:14`; empty for a function of C."""
    code = getattr(call, "__code__", None)
    return "" if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def _place(exc: BaseException, call: Callable[..., object] | None) -> str:
    """Return the file and line where a plug-in raised: the innermost frame outside our code and libraries.

    If there is no such frame, take one in a library (an installed plug-in), or else in our code (a built-in).
    """
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(exc.__traceback__)]
    for known in ((*_OURS, *_LIBRARIES), _OURS, ()):
        for file, line in reversed(places):
            if not file.startswith((_NO_FILE, *known)):
                return f"{Path(file).name}:{line}"
        if call is not None and (own := describe_line(call)):
            return own
    return ""


def _current_task() -> "asyncio.Task[object] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None
