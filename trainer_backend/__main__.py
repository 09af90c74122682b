"""The `turnwise` command. Each command is a thin shell; torch is imported only by those that need it."""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from trainer_backend.errors import JobError, TrainerError
from trainer_backend.job import LoadedJob, dump_job, load_job, load_new_job
from trainer_backend.rundir.boundary import writing
from trainer_backend.rundir.layout import RunDirectory, create_run, open_run

app = typer.Typer(
    no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, help="Decision-level rewards."
)
_out = Console()
_err = Console(stderr=True)

JobPath = Annotated[Path, typer.Argument(help="a job TOML, such as configs/crafter_cpu.toml")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="table.key=value, the value in TOML; may be repeated")
]


@app.command()
def train(
    job: Annotated[Path | None, typer.Argument(help="a job TOML; not with --resume")] = None,
    run: Annotated[Path | None, typer.Option(help="the run directory to make")] = None,
    resume: Annotated[Path | None, typer.Option(help="a run to continue; --set changes its job.toml")] = None,
    report: Annotated[bool, typer.Option(help="write the report at the end")] = True,
    overrides: Overrides = None,
) -> None:
    """Train as the job says, then write the report; Ctrl-C saves the last finished iteration."""
    from trainer_backend.progress import ConsoleReporter, closing_lines
    from trainer_backend.report.story import read_story
    from trainer_backend.report.write import write_report
    from trainer_backend.start import Stopped, run_job

    loaded, directory = _what_to_train(job, run, resume, overrides or ())
    _warn(loaded)
    with ConsoleReporter(_out) as reporter:
        reporter.say(f"run directory: {directory.path}")
        try:
            ended = asyncio.run(run_job(loaded.config, directory, reporter, resume=resume is not None))
        except Stopped as stopped:
            reporter.say(str(stopped))
            raise typer.Exit(130) from stopped
        except TrainerError as error:
            # A mistake of the user's is told in the message; for any other the task app's log may be needed.
            if resume is None and directory.remove_if_unused(with_log=error.status < 500):
                reporter.say(f"{directory.path} is removed again: nothing was done in it")
            raise
        reporter.say(f"{ended.progress.iteration} iterations done; saved in {directory.checkpoints}")
    for line in closing_lines(read_story(directory)):
        _tell(line)
    if report:
        _tell(f"report: {write_report(directory).resolve()}")
    if ended.stopped:
        _tell(f"stopped early; continue with: turnwise train --resume {directory.path}")
        raise typer.Exit(130)


def _what_to_train(
    job: Path | None, run: Path | None, resume: Path | None, overrides: Sequence[str]
) -> tuple[LoadedJob, RunDirectory]:
    """A new run of a job, or one that exists, with the overrides written down in either."""
    if (job is None) == (resume is None):
        raise JobError("give either a job TOML, or --resume with a run directory")
    if job is not None:
        loaded = load_new_job(job, overrides)
        return loaded, create_run(loaded.config, run)
    assert resume is not None, "one of the two is given"
    if run is not None:
        raise JobError(f"--run {run} makes a new run, but --resume {resume} continues one: leave --run out")
    directory = open_run(resume)
    loaded = load_job(directory.path / "job.toml", overrides)
    if overrides:
        # The next resume, the report and eval read this file: they must see what the run really did.
        directory.replace_job(loaded.config)
    return loaded, directory


@app.command()
def check(job: JobPath, overrides: Overrides = None) -> None:
    """Read a job and print it with every default filled in; starts and writes nothing.

    What task apps offer (environments, policies, their configs) is checked when `train` starts.
    """
    loaded = load_new_job(job, overrides or ())
    _warn(loaded)
    print(dump_job(loaded.config), end="")


@app.command("report")
def write_run_report(run: Annotated[Path, typer.Argument(help="a run directory")]) -> None:
    """Write RUN/report/report.html and its pictures from the files of the run."""
    from trainer_backend.report.write import write_report

    print(write_report(open_run(run)))


@app.command("eval")
def evaluate_policy(
    folder: Annotated[
        Path | None, typer.Argument(help="a run (its best checkpoint plays), or a model folder")
    ] = None,
    job: Annotated[Path | None, typer.Option(help="a job TOML; absent: that of the run")] = None,
    policy: Annotated[
        str | None, typer.Option(help="a policy of the task app plays instead, such as crafter_teacher")
    ] = None,
    instances: Annotated[int | None, typer.Option(min=1, help="how many held-out worlds")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="of sampling: --set evaluation.temperature")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
    overrides: Overrides = None,
) -> None:
    """Play the held-out worlds with a model or a scripted policy, and print the figures."""
    from trainer_backend.evaluate import Scripted, evaluate, what_to_evaluate
    from trainer_backend.evaluation_result import as_json, tables

    changed = list(overrides or ())
    changed += [f"evaluation.instances={instances}", "evaluation.seeds=[]"] if instances is not None else []
    changed += [f"evaluation.temperature={temperature}"] if temperature is not None else []
    loaded, player = what_to_evaluate(folder, job, Scripted(policy) if policy else None, changed)
    with _err.status("playing the held-out worlds") as status:

        def tell(done: int, total: int) -> None:
            status.update(f"playing the held-out worlds: {done}/{total}")

        result = asyncio.run(evaluate(loaded.config, player, tell))
    _out.print(tables(result))
    if json_file is not None:
        with writing(json_file):
            json_file.write_text(as_json(result), encoding="utf-8")


@app.command(
    "task-app",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def task_app(context: typer.Context) -> None:
    """Serve a task app alone: `turnwise task-app --host 127.0.0.1 --port 8001`."""
    os.execv(sys.executable, [sys.executable, "-m", "task_app", *context.args])


def main() -> None:
    """Run a command; an error of ours is one sentence and exit code 2 (the user's) or 1 (ours)."""
    try:
        app()
    except TrainerError as error:
        _err.print(Text.assemble(("error:", "red"), f" {error}"), soft_wrap=True)
        raise SystemExit(2 if error.status < 500 else 1) from error


# Text, never a string: rich would read what stands in brackets as markup, drop it, or raise on it.
def _tell(line: str) -> None:
    _out.print(Text(line), soft_wrap=True)


def _warn(loaded: LoadedJob) -> None:
    for warning in loaded.warnings:
        _err.print(Text.assemble(("warning:", "yellow"), f" {warning}"), soft_wrap=True)


if __name__ == "__main__":
    main()
