"""Which processes run, for tests that end some."""

import time
from collections.abc import Callable

import psutil


def runs(pid: int) -> bool:
    """Whether the process runs; an orphan that has ended may wait as a zombie for its new parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def running(mark: str) -> list[psutil.Process]:
    """The processes whose command line has the mark in it."""
    found = psutil.process_iter(["cmdline", "status"])
    return [
        process
        for process in found
        if mark in " ".join(process.info["cmdline"] or ()) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def wait_until(holds: Callable[[], object], *, within_s: float = 20.0) -> None:
    until_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.02)
