"""`python -m task_app --host 127.0.0.1 --port 8001` or `turnwise task-app`: start a task app.

Port 0 takes a free port. When the task app is ready, it prints one line to stdout, which a trainer that
started it reads: `listening on http://host:port`. With --replicas the line is `task_url = [...]`, for a job's
[services]. Logs go to stderr. Exit codes: 0 stopped, 2 invalid setting, port or plug-in file.
"""

from service_kit.own_process import begin_imports

if __name__ == "__main__":
    begin_imports()

import os
import sys
from collections.abc import Sequence
from inspect import Parameter
from typing import Annotated, Any

import typer

from service_kit.console import begin_command
from service_kit.errors import PortTaken, SettingsError
from service_kit.release import version
from service_kit.settings import make_signature, options_given, read_settings
from shared_schemas.plain_text import visible
from task_app.settings import Settings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        print(f"turnwise {version()}")
        raise typer.Exit


_VERSION = Annotated[
    bool, typer.Option("--version", callback=_say_version, is_eager=True, help="print it, and end")
]


@app.command()
def task_app(context: typer.Context, asked_version: _VERSION = False, **_options: Any) -> None:
    """Serve environments over HTTP: a task app alone; Ctrl-C ends it.

    ENVIRONMENT_API_KEY (or ENVIRONMENT_API_KEY_FILE) holds the key that callers must send. Other settings
    are environment variables, TURNWISE_…: docs/operations.md.
    """
    settings = read_settings(Settings, os.environ, **options_given(context))
    from task_app.process import run  # its imports take most of a second

    raise typer.Exit(run(settings))


task_app.__signature__ = make_signature(  # type: ignore[attr-defined]
    Settings, Parameter("asked_version", Parameter.KEYWORD_ONLY, default=False, annotation=_VERSION)
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; report an invalid setting, port or plug-in file in one sentence, with exit code 2."""
    try:
        begin_command(sys.argv[1:] if arguments is None else arguments)
        app(arguments, prog_name="turnwise task-app")
    except (SettingsError, PortTaken) as error:
        typer.echo(f"{typer.style('error:', fg='red')} {visible(str(error))}", err=True)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
