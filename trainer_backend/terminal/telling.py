"""Output and arguments that several commands share. Lines are Text: rich reads brackets as markup."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from shared_schemas.base import visible
from trainer_backend.core.presets import PRESETS
from trainer_backend.job.docs import alternatives, table_model
from trainer_backend.job.load import LoadedJob
from trainer_backend.job.schema import JobConfig
from trainer_backend.plugins import ESTIMATORS


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


def run_directories(incomplete: str) -> list[str]:
    """Runs whose path begins so, and folders that may hold some; with nothing typed, those in runs/ too."""
    typed = Path(incomplete)
    beside = typed if incomplete.endswith("/") else typed.parent
    folders = [path for where in {beside, Path("runs")} for path in _folders(where)]
    found = {str(path) for path in folders if str(path).startswith(incomplete) and _is_run(path)}
    found |= {f"{path}/" for path in folders if str(path).startswith(incomplete) and not _is_run(path)}
    return sorted(found)


def presets(incomplete: str) -> list[str]:
    """Names of presets."""
    return [name for name in PRESETS if name.startswith(incomplete)]


def estimators(incomplete: str) -> list[str]:
    """Names of estimators."""
    return [name for name in ESTIMATORS if name.startswith(incomplete)]


def settings(incomplete: str) -> list[str]:
    """`table.key=`, and the names that such a key takes, where it takes names."""
    key, equals, value = incomplete.partition("=")
    if not equals:
        return [f"{name}=" for name in _keys() if name.startswith(incomplete)]
    return [f"{key}={name}" for name in _names(key) if name.startswith(value)]


def _keys() -> Iterator[str]:
    for table, field in JobConfig.model_fields.items():
        yield from (f"{table}.{key}" for key in table_model(field).model_fields)


def _names(dotted: str) -> list[str]:
    table, _, key = dotted.partition(".")
    model = JobConfig.model_fields.get(table)
    field = table_model(model).model_fields.get(key) if model else None
    return [] if field is None else alternatives(dotted, field)


def _folders(where: Path) -> list[Path]:
    try:
        return [path for path in where.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError:
        return []


def _is_run(path: Path) -> bool:
    return (path / "run.json").exists()


JOB_HELP = "a job TOML, such as configs/crafter_cpu.toml; of several, later ones go over earlier ones"
JobPaths = Annotated[list[Path], typer.Argument(help=JOB_HELP)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="table.key=value, the value in TOML; may be repeated",
        autocompletion=settings,
    ),
]
