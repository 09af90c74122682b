"""The `turnwise` command. Each command is a thin shell; torch is imported only by those that need it."""

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from service_kit.errors import ServiceError
from trainer_backend.job.load import dump_job
from trainer_backend.rundir.files import write_errors
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.new_job import load_new_job
from trainer_backend.terminal import jobs_commands, service_commands
from trainer_backend.terminal.telling import (
    JOB_HELP,
    JobPaths,
    Overrides,
    TextConsole,
    estimators,
    presets,
    run_directories,
    tell,
    warn,
)

app = typer.Typer(
    no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, help="Decision-level rewards."
)
new = typer.Typer(no_args_is_help=True, help="Make something of your own from a template that works.")
app.add_typer(new, name="new")
app.add_typer(jobs_commands.jobs, name="jobs")
service_commands.add_to(app)
_out = TextConsole()
_err = TextConsole(stderr=True)


@app.command()
def train(
    job: Annotated[list[Path] | None, typer.Argument(help=JOB_HELP + "; not with --resume")] = None,
    run: Annotated[Path | None, typer.Option(help="the run directory to make")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="a run to continue; --set changes its job.toml", autocompletion=run_directories),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="such as 0,1,2: a run for each value of job.seed; again: those that are left"),
    ] = None,
    report: Annotated[bool, typer.Option(help="write the report at the end")] = True,
    dashboard: Annotated[bool, typer.Option(help="show it on a page of this machine meanwhile")] = False,
    overrides: Overrides = None,
) -> None:
    """Train as the job says, then write the report; Ctrl-C saves the last finished iteration."""
    from trainer_backend.terminal.train_command import (
        dashboard_beside,
        run_of_each_seed,
        single_run,
        train_one,
    )

    given = (job, run, resume, overrides or ())
    with ExitStack() as shown:
        for planned in run_of_each_seed(*given, seeds=seeds) if seeds is not None else [single_run(*given)]:
            warn(_err, planned.loaded)
            if dashboard:
                shown.enter_context(dashboard_beside(planned.folder, lambda line: tell(_out, line)))
                dashboard = False  # one shows them all
            if not train_one(_out, planned, report=report):
                raise typer.Exit(130)


@app.command()
def check(job: JobPaths, overrides: Overrides = None) -> None:
    """Read a job and print it with every default filled in; starts and writes nothing.

    What task apps offer (environments, policies, their configs) is checked when `train` starts.
    """
    from trainer_backend.run.preflight import lines_before_a_run

    loaded = load_new_job(job, overrides or ())
    warn(_err, loaded)
    for line in lines_before_a_run(loaded.config):
        tell(_err, line)
    print(dump_job(loaded.config), end="")


@app.command("init")
def init_job(
    file: Annotated[Path, typer.Argument(help="the job TOML to write")] = Path("job.toml"),
    env: Annotated[str, typer.Option(help="the environment that it trains on")] = "crafter",
    preset: Annotated[
        str | None, typer.Option(help="a small model to begin with", autocompletion=presets)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="or a Hugging Face model: a local folder, or a name of the hub")
    ] = None,
) -> None:
    """Write a job with a comment for every key; it asks nothing and overwrites nothing."""
    from trainer_backend.terminal.templates import Choices, write_job

    warn(_err, write_job(file, Choices(env, preset, model)))
    tell(_out, f"{file} is written; train with: turnwise train {file}")


@new.command("env")
def new_environment(
    name: Annotated[str, typer.Argument(help="small letters, digits and _; also the folder's name")],
    parent: Annotated[Path, typer.Option("--in", help="the folder to make it in")] = Path(),
) -> None:
    """Make a folder with an environment that works, its contract test, and a job that trains on it."""
    from trainer_backend.terminal.templates import write_environment

    for file in write_environment(name, parent):
        tell(_out, str(file))
    tell(
        _out,
        f"next, in {parent / name}: pytest; turnwise train job.toml; turnwise task-app --plugins plugins.py",
    )


@app.command("report")
def write_run_report(
    run: Annotated[Path, typer.Argument(help="a run directory", autocompletion=run_directories)],
) -> None:
    """Write RUN/report/report.html, the page of the run as one file, from the files of the run."""
    from trainer_backend.pages.report import write_report

    print(write_report(open_run(run)))


@app.command()
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="two or more run directories; the first is the baseline",
            autocompletion=run_directories,
        ),
    ],
    out: Annotated[Path, typer.Option(help="the folder to write")] = Path("comparison"),
) -> None:
    """Lay runs over one another: a table here, curves and differing settings in OUT/comparison.html."""
    from trainer_backend.pages.compare import read_sides, write_comparison
    from trainer_backend.terminal.evaluation_tables import comparison_table

    sides = read_sides(runs)
    _out.print(comparison_table(sides))
    tell(_out, f"comparison: {write_comparison(sides, out).resolve()}")


