"""`turnwise train` creates or continues runs, one per seed, with dashboard and report."""

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import PIPE, STDOUT, TimeoutExpired
from threading import Thread
from typing import NamedTuple

from rich.console import Console

from service_kit.errors import ServiceError
from service_kit.own_process import READY
from service_kit.process import Guarded
from trainer_backend.errors import JobError, RunDirectoryError
from trainer_backend.job.code_files import digests_in, with_files_of_now
from trainer_backend.job.load import LoadedJob, dump_job
from trainer_backend.pages.story import read_story
from trainer_backend.run.beginning import Stopped
from trainer_backend.run.reporters import SinkReporter
from trainer_backend.rundir.checkpoint_paths import latest_checkpoint
from trainer_backend.rundir.layout import RunDirectory, create_run, open_run
from trainer_backend.rundir.lock import refuse_if_locked
from trainer_backend.rundir.new_job import load_new_job
from trainer_backend.rundir.state import append_log
from trainer_backend.sinks import refuse_missing_libraries
from trainer_backend.start import Ended, run_job
from trainer_backend.terminal.output import GONE, LastingStreams, tell
from trainer_backend.terminal.progress import ConsoleReporter, closing_lines

Paths = Sequence[Path]


class RunPlan(NamedTuple):
    loaded: LoadedJob
    directory: RunDirectory
    resume: bool
    accept_data: bool = False
    """See `run_job`."""

    @property
    def folder(self) -> Path:
        """The folder of runs: the job's runs_dir if it contains this run, otherwise the parent of the run."""
        path, runs = self.directory.path.resolve(), self.loaded.config.job.runs_dir.resolve()
        return runs if path.is_relative_to(runs) else path.parent


def single_run(
    job: Paths | None,
    run: Path | None,
    resume: Path | None,
    overrides: Sequence[str],
    *,
    accept_data: bool = False,
) -> RunPlan:
    """Create a run of `job`, or open the existing run `resume` with a job that `overrides` may change.

    `start.run_job` stores the changed job in the run directory.
    """
    if bool(job) == (resume is not None):
        raise JobError("give either a job TOML, or --resume with a run directory")
    if accept_data and resume is None:
        raise JobError("--accept-data continues a run whose rows changed: it needs --resume RUN")
    if job:
        loaded = load_new_job(job, overrides)
        return RunPlan(loaded, create_run(loaded.config, run), resume=False)
    assert resume is not None, "one of the two is given"
    if run is not None:
        raise JobError(f"--run {run} makes a new run, but --resume {resume} continues one: leave --run out")
    directory = open_run(resume)
    loaded = directory.job_with(overrides)
    refuse_missing_libraries(loaded.config.sinks)
    has_trained = latest_checkpoint(directory.checkpoints) is not None
    if loaded.config.warmup != directory.job().warmup and has_trained:
        advice = (
            f"[warmup] has changed, but {directory.path} has finished its warm-up and does not repeat it. "
            "Start a new run to warm up with the changed table"
        )
        loaded = replace(loaded, warnings=(*loaded.warnings, advice))
    return RunPlan(loaded, directory, resume=True, accept_data=accept_data)


def run_of_each_seed(
    job: Paths | None,
    run: Path | None,
    resume: Path | None,
    overrides: Sequence[str],
    *,
    seeds: str,
    accept_data: bool = False,
) -> Iterator[RunPlan]:
    """Create or open the run of each seed in FOLDER/seed_N, one at a time, and yield the unfinished runs.

    FOLDER is `run` or, if that is None, runs_dir/NAME-seeds. Repeating the command therefore finds the same
    runs and continues them.
    """
    if not job or resume is not None:
        raise JobError("--seeds needs a job TOML and no --resume: the same command again goes on by itself")
    first: dict[str, Sequence[str]] = {}
    for seed in _parse_seeds(seeds):
        loaded = load_new_job(job, [*overrides, f"job.seed={seed}"])
        table, digests = loaded.config.job, digests_in(loaded.config)
        first = first or digests
        if changed := [key for key in digests if digests[key] != first[key]]:
            raise JobError(
                f"a file of {', '.join(changed)} has changed since the first seed: restore it, or repeat all"
            )
        path = (run or table.runs_dir / f"{table.name}-seeds") / f"seed_{seed}"
        if not (path / "run.json").exists():
            yield RunPlan(loaded, create_run(loaded.config, path), resume=False)
            continue
        directory = open_run(path)
        if dump_job(with_files_of_now(directory.job())) != dump_job(loaded.config):
            raise JobError(
                f"{path} holds a run of another job (compare its job.toml): choose another folder with "
                f"--run, or continue it with turnwise train --resume {path}"
            )
        if not directory.is_finished(loaded.config.training.iterations):
            yield RunPlan(loaded, directory, resume=True, accept_data=accept_data)


