"""`python -m tests.killed_turnwise PART NUMBER ARGUMENTS`: `turnwise ARGUMENTS`, killed by SIGKILL just
before the NUMBER-th time (from 0) that it opens a file for writing whose path holds PART.
Python's own audit events tell of that, so no code under test knows of it.
"""

import os
import signal
import sys
from typing import Any


def kill_at(part: str, number: int) -> None:
    seen = 0

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event != "open" or part not in str(arguments[0]):
            return
        if not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    sys.addaudithook(heard)


if __name__ == "__main__":
    kill_at(sys.argv[1], int(sys.argv[2]))
    from trainer_backend.__main__ import app

    app(sys.argv[3:])
