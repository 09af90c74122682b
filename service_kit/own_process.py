"""Functions for our own child processes: import quickly, report when ready, end with the parent.

A child calls them before its slow imports, so that it does not survive a parent that is killed during them.
"""

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable

# A service prints this with its address to stdout when it is ready.
READY = "listening on "
_ORPHANED = 1
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def announce(url: str) -> None:
    """Report to the parent that this process serves at the URL."""
    print(f"{READY}{url}", flush=True)


def begin_imports() -> None:
    """Disable the garbage collector, which takes a sixth of the time of all imports."""
    gc.disable()


def end_imports() -> None:
    """Enable the garbage collector again, and exempt all imported modules from it."""
    gc.freeze()
    gc.enable()


def end_with_parent() -> None:
    """End this process without saving when its parent ends; all files are valid at any time."""
    when_parent_ends(lambda: os._exit(_ORPHANED))


def kill_with_parent(parent: int) -> None:
    """Let the kernel kill this process, even a stopped one, when the thread that started it ends.

    If the parent has ended already, exit now. This works on Linux; on other systems, where nothing happens,
    `end_with_parent` still ends a process that is not stopped.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(_ORPHANED)


def when_parent_ends(call: Callable[[], object]) -> None:
    """Call the function, on another thread, when standard input closes."""

    def watch() -> None:
        # Read the descriptor: a thread that reads sys.stdin would hold its lock when the interpreter exits.
        while os.read(sys.stdin.fileno(), 65_536):
            pass
        call()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