def _parse_seeds(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise JobError(f"--seeds {text!r}: expected whole numbers from 0, such as 0,1,2")
    seeds = [int(word) for word in words]
    if len(set(seeds)) < len(seeds):
        raise JobError(f"--seeds {text!r}: a seed comes twice")
    return seeds


_STOP_S = 10.0


@contextmanager
def open_dashboard(
    data_dir: Path,
    say: Callable[[str], None],
    *,
    roots: Iterable[Path] = (),
    command: Sequence[str] = (sys.executable, "-m", "trainer_backend"),
) -> Iterator[Callable[[], None]]:
    """Serve a dashboard of the runs in `data_dir` from a child process, on a free port.

    Training never waits for the dashboard. Another thread calls `say` with the dashboard's address, or with
    the reason why it did not start. To draw episodes, the dashboard may run plug-ins in the folders `roots`.
    The context yields a function that waits until Ctrl-C.
    """
    words = [word for root in roots for word in ("--allow-root", str(root))]
    words += ["--port", "0", "--data-dir", str(data_dir), "--exit-with-parent"]
    words = [*command, "trainer", "--no-jobs", *words]
    with Guarded(words, stdin=PIPE, stdout=PIPE, stderr=STDOUT) as child:
        listener = Thread(target=_listen, args=(child, say), daemon=True)
        listener.start()

        def stay() -> None:
            if child.poll() is None:
                with suppress(KeyboardInterrupt):
                    say("the dashboard stays until Ctrl-C")
                    child.wait()

        try:
            yield stay
        finally:
            if child.poll() is None:
                say(f"the dashboard ends with the run; again: turnwise trainer --data-dir {data_dir}")
            child.terminate()
            try:
                child.wait(_STOP_S)
            except TimeoutExpired:
                child.kill()
            listener.join(_STOP_S)


def _listen(child: Guarded, say: Callable[[str], None]) -> None:
    """Report the dashboard's address, then keep reading its output, since a full pipe would block it."""
    assert child.stdout is not None
    last, has_said = "", False
    for raw in child.stdout:
        last = raw.decode(errors="replace").strip() or last
        if last.startswith(READY) and not has_said:
            has_said = True
            say(f"dashboard: {last.removeprefix(READY)}")
    if not has_said and child.wait() > 0:
        say(f"the dashboard did not start: {last.removeprefix('error: ')}")


def train_one(out: Console, plan: RunPlan, streams: LastingStreams, *, report: bool) -> bool:
    """Train a run to its end. If it is finished, only print that. Return False if training stopped early."""
    directory, iterations = plan.directory, plan.loaded.config.training.iterations
    resume = f"turnwise train --resume {directory.path}"
    if plan.resume and directory.is_finished(iterations):
        # Nothing changes, except that a missing report is written.
        tell(
            out, f"{directory.path} is finished: all of {iterations} iterations are done, and nothing changes"
        )
        tell(out, f"train further with: {resume} --set training.iterations={2 * iterations or 1}")
        if report and not directory.report.exists():
            tell_end(partial(tell, out), directory, report=True)
        return True
    end = _train(out, plan, streams)
    if end is None:
        return False

    def say(line: str) -> None:
        tell(out, line)
        _log(directory, line)

    done = end.progress.iteration
    try:
        tell_end(say, directory, report=report)
    finally:  # even if Ctrl-C interrupts the report
        if end.stopped:
            say(f"stopped by {end.stopped} after iteration {done}; continue with: {resume}")
        else:
            say(f"ended: {done} of {iterations} iterations done")
    return not end.stopped


def tell_end(say: Callable[[str], None], directory: RunDirectory, *, report: bool) -> None:
    """Print the figures of a run that has ended, and write its report. Errors are printed, not raised."""
    try:
        for line in closing_lines(read_story(directory)):
            say(line)
        if report:
            say("writing the report")
            from trainer_backend.pages.report import write_report

            say(f"report: {write_report(directory).resolve()}")
    except ServiceError as error:
        say(f"the run has ended and is saved, but not all can be told of it: {error}")


def _log(directory: RunDirectory, line: str) -> None:
    with suppress(RunDirectoryError):  # a full disk: a lost line is not worth an error
        append_log(directory.path, line)


def _train(out: Console, plan: RunPlan, streams: LastingStreams) -> Ended | None:
    """Train; return None if the run was stopped before there was anything to save."""
    config, directory, resume = plan.loaded.config, plan.directory, plan.resume
    with ConsoleReporter(out, config.training.iterations) as console:
        try:
            # `run_job` also refuses a locked run, but only after the sinks have announced the run.
            refuse_if_locked(directory.path)
            streams.when_lost(partial(_log, directory, GONE))
            values = config.model_dump(mode="json", exclude={"services": {"task_api_key"}})
            with SinkReporter(config.sinks, directory, console, job=values) as reporter:
                end = asyncio.run(
                    run_job(config, directory, reporter, resume=resume, accept_data=plan.accept_data)
                )
        except Stopped as stop:
            console.say(str(stop))
            return None
        except ServiceError as error:
            # The message explains a user's mistake; for other errors the task app's log may be needed.
            if not resume and directory.remove_if_unused(with_log=error.status < 500):
                console.say(f"{directory.path} is removed again: nothing was done in it")
            raise
    return end
