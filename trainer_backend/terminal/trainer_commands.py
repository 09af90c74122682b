"""The commands `turnwise trainer`, `backup` and `restore`, which read a trainer service's settings."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from service_kit.settings import make_signature, options_given, read_settings, typer_option
from trainer_backend.errors import JobError
from trainer_backend.jobs.settings import Settings, find_database
from trainer_backend.terminal.output import TRAINER_COMMANDS, LiteralHelp, TextConsole, tell

commands = typer.Typer(cls=LiteralHelp, add_completion=False, pretty_exceptions_enable=False)
_out = TextConsole()
_err = TextConsole(stderr=True)
_OF_KEYS = """

TRAINER_API_KEY (or TRAINER_API_KEY_FILE) holds the key that callers must send. TASK_URL names the \
task apps for jobs that name none; without it each job starts its own.
"""


@commands.command(help=TRAINER_COMMANDS["trainer"] + _OF_KEYS)
def trainer(context: typer.Context, **_options: Any) -> None:
    from trainer_backend.jobs.server import serve_trainer

    serve_trainer(
        read_settings(Settings, os.environ, **options_given(context)), lambda line: tell(_out, line)
    )


Archive = Annotated[Path | None, typer.Argument(help="a file; absent: standard output or input")]
DataDirectory = Annotated[Path, typer_option(Settings, "data_dir")]
DatabaseUrl = Annotated[str | None, typer_option(Settings, "database_url")]


@commands.command("backup", help=TRAINER_COMMANDS["backup"])
def back_up_runs(
    archive: Archive = None, data_dir: DataDirectory = Path("runs"), database_url: DatabaseUrl = None
) -> None:
    from trainer_backend.jobs.backup import back_up

    with _opened(archive, writes=True) as file:
        jobs, runs = back_up(data_dir, database_url or find_database(data_dir), file)
    tell(_err, f"backed up {data_dir}; jobs: {jobs}, run directories: {runs}")


@commands.command("restore", help=TRAINER_COMMANDS["restore"])
def restore_runs(
    archive: Archive = None, data_dir: DataDirectory = Path("runs"), database_url: DatabaseUrl = None
) -> None:
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
                os.fchmod(file.fileno(), 0o600)  # readable only by its owner, like run directories
            yield file
        except BaseException:
            if writes:
                archive.unlink()  # not a whole backup
            raise


trainer.__signature__ = make_signature(Settings)  # type: ignore[attr-defined]