@app.command()
def recredit(
    run: Annotated[Path, typer.Argument(help="a run directory", autocompletion=run_directories)],
    advantage: Annotated[
        list[str] | None,
        typer.Option(help="an estimator; may be repeated; absent: all", autocompletion=estimators),
    ] = None,
    iteration: Annotated[
        list[int] | None, typer.Option(help="a stored iteration; may be repeated; absent: all")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="a checkpoint: compare the gradients at it too")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="the folder to write; absent: RUN/recredit")] = None,
    overrides: Overrides = None,
) -> None:
    """Credit stored rollouts anew, by every estimator and any reward mode (--set), without new rollouts."""
    from trainer_backend.credit.recredit import recredit_run

    tables, folder = recredit_run(run, advantage or (), iteration or (), checkpoint, out, overrides or ())
    _out.print(tables)
    tell(_out, f"written: {folder}")


@app.command("inspect")
def inspect_rollout(
    rollout: Annotated[str, typer.Argument(help="its id, or the end of it, such as train/3/0/1")],
    run: Annotated[
        Path | None,
        typer.Option(help="the run that holds it; absent: those in runs/", autocompletion=run_directories),
    ] = None,
    full: Annotated[bool, typer.Option(help="show whole prompts, not only what is new in them")] = False,
    tokens: Annotated[bool, typer.Option(help="show token ids, and where segments hold them")] = False,
) -> None:
    """Show one stored episode, decision by decision: what it saw, did, earned, and its credit."""
    from trainer_backend.credit.inspect import episode_view, find_rollout

    folders = [run] if run else sorted(path.parent for path in Path("runs").glob("*/run.json"))
    found, credits = find_rollout([open_run(folder) for folder in folders], rollout)
    _out.print(episode_view(found, credits, full=full, tokens=tokens), soft_wrap=True)


@app.command("export")
def export_rollouts(
    run: Annotated[Path, typer.Argument(help="a run directory", autocompletion=run_directories)],
    to: Annotated[Path, typer.Option(help="x.jsonl, x.parquet, or a folder to make, which `datasets` loads")],
    min_reward: Annotated[float | None, typer.Option(help="least outcome reward of an episode")] = None,
    achievement: Annotated[
        list[str] | None, typer.Option(help="that the episode unlocked; may be repeated: all of them")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="that played it, such as actor")] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(help="train, warmup, branches, evaluation; may be repeated; absent: train and warmup"),
    ] = None,
) -> None:
    """Write stored episodes as rows of messages, for supervised training elsewhere."""
    from trainer_backend.terminal.export import DEFAULT_STAGES, Choice, export_run

    choice = Choice(tuple(stage or DEFAULT_STAGES), min_reward, tuple(achievement or ()), policy)
    tell(_out, f"{to}: {export_run(open_run(run), to, choice)}")


@app.command("eval")
def evaluate_policy(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="a run (its best checkpoint plays), or a model folder",
            autocompletion=run_directories,
        ),
    ] = None,
    job: Annotated[Path | None, typer.Option(help="a job TOML; absent: that of the run")] = None,
    policy: Annotated[
        str | None, typer.Option(help="a policy of the task app plays instead, such as crafter_teacher")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="a model of any OpenAI-compatible server plays instead")
    ] = None,
    inference_url: Annotated[str | None, typer.Option(help="the server that --model asks")] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            help="environment variable with its key; absent: OPENAI_API_KEY for api.openai.com, else none"
        ),
    ] = None,
    instances: Annotated[int | None, typer.Option(min=1, help="how many held-out worlds")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="of sampling: --set evaluation.temperature")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
    rollouts: Annotated[Path | None, typer.Option(help="keep the episodes in this Parquet file")] = None,
    overrides: Overrides = None,
) -> None:
    """Play the held-out worlds with a model or a scripted policy, and print the figures."""
    from trainer_backend.evaluation.play import chosen_player, evaluate, what_to_evaluate
    from trainer_backend.evaluation.result import as_json
    from trainer_backend.terminal.evaluation_tables import tables

    changed = list(overrides or ())
    changed += [f"evaluation.instances={instances}", "evaluation.seeds=[]"] if instances is not None else []
    changed += [f"evaluation.temperature={temperature}"] if temperature is not None else []
    chosen = chosen_player(policy, model, inference_url, api_key_env)
    loaded, player = what_to_evaluate(folder, job, chosen, changed)
    warn(_err, loaded)
    with _err.status("playing the held-out worlds") as status:

        def tell(done: int, total: int) -> None:
            status.update(f"playing the held-out worlds: {done}/{total}")

        result = asyncio.run(evaluate(loaded.config, player, tell, keep=rollouts))
    _out.print(tables(result))
    if json_file is not None:
        with write_errors(json_file):
            json_file.write_text(as_json(result), encoding="utf-8")


def main() -> None:
    """Run a command; an error of ours is one sentence and exit code 2 (the user's) or 1 (ours)."""
    try:
        app()
    except ServiceError as error:
        _err.print(Text.assemble(("error:", "red"), f" {error}"), soft_wrap=True)
        raise SystemExit(2 if error.status < 500 else 1) from error


if __name__ == "__main__":
    main()
