"""`python -m task_app --host 127.0.0.1 --port 8001` or `turnwise task-app`: start a task app.

With port 0, the operating system chooses a free port. When the task app is ready, it prints the line
`listening on http://host:port` to stdout; a trainer that started the task app reads the address from this
line. With --replicas it prints `task_url = [...]` instead, a line for the table [services] of a job. Logs go
to stderr. The exit code is 0 after a normal stop, and 2 if a setting, the port or a plug-in file is invalid.
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

    Callers must send the key in ENVIRONMENT_API_KEY, or in the file that ENVIRONMENT_API_KEY_FILE names.
    Other settings are environment variables whose names begin with TURNWISE_: see docs/operations.md.
    """
    settings = read_settings(Settings, os.environ, **options_given(context))
    from task_app.process import run  # its imports take most of a second

    raise typer.Exit(run(settings))


task_app.__signature__ = make_signature(  # type: ignore[attr-defined]
    Settings, Parameter("asked_version", Parameter.KEYWORD_ONLY, default=False, annotation=_VERSION)
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. If a setting, the port or a plug-in file is invalid, print why and exit with 2."""
    try:
        begin_command(sys.argv[1:] if arguments is None else arguments)
        app(arguments, prog_name="turnwise task-app")
    except (SettingsError, PortTaken) as error:
        typer.echo(f"{typer.style('error:', fg='red')} {visible(str(error))}", err=True)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
