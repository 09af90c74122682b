"""`python -m trainer_backend.terminal.job_process RUN_DIRECTORY`: train one job for a trainer service.

The process starts the run, or continues it from the newest checkpoint. Standard input is a pipe from the
service: when the pipe closes, the process ends at once. After SIGTERM it saves finished work and ends. It
reports by its exit code (rundir/state.py) and by the files of the run directory.
"""

import faulthandler
import gc
import os
import sys
import traceback

from service_kit.own_process import end_with_parent

if __name__ == "__main__":
    # Before the slow imports: this process must not survive a service that is killed during them.
    end_with_parent()

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from service_kit.boundary import describe_error
from service_kit.errors import ServiceError
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.state import DONE, ERROR, STOPPED, choose_exit_code
from trainer_backend.terminal.output import LastingStreams, TextConsole
from trainer_backend.terminal.train_command import RunPlan, train_one


def main(arguments: Sequence[str]) -> int:
    """Train the run in the directory `arguments[0]`, and return the exit code."""
    faulthandler.enable()  # reports a crash, such as a SIGSEGV in a library, in process.log
    # Wide, because table rows in logs must not be folded.
    console = TextConsole(width=200, force_terminal=False)
    try:
        directory = open_run(Path(arguments[0]))
        loaded = directory.job_with(())
        # `resume` even at the first start: without a checkpoint the run begins; a failed run keeps its log.
        plan = RunPlan(loaded, directory, resume=True)
        with LastingStreams.opened() as streams:
            finished = train_one(console, plan, streams, report=True)
    except ServiceError as error:
        _print_error(str(error))
        return choose_exit_code(error)
    except Exception as error:
        with suppress(OSError):
            traceback.print_exc()
        _print_error(describe_error(error))
        return choose_exit_code(error)
    return DONE if finished else STOPPED


def _print_error(text: str) -> None:
    try:
        print(f"{ERROR}{text}", file=sys.stderr, flush=True)
    except OSError:  # a full disk; if buffers could not be written at exit, the exit code would change
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    gc.freeze()  # otherwise a last garbage collection would search all of torch for a second
    raise SystemExit(code)
