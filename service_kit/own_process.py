"""The duties of our own child processes: import quickly, report when ready, end with the parent.

It calls this before its slow imports, so that it does not survive a parent that is killed meanwhile.
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
    """Tell the parent that this process serves at an address."""
    print(f"{READY}{url}", flush=True)


def begin_imports() -> None:
    """Stop the garbage collector, which looks through all imports so far: a sixth of their time."""
    gc.disable()


def end_imports() -> None:
    """Enable garbage collection, which from now on skips the imported modules."""
    gc.freeze()
    gc.enable()


def end_with_parent() -> None:
    """End this process without saving when its parent ends; all files are valid at any time."""
    when_parent_ends(lambda: os._exit(_ORPHANED))


def kill_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, even if this one is stopped.

    A parent of that id that has ended already ends this process here. Linux alone has that; elsewhere nothing
    happens, and `end_with_parent` ends a process that still runs.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(_ORPHANED)


def when_parent_ends(call: Callable[[], object]) -> None:
    """Call the function on a thread when standard input closes."""

    def watch() -> None:
        # Read the descriptor, because a thread inside sys.stdin holds its lock when the interpreter ends.
        while os.read(sys.stdin.fileno(), 65_536):
            pass
        call()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
