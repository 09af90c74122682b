"""Converts any exception that plug-in code raises into an error class of the service.

Plug-ins are code of the operator: environments, policies, interactions, reward functions, estimators, losses,
schedules and sinks. Every call of a plug-in runs inside a `Boundary`; no other code catches all exceptions of
a plug-in.
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
# A longer traceback is logged with this many characters of its start and of its end.
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
    """A context manager around a plug-in's call that converts the plug-in's exceptions into ServiceErrors.

    A ServiceError passes unchanged. A CancelledError, GeneratorExit or KeyboardInterrupt passes unchanged if
    it came from outside the plug-in. Any other exception is logged with its traceback and raised as an
    instance of the class `error`, whose message names the exception, the file and the line. This includes
    SystemExit, a CancelledError that the plug-in raised itself, and an exception whose `str()` fails. The
    attribute `recurs` of the new error is False for an OSError or a MemoryError, and True otherwise.

    Args:
        what: the name of the call in the error message, such as "environment.step".
        error: the class of the error to raise.
        call: the plug-in's function. If no line of the plug-in is in the traceback, because our code raised
            while it read the function's return value, the message names the line that defines the function.
    """

    # This is a class because every step enters it, and @contextmanager would take three times as long.
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
        # If logging fails, for example on a full disk, still raise the error below.
        with suppress(Exception):
            # Format the exception here: a logger would call str() on it, which may raise.
            log.error("boundary", what=self._what, exception=_format(exc))
        error = self._error(encodable(f"{self._what} raised {describe_error(exc, self._call)}"))
        error.recurs = not isinstance(exc, OSError | MemoryError)
        raise error from exc

    def _was_requested(self, exc: BaseException) -> bool:
        """Whether code outside the plug-in caused the exception in order to end the call."""
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
    """Return a one-line description such as `KeyError: 'oops' (plug.py:14)`; `call` is as in `Boundary`."""
    if isinstance(exc, RuntimeError) and isinstance(exc.__cause__, StopIteration | StopAsyncIteration):
        # Python replaces a StopIteration that leaves a coroutine; only the cause has the plug-in's frames.
        exc = exc.__cause__
    text = _first_line(exc)
    # The text of a SyntaxError names file and line itself; its traceback shows only the import system.
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
    """Return where a function is defined, such as `plug.py:14`; "" if the function is written in C."""
    code = getattr(call, "__code__", None)
    return "" if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def _place(exc: BaseException, call: Callable[..., object] | None) -> str:
    """Return the file and line at which a plug-in raised, such as `plug.py:14`; "" if unknown.

    This is the innermost frame that is neither in our code nor in an installed library. If there is no such
    frame, return the line that defines `call`. Without `call`, return the innermost frame in a library,
    because a plug-in may be an installed package. If there is none, return the innermost frame of all.
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
