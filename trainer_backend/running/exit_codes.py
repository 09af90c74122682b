"""How the process of a job says how it ended (running/job_process.py says it, supervising/ hears it)."""

import errno

from service_kit.errors import ServiceError
from trainer_backend.errors import UpdateStopped

# Begins the last line of one that ended with an error.
ERROR = "error: "

DONE = 0
# An error of ours that another start may find mended: a task app that was away, a port that was taken.
FAILED = 1
# The job itself cannot be run so: another start would end the same.
REFUSED = 2
# Somebody asked it to stop; what is finished is saved.
STOPPED = 3

# What the machine is short of now, or its disk does now, whatever was about to be opened.
_PASSING = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EAGAIN,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)


def is_final(error: ServiceError) -> bool:
    """Whether the same start would fail the same way: the user's mistake, or weights that went wrong."""
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in _PASSING:
        return False
    return error.status < 500 or isinstance(error, UpdateStopped)
