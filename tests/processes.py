"""Services as processes, and which processes run, for tests that end some."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from service_kit.own_process import READY

ROOT = Path(__file__).parents[1]


@contextmanager
def service(
    module: str, *words: str, environ: dict[str, str] | None = None, ready: str = READY, **options: Any
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """`python -m MODULE WORDS`, and what its ready line says; it ends with the test. Options are Popen's."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})}
    with subprocess.Popen(
        [sys.executable, "-m", module, *words], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, **options,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith(ready)), None)
            assert line is not None, "it has ended; its stderr says why"
            yield process, line.removeprefix(ready).strip()
        finally:
            process.kill()


def runs(pid: int) -> bool:
    """Whether the process runs; an orphan that has ended may wait as a zombie for its new parent."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
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


async def until(holds: Callable[[], object]) -> None:
    """Wait for what another process does; the test's own limit ends it."""
    while not holds():
        await asyncio.sleep(0.01)


def wait_until(holds: Callable[[], object], *, within_s: float = 20.0) -> Any:
    until_s = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < until_s
        time.sleep(0.02)
    return found
