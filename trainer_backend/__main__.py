"""The `turnwise` command line.

Each command imports its modules inside its function, so that help texts and small commands start fast.
`tests/house/test_imports.py` lists the slow modules that each command may import.
"""

import atexit
import gc
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from service_kit.console import begin_command
from service_kit.errors import ServiceError
from trainer_backend.core.presets import PRESETS
from trainer_backend.rundir.checkpoint_paths import find_run
from trainer_backend.rundir.files import write_errors
from trainer_backend.terminal import jobs_commands, service_commands
from trainer_backend.terminal.output import (
    JOB_HELP,
    JobPaths,
    LastingStreams,
    LiteralHelp,
    Overrides,
    TextConsole,
    tell,
    warn,
)

app = typer.Typer(cls=LiteralHelp, no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False)
new = typer.Typer(no_args_is_help=True, help="Create something of your own from a working template.")
app.add_typer(new, name="new")
app.add_typer(jobs_commands.jobs, name="jobs")
service_commands.add_to(app)
_out = TextConsole()
_err = TextConsole(stderr=True)


class DType(StrEnum):
    """The number formats in which `turnwise merge` can write a model's weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def _list_estimators() -> list[str]:
    from trainer_backend.plugins import ESTIMATORS

    return list(ESTIMATORS)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        from service_kit.release import version

        print(f"turnwise {version()}")
        raise typer.Exit


@app.callback()
def turnwise(
    asked_version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="print it, and end")
    ] = False,
) -> None:
    """Decision-level rewards."""


@app.command()
def train(
    job: Annotated[list[Path] | None, typer.Argument(help=JOB_HELP + "; not with --resume")] = None,
    run: Annotated[Path | None, typer.Option(help="the run directory to make")] = None,
    resume: Annotated[Path | None, typer.Option(help="a run to continue; --set changes its job.toml")] = None,
    accept_data: Annotated[
        bool,
        typer.Option("--accept-data", help="with --resume: continue although rows of [data] have changed"),
    ] = False,
    seeds: Annotated[
        str | None,
        typer.Option(help="such as 0,1,2: one run per seed; repeating the command skips finished ones"),
    ] = None,
    report: Annotated[bool, typer.Option(help="write the report at the end")] = True,
    dashboard: Annotated[bool, typer.Option(help="show it on a local page meanwhile")] = False,
    overrides: Overrides = None,
) -> None:
    """Train on a job, then write a report. Ctrl-C stops the run and saves its last finished iteration."""
    arguments = (job, run, resume, overrides or ())
    stay: Callable[[], None] | None = None
    with ExitStack() as stack:
        streams = stack.enter_context(LastingStreams.opened())
        # Print a line at once, because the imports and the first look at the job take a second or two.
        tell(_out, f"turnwise train {' '.join(map(str, job)) if job else resume}")
        from trainer_backend.terminal.train_command import (
            RunPlan,
            open_dashboard,
            run_of_each_seed,
            single_run,
            train_one,
        )

        if seeds is None:
            plans: Iterable[RunPlan] = [single_run(*arguments, accept_data=accept_data)]
        else:
            plans = run_of_each_seed(*arguments, seeds=seeds, accept_data=accept_data)
        for plan in plans:
            warn(_err, plan.loaded)
            if dashboard and stay is None:  # one dashboard shows all runs
                roots = {file.resolve().parent for file in plan.loaded.config.services.task_plugins}
                shown = open_dashboard(plan.folder, lambda line: tell(_out, line), roots=sorted(roots))
                stay = stack.enter_context(shown)
            if not train_one(_out, plan, streams, report=report):
                raise typer.Exit(130)
        if stay is not None and _out.is_terminal:  # serve the dashboard until the user ends it
            stay()


@app.command()
def check(
    job: JobPaths,
    trial: Annotated[
        bool, typer.Option(help="try environment and policies at a task app that is started for it")
    ] = True,
    every_key: Annotated[
        bool, typer.Option("--all", help="print the keys that have their defaults too")
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(help="a GPU's memory, such as 24GiB: plan for that card, and say what to change to fit"),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Check a job, and print as TOML the keys that differ from their defaults. No file is written.

    If the job starts its own task app, the check starts one briefly, and tries the environment, the policies
    and their configs there.
    """
    from trainer_backend.rundir.new_job import load_new_job
    from trainer_backend.terminal.check_command import (
        card_bytes,
        lines_before_a_run,
        own_choices,
        whole_job,
    )

    card = None if memory is None else card_bytes(memory)
    loaded = load_new_job(job, overrides or ())
    warn(_err, loaded)
    for line in lines_before_a_run(loaded.config, trial=trial, card=card):
        tell(_err, line)
    for toml, mark in whole_job(loaded.config) if every_key else own_choices(loaded.config):
        if _out.is_terminal:
            _out.print(Text.assemble(toml, (mark, "dim")), soft_wrap=True)
        else:
            print(toml + mark)
    if not every_key:
        tell(_err, "all other keys have their defaults; --all prints them too")


@app.command()
def info() -> None:
    """Print the names that rollout.env_name may have, and how environments of other libraries are named."""
    from trainer_backend.job.environments import describe_environments

    print("\n".join(describe_environments()))


@app.command("init")
def init_job(
    file: Annotated[Path, typer.Argument(help="the job TOML to write")] = Path("job.toml"),
    env: Annotated[str, typer.Option(help="the environment to train on")] = "crafter",
    preset: Annotated[
        str | None,
        typer.Option(help="a small model to begin with", autocompletion=lambda: list(PRESETS)),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="or a Hugging Face model: a local folder, or a name of the hub")
    ] = None,
) -> None:
    """Write a job TOML with a comment for every key. The command asks nothing and overwrites no file."""
    from trainer_backend.terminal.templates import Choices, write_job

    warn(_err, write_job(file, Choices(env, preset, model)))
    tell(_out, f"{file} is written; train with: turnwise train {file}")


@new.command("env")
def new_environment(
    name: Annotated[str, typer.Argument(help="lower-case letters, digits and _; also the package's name")],
    parent: Annotated[Path, typer.Option("--in", help="the parent folder")] = Path(),
) -> None:
    """Create a package: a working environment, a teacher, a test of both, and a job to train on it."""
    from trainer_backend.terminal.templates import write_environment

    for file in write_environment(name, parent):
        tell(_out, str(file))
    commands = "pip install -e '.[dev]' ; python -m pytest ; turnwise train job.toml"
    tell(_out, f"next, in {parent / name}: {commands}")


@app.command("report")
def write_run_report(run: Annotated[Path, typer.Argument(help="a run directory")]) -> None:
    """Write the run's dashboard page to one file, RUN/report/report.html."""
    from trainer_backend.pages.report import write_report
    from trainer_backend.rundir.layout import open_run

    print(write_report(open_run(run)))


@app.command()
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(help="two or more run directories; the first is the baseline"),
    ],
    out: Annotated[Path, typer.Option(help="the folder to write")] = Path("comparison"),
) -> None:
    """Compare runs: print a table, and write curves and differing settings to OUT/comparison.html."""
    from trainer_backend.pages.compare import read_sides, write_comparison
    from trainer_backend.terminal.evaluation_tables import comparison_table

    sides = read_sides(runs)
    _out.print(comparison_table(sides))
    tell(_out, f"comparison: {write_comparison(sides, out).resolve()}")


@app.command()
def recredit(
    run: Annotated[Path, typer.Argument(help="a run directory")],
    advantage: Annotated[
        list[str] | None,
        typer.Option(help="an estimator; may be repeated; absent: all", autocompletion=_list_estimators),
    ] = None,
    iteration: Annotated[
        list[int] | None, typer.Option(help="a stored iteration; may be repeated; absent: all")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="a checkpoint: compare the gradients at it too")
    ] = None,
    truth: Annotated[
        bool, typer.Option("--truth", help="score them against RUN/truth.jsonl, which `turnwise truth` wrote")
    ] = False,
    truth_file: Annotated[Path | None, typer.Option(help="the same with another file of it")] = None,
    out: Annotated[Path | None, typer.Option(help="the folder to write; absent: RUN/recredit")] = None,
    overrides: Overrides = None,
) -> None:
    """Compute the advantages of stored rollouts again, by each estimator; --set changes the reward mode."""
    from trainer_backend.credit.recredit import recredit_run
    from trainer_backend.rundir.truth_file import locate_truth
    from trainer_backend.terminal.progress import ConsoleReporter

    tables, folder = recredit_run(
        run, advantage or (), iteration or (), checkpoint, out, overrides or (),
        truth=truth_file or (locate_truth(run) if truth else None),
        reporter=ConsoleReporter(_out),
    )  # fmt: skip
    _out.print(tables, crop=False)  # a line that lists all estimators may be wider than the terminal
    tell(_out, f"written: {folder}")


