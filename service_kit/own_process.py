"""Functions that the services' own child processes call while they start.

They speed up imports, report to the parent that the child is ready, and end the child when its parent ends.
A child calls `end_with_parent` or `kill_with_parent` before its slow imports, so that it also ends if its
parent is killed during these imports.
"""

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable

# When a child process is ready, it prints this text, followed by its URL, to stdout.
READY = "listening on "
_ORPHANED = 1
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def announce(url: str) -> None:
    """Report to the parent process, on stdout, that this process now accepts requests at `url`."""
    print(f"{READY}{url}", flush=True)


def begin_imports() -> None:
    """Disable the garbage collector during imports, because it takes a sixth of their time."""
    gc.disable()


def end_imports() -> None:
    """Enable the garbage collector again, but let it ignore all objects that exist now, such as modules."""
    gc.freeze()
    gc.enable()


def end_with_parent() -> None:
    """Start a thread that exits this process as soon as the parent process ends.

    The exit skips all cleanup, which is safe because the files of a service are valid at any time.
    """
    when_parent_ends(lambda: os._exit(_ORPHANED))


def kill_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends.

    This works even if the process is stopped by SIGSTOP. If the process `parent` has already ended, exit
    immediately. On systems other than Linux, this function has no effect; use `end_with_parent` as well,
    which works on any system unless the process is stopped.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(_ORPHANED)


def when_parent_ends(call: Callable[[], object]) -> None:
    """Call `call` in another thread when standard input closes, which happens when the parent ends."""

    def watch() -> None:
        # Read the descriptor, not sys.stdin: a thread inside sys.stdin.read holds a lock that the interpreter
        # needs when it exits.
        while os.read(sys.stdin.fileno(), 65_536):
            pass
        call()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
