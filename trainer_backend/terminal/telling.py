"""Lines on a terminal. Text, never a string: rich would read what stands in brackets as markup."""

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from trainer_backend.job import LoadedJob


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