@app.command("truth")
def measure_the_truth(
    run: Annotated[Path, typer.Argument(help="a run directory")],
    decisions: Annotated[int, typer.Option(min=1, help="stored decisions to measure")] = 200,
    continuations: Annotated[
        int, typer.Option(min=2, help="pairs of continuations for each: the noise falls with their root")
    ] = 16,
    horizon: Annotated[
        int | None, typer.Option(min=0, help="decisions of a continuation; 0: to the end; absent: by gamma")
    ] = None,
    budget: Annotated[int | None, typer.Option(min=1, help="stop once so many decisions were played")] = None,
    iteration: Annotated[
        int | None, typer.Option(min=1, help="whose rollouts; absent: the newest whose policy is stored")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="plays on instead of the policy that sampled the rollouts")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="of the choice of decisions, and of all draws")] = 0,
    out: Annotated[Path | None, typer.Option(help="the file to write; absent: RUN/truth.jsonl")] = None,
    overrides: Overrides = None,
) -> None:
    """Measure the true advantages of stored decisions, by playing on from before and after each decision.

    A repeated command continues where it stopped. Afterwards `turnwise recredit RUN --truth` scores
    estimators against the result.
    """
    import asyncio

    from trainer_backend.core.truth import measure_noise
    from trainer_backend.credit.truth_scores import noise_lines
    from trainer_backend.evaluation.truth import TruthOptions, measure_truth
    from trainer_backend.rundir.layout import open_run
    from trainer_backend.rundir.truth_file import locate_truth

    opened = open_run(run)
    loaded = opened.job_with(overrides or ())
    warn(_err, loaded)
    options = TruthOptions(
        decisions=decisions, continuations=continuations, horizon=horizon, budget=budget, iteration=iteration,
        checkpoint=checkpoint, out=out or locate_truth(run), seed=seed,
    )  # fmt: skip
    with _err.status("measuring", spinner="line") as status:

        def show(done: int, total: int) -> None:
            status.update(f"measuring: {done}/{total} decisions")

        measured = asyncio.run(measure_truth(opened, loaded.config, options, show))
    truths = list(measured.file.truths.values())
    if truths:
        _out.print(noise_lines(measured.file.setting, measure_noise(truths)))
    if measured.is_over_budget:
        tell(_out, f"the budget is spent after {len(truths)} of {decisions} decisions")
    if measured.left_out:
        tell(_out, f"{measured.left_out} rollouts are left out: their rows are gone or changed since")
    if measured.lost:
        tell(_out, f"{measured.lost} decisions could not be played; the same command tries them again")
    if truths:
        tell(_out, f"written: {options.out}")


@app.command("inspect")
def inspect_rollout(
    rollout: Annotated[str, typer.Argument(help="its id, or the end of its id, such as train/3/0/1")],
    run: Annotated[Path | None, typer.Option(help="the run that holds it; absent: those in runs/")] = None,
    full: Annotated[bool, typer.Option(help="show whole prompts, not only their new parts")] = False,
    tokens: Annotated[bool, typer.Option(help="show token ids, and their segments")] = False,
    advantage: Annotated[
        str | None,
        typer.Option(
            help="credit by this estimator, which `turnwise recredit` wrote; absent: what was trained",
            autocompletion=_list_estimators,
        ),
    ] = None,
) -> None:
    """Show one stored episode, decision by decision: observation, action, rewards and credit."""
    gc.disable()  # garbage collection takes a tenth of the imports' time
    from trainer_backend.credit.inspect import episode_view, find_rollout
    from trainer_backend.rundir.layout import open_run

    gc.enable()
    folders = [run] if run else sorted(path.parent for path in Path("runs").glob("*/run.json"))
    rollout_record, credits = find_rollout([open_run(folder) for folder in folders], rollout, advantage)
    _out.print(episode_view(rollout_record, credits, full=full, tokens=tokens), soft_wrap=True)


@app.command("export")
def export_rollouts(
    run: Annotated[Path, typer.Argument(help="a run directory")],
    to: Annotated[Path, typer.Option(help="x.jsonl, x.parquet, or a new folder, which `datasets` loads")],
    min_reward: Annotated[float | None, typer.Option(help="minimum outcome reward of an episode")] = None,
    achievement: Annotated[
        list[str] | None, typer.Option(help="required achievement; may be repeated: all of them")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="the policy that played, such as actor")] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(help="train, warmup, branches, evaluation; may be repeated; absent: train and warmup"),
    ] = None,
    form: Annotated[
        str, typer.Option(help="messages, for supervised training; or atif, a JSON file per episode")
    ] = "messages",
) -> None:
    """Write stored episodes as chat messages for supervised training elsewhere, or in the format ATIF."""
    from trainer_backend.rundir.layout import open_run
    from trainer_backend.terminal.export import DEFAULT_STAGES, Choice, export_run

    choice = Choice(tuple(stage or DEFAULT_STAGES), min_reward, tuple(achievement or ()), policy)
    tell(_out, f"{to}: {export_run(open_run(run), to, choice, form=form)}")


