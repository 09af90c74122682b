"""Lines on a terminal. Text, never a string: rich would read what stands in brackets as markup."""

import sys
from collections.abc import Iterable, Mapping

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from shared_schemas.base import visible
from trainer_backend.job import LoadedJob


class TextConsole(Console):
    """A console on which stored text is text: what would command the terminal is shown as an escape."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What rich's own console renders; here everything passes that is printed, in tables and live too."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def write(text: str) -> None:
    """Text as it is, to a file or a pipe; to a terminal as above."""
    print(visible(text) if sys.stdout.isatty() else text, end="")


def tell(console: Console, line: str) -> None:
    """One line, however long."""
    console.print(Text(line), soft_wrap=True)


def warn(console: Console, loaded: LoadedJob) -> None:
    """What a valid job may still have got wrong."""
    for warning in loaded.warnings:
        console.print(Text.assemble(("warning:", "yellow"), f" {warning}"), soft_wrap=True)


def line_of(told: Mapping[str, str]) -> str:
    """A line of a log as a trainer service tells it, with its time where it has one."""
    return f"{told['time'][:19]}  {told['text']}" if told["time"] else told["text"]
