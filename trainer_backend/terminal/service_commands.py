"""Commands of services: `serve`, `task-app` and `trainer` run until they are stopped; `backup`, `restore`."""

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from service_kit.settings import make_signature, options_given, read_settings, typer_option
from shared_schemas.chat import StructuredOutput
from shared_schemas.urls import is_loopback
from trainer_backend.errors import JobError
from trainer_backend.jobs.settings import Settings, find_database
from trainer_backend.terminal.output import Overrides, TextConsole, tell, warn

_out = TextConsole()
_err = TextConsole(stderr=True)


def add_to(app: typer.Typer) -> None:
    app.command("serve")(serve_model)
    app.command(
        "task-app",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    )(task_app)
    app.command("trainer")(trainer)
    app.command("backup")(back_up_runs)
    app.command("restore")(restore_runs)


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
    tell(_out, f"turnwise serve {folder}")  # torch takes seconds
    from trainer_backend.collect.endpoints import key_from
    from trainer_backend.terminal.serve import serve, what_to_serve

    address = [f"services.gateway_host='{host}'", f"services.gateway_port={port}"]
    # A variable that is set and empty is a secret that failed, and no wish to have none.
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


def trainer(context: typer.Context, **_options: Any) -> None:
    """Serve jobs over HTTP, with the dashboard: each job in a process of its own; Ctrl-C ends it.

    TRAINER_API_KEY (or TRAINER_API_KEY_FILE) holds the key that callers must send. TASK_URL names the
    task apps for jobs that name none; without it each job starts its own.
    """
    from trainer_backend.jobs.server import serve_trainer

    serve_trainer(
        read_settings(Settings, os.environ, **options_given(context)), lambda line: tell(_out, line)
    )


Archive = Annotated[Path | None, typer.Argument(help="a file; absent: standard output or input")]
DataDirectory = Annotated[Path, typer_option(Settings, "data_dir")]
DatabaseUrl = Annotated[str | None, typer_option(Settings, "database_url")]


def back_up_runs(
    archive: Archive = None, data_dir: DataDirectory = Path("runs"), database_url: DatabaseUrl = None
) -> None:
    """Write the jobs and all run directories of a trainer service to a tar file, also while it runs."""
    from trainer_backend.jobs.backup import back_up

    with _opened(archive, writes=True) as file:
        jobs, runs = back_up(data_dir, database_url or find_database(data_dir), file)
    tell(_err, f"backed up {data_dir}; jobs: {jobs}, run directories: {runs}")


def restore_runs(
    archive: Archive = None, data_dir: DataDirectory = Path("runs"), database_url: DatabaseUrl = None
) -> None:
    """Put what `turnwise backup` wrote into an empty data directory, while the service is stopped."""
    from trainer_backend.jobs.backup import restore

    with _opened(archive, writes=False) as file:
        jobs, runs = restore(data_dir, database_url or find_database(data_dir), file)
    tell(_err, f"restored jobs: {jobs}, run directories: {runs}; `turnwise trainer` resumes what was running")


@contextmanager
def _opened(archive: Path | None, *, writes: bool) -> Iterator[IO[bytes]]:
    if archive is None:
        yield sys.stdout.buffer if writes else sys.stdin.buffer
        return
    try:
        file = archive.open("xb") if writes else archive.open("rb")
    except FileExistsError as error:
        raise JobError(f"{archive} is there already, and a backup replaces no file") from error
    except OSError as error:
        raise JobError(f"{archive} cannot be opened: {error.strerror}") from error
    with file:
        try:
            if writes:
                os.fchmod(file.fileno(), 0o600)  # its owner's alone, as run directories are
            yield file
        except BaseException:
            if writes:
                archive.unlink()  # a part of a backup is none
            raise


trainer.__signature__ = make_signature(Settings)  # type: ignore[attr-defined]