@app.command("import")
def import_episodes(
    files: Annotated[
        list[Path], typer.Argument(help="saved captures: the JSON of GET /captures/{capture_id}, each")
    ],
    run: Annotated[Path, typer.Option(help="the run directory to make")],
    job: Annotated[
        Path | None, typer.Option(help="whose rewards and [algorithm] credit them; absent: decision rewards")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Make a run from saved captures, without training, for inspect, recredit, export and dashboard."""
    from trainer_backend.job.load import load_job
    from trainer_backend.terminal.captures import import_captures, job_of_captures

    loaded = load_job(job, overrides or ()) if job else job_of_captures(run.name, overrides or ())
    warn(_err, loaded)
    tell(_out, f"{import_captures(files, loaded, run).path}: {len(files)} episodes")


@app.command("merge")
def merge_adapters(
    folder: Annotated[Path, typer.Argument(help="a run (its best checkpoint), or a checkpoint")],
    to: Annotated[Path, typer.Option(help="the model folder to write")],
    dtype: Annotated[DType, typer.Option(help="of the weights that are written")] = DType.float32,
) -> None:
    """Merge a checkpoint's adapters, and write a model folder that any Hugging Face program can load."""
    tell(_out, f"turnwise merge {folder}")  # print a line first: importing torch takes seconds
    from trainer_backend.learner.loading import write_merged

    tell(_out, f"{to}: the model of {write_merged(folder, to, dtype.value)}, {dtype.value}")


@app.command("eval")
def evaluate_policy(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="a run (its best checkpoint plays), or a model folder; or an environment's name, such as "
            "crafter, with --policy or --model",
        ),
    ] = None,
    job: Annotated[Path | None, typer.Option(help="a job TOML; absent: the run's")] = None,
    policy: Annotated[
        str | None, typer.Option(help="a policy of the task app plays instead, such as crafter_teacher")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="a model of any OpenAI-compatible server plays instead"),
    ] = None,
    inference_url: Annotated[str | None, typer.Option(help="the server of --model")] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            help="environment variable with its key; absent: OPENAI_API_KEY for api.openai.com, else none"
        ),
    ] = None,
    instances: Annotated[
        int | None, typer.Option("--instances", "-n", min=1, help="number of held-out worlds")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", "-r", min=1, help="plays of each world")] = 1,
    temperature: Annotated[
        float | None, typer.Option(help="sampling temperature: --set evaluation.temperature")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
    rollouts: Annotated[Path | None, typer.Option(help="keep the episodes in this Parquet file")] = None,
    overrides: Overrides = None,
) -> None:
    """Play the held-out worlds with a model or a scripted policy, and print the results."""
    import asyncio

    from trainer_backend.evaluation.play import evaluate, player_of_flags, what_to_evaluate
    from trainer_backend.evaluation.result import as_json
    from trainer_backend.terminal.evaluation_tables import tables
    from trainer_backend.terminal.templates import job_to_play

    settings = list(overrides or ())
    settings += [f"evaluation.instances={instances}", "evaluation.seeds=[]"] if instances is not None else []
    settings += [f"evaluation.temperature={temperature}"] if temperature is not None else []
    player_flags = player_of_flags(policy, model, inference_url, api_key_env)
    loaded, player = what_to_evaluate(folder, job, player_flags, settings, job_to_play)
    run = find_run(folder) if folder is not None and job is None else None
    warn(_err, loaded)
    with _err.status("playing the held-out worlds", spinner="line") as status:

        def tell(done: int, total: int) -> None:
            status.update(f"playing the held-out worlds: {done}/{total}")

        result = asyncio.run(evaluate(loaded.config, player, tell, run=run, keep=rollouts, repeats=repeats))
    _out.print(tables(result))
    if json_file is not None:
        with write_errors(json_file):
            json_file.write_text(as_json(result), encoding="utf-8")


def main() -> None:
    """Run the command line. Print an error of the project's own classes as one sentence, without traceback.

    After such an error, the exit code is 2 if the error's status is below 500 (a mistake of the user), and
    otherwise 1. If a package of the extra `trainer` is missing, the exit code is 2.
    """
    atexit.register(gc.freeze)  # else the garbage collector searches torch's objects at exit, for a second
    try:
        begin_command(sys.argv[1:])
        app()
    except ServiceError as error:
        _err.print(Text.assemble(("error:", "red"), f" {error}"), soft_wrap=True)
        raise SystemExit(2 if error.status < 500 else 1) from error
    except ModuleNotFoundError as error:
        from service_kit.release import modules_of_extra

        package = (error.name or "").partition(".")[0]
        if package not in modules_of_extra("trainer"):
            raise
        told = f" {package} is not installed; this command needs it: pip install 'turnwise[trainer]'"
        _err.print(Text.assemble(("error:", "red"), told), soft_wrap=True)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
