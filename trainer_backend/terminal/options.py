"""Arguments that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

from trainer_backend.terminal import shell_completion as completion

JOB_HELP = "a job TOML, such as configs/crafter_cpu.toml; of several, later ones go over earlier ones"
JobPaths = Annotated[list[Path], typer.Argument(help=JOB_HELP)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="table.key=value, the value in TOML; may be repeated",
        autocompletion=completion.settings,
    ),
]
