"""`python -m trainer_backend.learner.group [torchrun's options] [-- options of learner.process]`.

Runs the ranks of a learner on this node under torchrun, which ends all of them as soon as one ends. The
orchestrator, which has the rollouts, then starts a new group.
"""

from service_kit.own_process import end_with_parent

if __name__ == "__main__":
    end_with_parent()

import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

_PROCESS = "trainer_backend.learner.process"


def main(arguments: Sequence[str]) -> None:
    """Run the ranks of this node until one of them ends."""
    os.environ["TURNWISE_GROUP_PID"] = str(os.getpid())  # the ranks end with this process
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    try:
        torchrun(["--max-restarts", "0", *arguments[:cut], "-m", _PROCESS, *arguments[cut + 1 :]])
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if first.exitcode < 0:  # the parent sees the signal that ended a rank
            signal.signal(-first.exitcode, signal.SIG_DFL)
            os.kill(os.getpid(), -first.exitcode)
        raise SystemExit(first.exitcode) from error


if __name__ == "__main__":
    main(sys.argv[1:])
