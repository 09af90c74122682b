"""What `turnwise train` does with one run: train, tell how it went, write the report."""

import asyncio

from rich.console import Console

from service_kit.errors import ServiceError
from trainer_backend.report.story import read_story
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.lock import refuse_taken
from trainer_backend.running.beginning import Stopped
from trainer_backend.running.planned_runs import Planned
from trainer_backend.running.start import Ended, run_job
from trainer_backend.sinks.reporter import SinkReporter
from trainer_backend.terminal.progress import ConsoleReporter, closing_lines
from trainer_backend.terminal.telling import tell


def train_one(out: Console, planned: Planned, *, report: bool) -> bool:
    """Train to the end; False where somebody stopped it before.

    Raises:
        TrainerError: with a sentence for the user; a directory in which nothing was done is removed again.
    """
    directory = planned.directory
    ended = _trained(out, planned)
    if ended is None:
        return False
    tell_end(out, directory, report=report)
    if ended.stopped:
        tell(out, f"stopped early; continue with: turnwise train --resume {directory.path}")
    return not ended.stopped


def tell_end(out: Console, directory: RunDirectory, *, report: bool) -> None:
    """The figures of a run that has ended, and its report. What is wrong with these is told, and no more: the
    run has ended, and is saved."""
    try:
        for line in closing_lines(read_story(directory)):
            tell(out, line)
        if report:
            from trainer_backend.report.write import (
                write_report,  # its plots: a second that no start waits for
            )

            tell(out, f"report: {write_report(directory).resolve()}")
    except ServiceError as error:
        tell(out, f"the run has ended and is saved, but not all can be told of it: {error}")


def _trained(out: Console, planned: Planned) -> Ended | None:
    """None when it was stopped before there was anything to save."""
    config, directory, resume = planned.loaded.config, planned.directory, planned.resume
    with ConsoleReporter(out) as console:
        console.say(f"run directory: {directory.path}")
        try:
            refuse_taken(directory.path)  # `run_job` would, when sinks have told theirs that the run begins
            with SinkReporter(config, directory, console) as reporter:
                ended = asyncio.run(run_job(config, directory, reporter, resume=resume))
        except Stopped as stopped:
            console.say(str(stopped))
            return None
        except ServiceError as error:
            # A mistake of the user's is told in the message; for any other the task app's log may be needed.
            if not resume and directory.remove_if_unused(with_log=error.status < 500):
                console.say(f"{directory.path} is removed again: nothing was done in it")
            raise
        console.say(f"{ended.progress.iteration} iterations done; saved in {directory.checkpoints}")
    return ended
