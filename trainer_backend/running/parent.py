"""The process that started this one: without it there is nobody left to work for."""

import os
import sys
import threading
from collections.abc import Callable

_ORPHANED = 1


def end_with_parent() -> None:
    """End this process, without saving, when its parent ends: files are whole at any moment."""
    when_parent_ends(lambda: os._exit(_ORPHANED))


def when_parent_ends(call: Callable[[], None]) -> None:
    """Call that, on a thread, when standard input closes.

    Its other end is held by the parent alone, so it closes however that one ends.
    """

    def watch() -> None:
        # The descriptor itself: a thread inside sys.stdin would hold its lock when the interpreter ends.
        while os.read(sys.stdin.fileno(), 65_536):
            pass
        call()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
