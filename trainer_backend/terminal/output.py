"""Output and arguments that several commands share. Lines are Text, because rich reads brackets as markup."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from shared_schemas.base import visible
from trainer_backend.job.load import LoadedJob


class TextConsole(Console):
    """A console that shows stored text literally: control sequences appear as escapes."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does, but escape all text; tables and live displays pass here too."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def write(text: str) -> None:
    """Write text unchanged to a file or pipe, and escaped to a terminal."""
    print(visible(text) if sys.stdout.isatty() else text, end="")


def tell(console: Console, line: str) -> None:
    """Print one line, however long."""
    console.print(Text(line), soft_wrap=True)


def warn(console: Console, loaded: LoadedJob) -> None:
    """Print the warnings of a valid job."""
    for warning in loaded.warnings:
        console.print(Text.assemble(("warning:", "yellow"), f" {warning}"), soft_wrap=True)


def line_of(line: Mapping[str, str]) -> str:
    """Format a line of a log from a trainer service, with its time if it has one."""
    return f"{line['time'][:19]}  {line['text']}" if line["time"] else line["text"]


JOB_HELP = "a job TOML, such as configs/crafter_cpu.toml; of several, later ones override earlier ones"
JobPaths = Annotated[list[Path], typer.Argument(help=JOB_HELP)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="table.key=value, the value in TOML; may be repeated",
    ),
]
