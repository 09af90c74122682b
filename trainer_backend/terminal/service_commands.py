"""The commands `serve` and `task-app`, and the commands of `trainer_commands`."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from shared_schemas.chat import StructuredOutput
from trainer_backend.terminal.output import TRAINER_COMMANDS, Overrides, TextConsole, tell, warn

_out = TextConsole()
_err = TextConsole(stderr=True)

# Another command line parses the arguments, even `--help`, because its settings need pydantic.
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def add_to(app: typer.Typer) -> None:
    app.command("serve")(serve_model)
    app.command("task-app", context_settings=_PASSED_ON)(task_app)
    for name, summary in TRAINER_COMMANDS.items():
        app.command(name, help=summary, context_settings=_PASSED_ON)(run_trainer_command)


def serve_model(
    folder: Annotated[
        Path, typer.Argument(help="a run (its best checkpoint), a checkpoint, or a model folder")
    ],
    job: Annotated[Path | None, typer.Option(help="a job TOML; absent: the run's, or every default")] = None,
    host: Annotated[str, typer.Option(help="address of this machine to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port")] = 8000,
    api_key_env: Annotated[
        str,
        typer.Option(
            help="environment variable with the key that callers must send; needed beyond this machine"
        ),
    ] = "TURNWISE_API_KEY",
    structured_output: Annotated[
        StructuredOutput,
        typer.Option(
            help="leave out a response_format, which is not enforced here, and say so in a header, or refuse"
        ),
    ] = StructuredOutput.DROP,
    overrides: Overrides = None,
) -> None:
    """Serve a model to any OpenAI client: chat completions with tools; Ctrl-C ends it."""
    tell(_out, f"turnwise serve {folder}")  # printed before torch is imported, which takes seconds
    import asyncio

    from shared_schemas.urls import is_loopback
    from trainer_backend.collect.endpoints import key_from
    from trainer_backend.terminal.serve import serve, what_to_serve

    address = [f"services.gateway_host='{host}'", f"services.gateway_port={port}"]
    # A variable that is set but empty is a failed secret, not a wish for no key.
    needs_key = api_key_env in os.environ or api_key_env != "TURNWISE_API_KEY" or not is_loopback(host)
    key = key_from(api_key_env, where="--api-key-env") if needs_key else None
    loaded, model = what_to_serve(folder, job, [*(overrides or ()), *address])
    warn(_err, loaded)
    serving = serve(
        loaded.config, model, key, lambda line: tell(_out, line), structured_output=structured_output
    )
    asyncio.run(serving)


def task_app(context: typer.Context) -> None:
    """Serve environments over HTTP: a task app alone; Ctrl-C ends it."""
    os.execv(sys.executable, [sys.executable, "-m", "task_app", *context.args])


def run_trainer_command(context: typer.Context) -> None:
    from trainer_backend.terminal.trainer_commands import commands

    commands([str(context.info_name), *context.args], prog_name="turnwise")
