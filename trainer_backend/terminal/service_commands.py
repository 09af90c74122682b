"""Commands that serve something until they are stopped: `serve`, `task-app`, `trainer`."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainer_backend.terminal import shell_completion as completion
from trainer_backend.terminal import trainer_options as options
from trainer_backend.terminal.options import Overrides
from trainer_backend.terminal.telling import TextConsole, tell, warn

_out = TextConsole()
_err = TextConsole(stderr=True)


def add_to(app: typer.Typer) -> None:
    """Give the command line what is here."""
    app.command("serve")(serve_model)
    app.command(
        "task-app",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    )(task_app)
    app.command("trainer")(trainer)


def serve_model(
    folder: Annotated[
        Path,
        typer.Argument(
            help="a run (its best checkpoint), a checkpoint, or a model folder",
            autocompletion=completion.run_directories,
        ),
    ],
    job: Annotated[
        Path | None, typer.Option(help="a job TOML; absent: that of the run, or every default")
    ] = None,
    host: Annotated[str, typer.Option(help="address of this machine to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8000,
    api_key_env: Annotated[
        str, typer.Option(help="environment variable with the key that callers must send")
    ] = "TURNWISE_API_KEY",
    overrides: Overrides = None,
) -> None:
    """Serve a model to any OpenAI client: chat completions with tools; Ctrl-C ends it."""
    from trainer_backend.services.endpoints import key_from
    from trainer_backend.services.serve import serve, what_to_serve

    address = [f"services.gateway_host='{host}'", f"services.gateway_port={port}"]
    key = key_from(api_key_env, where="--api-key-env")
    loaded, model = what_to_serve(folder, job, [*(overrides or ()), *address])
    warn(_err, loaded)
    asyncio.run(serve(loaded.config, model, key, lambda line: tell(_out, line)))


def task_app(context: typer.Context) -> None:
    """Serve a task app alone: `turnwise task-app --host 127.0.0.1 --port 8001`."""
    os.execv(sys.executable, [sys.executable, "-m", "task_app", *context.args])


def trainer(
    host: options.Host = "127.0.0.1",
    port: options.Port = 8100,
    data_dir: options.DataDir = Path("runs"),
    database_url: options.DatabaseUrl = None,
    max_jobs: options.MaxJobs = 1,
    jobs: options.RunsJobs = True,
    restarts: options.Restarts = 3,
    stop_grace_s: options.StopGrace = 100.0,
    allow_root: options.Roots = None,
    allow_task_url: options.TaskUrls = None,
    allow_inference_host: options.InferenceHosts = None,
    allow_key_variable: options.KeyVariables = None,
    allow_model: options.Models = None,
    gateway_host: options.GatewayHost = "127.0.0.1",
    exit_with_parent: options.ExitWithParent = False,
) -> None:
    """Serve jobs over HTTP, with the dashboard: each job in a process of its own; Ctrl-C ends it.

    TRAINER_API_KEY (or TRAINER_API_KEY_FILE) holds the key that callers must send. TASK_URL names the
    task apps of jobs that name none; without it each starts its own.
    """
    from trainer_backend.api.server import serve_trainer
    from trainer_backend.api.settings import Flags, settings_from

    flags = Flags(
        host=host,
        port=port,
        data_dir=data_dir,
        database_url=database_url,
        max_jobs=max_jobs if jobs else 0,
        restarts=restarts,
        stop_grace_s=stop_grace_s,
        roots=tuple(allow_root or ()),
        task_urls=tuple(allow_task_url or ()),
        inference_hosts=tuple(allow_inference_host or ()),
        key_variables=tuple(allow_key_variable or ()),
        models=tuple(allow_model or ()),
        gateway_host=gateway_host,
        exit_with_parent=exit_with_parent,
    )
    serve_trainer(settings_from(flags, os.environ), lambda line: tell(_out, line))
