"""The scripts of bench/, run as a person runs them, and values of theirs, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parents[2] / "bench"


def script(name: str, *arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    return python(str(BENCH / name), *map(str, arguments), **environ)


def value(module: str, expression: str) -> Any:
    """Of an expression in which the script's module is `s`, by way of JSON."""
    done = python("-c", f"import json, {module} as s\nprint(json.dumps({expression}))")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def python(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """From the root of the repository, to which paths in jobs are relative."""
    paths = os.pathsep.join((str(BENCH), str(BENCH.parent)))
    return subprocess.run(
        [sys.executable, *command], cwd=BENCH.parent, env={**os.environ, "PYTHONPATH": paths, **environ},
        capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip
