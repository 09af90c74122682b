"""Runs the learner's ranks of this node: `python -m trainer_backend.learner.group [OPTIONS] [-- OPTIONS]`.

The first options are torchrun's; the others are options of `learner.process`. torchrun ends all ranks as soon
as one fails. The orchestrator, in another process, still holds the rollouts and then starts new ranks.
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
    """Run the ranks of this node until they end. If one fails, exit with its exit code or signal.

    `arguments` contains torchrun's options and, after "--", the options of each rank.
    """
    os.environ["TURNWISE_GROUP_PID"] = str(os.getpid())  # the ranks watch this process, and end when it ends
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    try:
        torchrun(["--max-restarts", "0", *arguments[:cut], "-m", _PROCESS, *arguments[cut + 1 :]])
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if first.exitcode < 0:  # end by the same signal as the rank, so that the parent process sees it
            signal.signal(-first.exitcode, signal.SIG_DFL)
            os.kill(os.getpid(), -first.exitcode)
        raise SystemExit(first.exitcode) from error


if __name__ == "__main__":
    main(sys.argv[1:])
