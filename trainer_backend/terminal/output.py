"""Output and arguments that several commands share. All text is shown literally, even `[data]`."""

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TextIO, cast

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.text import Text
from typer.core import TyperGroup

from shared_schemas.plain_text import visible

if TYPE_CHECKING:
    from trainer_backend.job.load import LoadedJob


class TextConsole(Console):
    """A console that shows all text literally: it has no markup, and control sequences appear as escapes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does, but escape control sequences in all text, even in tables and live displays."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


class LiteralHelp(TyperGroup):
    """A group of commands whose help is shown literally, because typer would read `[data]` as markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if getattr(typer.core, "HAS_RICH", True):  # with TYPER_USE_RICH=0 the escapes would be shown
            _escape_help(self)


def _escape_help(item: Any) -> None:
    """Escape the help of a command or option, and of its parameters and subcommands."""
    item.help = getattr(item, "help", None) and escape(item.help)
    for part in (*getattr(item, "params", ()), *getattr(item, "commands", {}).values()):
        _escape_help(part)


GONE = "the terminal is gone, or what read its lines: from here on they are in run.log alone"
# Errors of a full disk, which may have space again for later lines.
_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT})


class LastingStreams:
    """Keeps stdout and stderr usable when the terminal, or the reader of the pipe, is gone.

    Output is then dropped, so that a run does not end because its terminal was closed. Any thread may print.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []
        self._is_lost = False

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[Self]:
        """Replace `sys.stdout` and `sys.stderr` inside the context."""
        streams, before = cls(), (sys.stdout, sys.stderr)
        with open(os.devnull, "w", encoding="utf-8") as nothing:
            if None in before:  # closed before the start, for example by `>&-`
                streams.lose()
                # No file of the run may get the descriptor of a closed stream, which children inherit.
                for number in (1, 2):
                    try:
                        os.fstat(number)
                    except OSError:
                        os.dup2(nothing.fileno(), number)
            sys.stdout, sys.stderr = (
                cast(TextIO, _LastingStream(stream or nothing, nothing, streams.lose)) for stream in before
            )
            try:
                yield streams
            finally:
                sys.stdout, sys.stderr = before

    def when_lost(self, call: Callable[[], object]) -> None:
        """Call `call` once a stream is lost, or now if one is lost already. It replaces an earlier `call`."""
        self._calls[:] = [call]
        if self._is_lost:
            self.lose()

    def lose(self) -> None:
        self._is_lost = True
        with suppress(IndexError):  # another thread has taken the function
            self._calls.pop()()


class _LastingStream:
    """A stream whose writes and flushes never fail; other attributes are those of the wrapped stream."""

    def __init__(self, stream: TextIO, nothing: TextIO, lose: Callable[[], None]) -> None:
        self._stream, self._nothing, self._lose = stream, nothing, lose

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop(self, error: OSError) -> None:
        if error.errno in _PASSING:
            return
        # The rest of the buffer would fail again at the interpreter's end, with exit code 120.
        with suppress(OSError):
            os.dup2(self._nothing.fileno(), self._stream.fileno())
        self._lose()


def write(text: str) -> None:
    """Write text to stdout. Control characters are escaped only if stdout is a terminal."""
    print(visible(text) if sys.stdout.isatty() else text, end="")


def tell(console: Console, line: str) -> None:
    """Print one line of any length without wrapping it."""
    console.print(Text(line), soft_wrap=True)


def warn(console: Console, loaded: "LoadedJob") -> None:
    for warning in loaded.warnings:
        console.print(Text.assemble(("warning:", "yellow"), f" {warning}"), soft_wrap=True)


def format_line(line: Mapping[str, str]) -> str:
    """Format a log line from a trainer service; if it has a time, the time comes first."""
    return f"{line['time'][:19]}  {line['text']}" if line["time"] else line["text"]


JOB_HELP = "a job TOML, such as configs/crafter_demo.toml; of several, later ones override earlier ones"
JobPaths = Annotated[list[Path], typer.Argument(help=JOB_HELP)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="table.key=value, the value in TOML; {} removes a key or a table; may be repeated",
    ),
]
# Help of the commands in `trainer_commands`. It is here so that showing it does not import that module.
TRAINER_COMMANDS = {
    "trainer": "Serve jobs over HTTP, with the dashboard: each job in a process of its own; Ctrl-C ends it.",
    "backup": "Write a trainer service's jobs and all run directories to a tar file, also while it runs.",
    "restore": "Put what `turnwise backup` wrote into an empty data directory, while the service is stopped.",
}
