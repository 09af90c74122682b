"""`python -m trainer_backend.terminal.job_process RUN_DIRECTORY`: train one job, as its service wants it.

It begins, or goes on from the newest checkpoint. Its only ties to the service are its standard input, a pipe:
when that closes, the service is gone however it ended, and so is this process, at once; SIGTERM, on which it
saves what is finished; and its exit code (rundir/state.py). What it has to tell stands in the run directory.
"""

import sys

from service_kit.children import end_with_parent

if __name__ == "__main__":
    # Before the imports, which take seconds: a service that is killed meanwhile leaves nobody behind.
    end_with_parent()

from collections.abc import Sequence
from pathlib import Path

from service_kit.errors import ServiceError
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.state import DONE, ERROR, FAILED, REFUSED, STOPPED, is_final
from trainer_backend.terminal.telling import TextConsole
from trainer_backend.terminal.train_command import Planned, train_one


def main(arguments: Sequence[str]) -> int:
    """Train; how it ended, as an exit code."""
    # Wide: these lines are read in a log, and a table of one row a line is broken nowhere.
    console = TextConsole(width=200, force_terminal=False)
    try:
        directory = open_run(Path(arguments[0]))
        loaded = directory.job_with(())
        # Also at the first start: without a checkpoint that begins, and keeps what tells of a failure.
        finished = train_one(console, Planned(loaded, directory, resume=True), report=True)
    except ServiceError as error:
        print(f"{ERROR}{error}", file=sys.stderr, flush=True)
        return REFUSED if is_final(error) else FAILED
    return DONE if finished else STOPPED


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
