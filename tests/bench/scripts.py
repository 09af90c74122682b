"""The scripts of bench/: run as a person runs them, in processes of their own, or imported for a function."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

BENCH = Path(__file__).resolve().parents[2] / "bench"


def script(name: str, *arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """From the root of the repository, to which paths in jobs are relative."""
    paths = os.pathsep.join((str(BENCH), str(BENCH.parent)))
    return subprocess.run(
        [sys.executable, str(BENCH / name), *map(str, arguments)], cwd=BENCH.parent,
        env={**os.environ, "PYTHONPATH": paths, **environ},
        capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip


def module(name: str) -> ModuleType:
    """A script as a module, for its pure functions: without the seconds that a process of its own takes."""
    if str(BENCH) not in sys.path:
        sys.path.append(str(BENCH))
    return importlib.import_module(name)
