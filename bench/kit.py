"""Shared parts of the scripts: options, comparisons of trees in turns, verdicts, exit codes, results."""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from trainer_backend.rundir.files import replace_text

ROOT = Path(__file__).resolve().parent.parent


def options(
    doc: str | None, *flags: tuple[Any, ...], arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse a script's options; each of `flags` has a name, a default and a help text.

    The default False makes a switch, an empty list a flag that may be repeated, and a tuple a flag
    of several whole numbers. A type in place of the default makes a flag of this type without a default.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, default, *words in flags:
        text = " ".join(words)
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
        elif default == []:
            parser.add_argument(flag, action="append", default=default, help=text)
        elif isinstance(default, tuple):
            parser.add_argument(flag, type=int, nargs="+", default=default, help=text)
        elif isinstance(default, type):
            parser.add_argument(flag, type=default, help=text)
        else:
            text = f"{text} (default: {default})"
            parser.add_argument(flag, type=type(default), default=default, help=text)
    return parser.parse_args(arguments)


T = TypeVar("T")
ANSWER = "answer "  # the beginning of a worker's answer, among other lines of its output


class Side(NamedTuple):
    """One side of a comparison: a tree, and the arguments of its worker."""

    tree: Path
    arguments: Sequence[str] = ()


@contextmanager
def worker(script: str, side: Side) -> Iterator[Callable[[], dict[str, float]]]:
    """Yield a function that asks a script for figures; the script runs in a process with the code of a tree.

    For each call, the script gets a line of stdin and answers with `ANSWER` and a line of JSON. It imports
    the tree's `bench.kit`, which may be older than this one. Each tree sets how its threads wait.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    process = subprocess.Popen(
        [sys.executable, str(Path(script).resolve()), *side.arguments], cwd=side.tree,
        env={**inherited, "PYTHONPATH": str(side.tree)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None, "both are pipes"

    def once() -> dict[str, float]:
        print(file=stdin, flush=True)
        line = next(line for line in stdout if line.startswith(ANSWER))
        figures: dict[str, float] = json.loads(line.removeprefix(ANSWER))
        return figures

    try:
        yield once
    finally:
        stdin.close()
        process.wait()


def in_turns(sides: Mapping[str, Callable[[], T]], rounds: int, *, warm: bool = True) -> dict[str, list[T]]:
    """Run all sides in each round; return the results of each. `warm` adds an uncounted first round."""
    found = [{name: once() for name, once in sides.items()} for _ in range(rounds + warm)]
    return {name: [each[name] for each in found[warm:]] for name in sides}


def compare_sides(script: str, sides: Mapping[str, Side], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return the figures of each side's worker, round by round."""
    with ExitStack() as stack:
        calls = {name: stack.enter_context(worker(script, side)) for name, side in sides.items()}
        return in_turns(calls, rounds)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return `median (least to greatest)` as text."""
    middle = statistics.median(values)
    return f"{middle:z.{digits}f} ({min(values):z.{digits}f} to {max(values):z.{digits}f})"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Reporter:
    """The reporter of a run in a script; it is silent unless the script overrides a method."""

    def say(self, text: str) -> None: ...

    def note(self, text: str) -> None:
        self.say(text)

    def stage(self, name: str, done: int, total: int) -> None: ...

    def metrics(self, row: dict[str, Any], line: str) -> None: ...

    def process(self, name: str, **state: Any) -> None: ...


def verdict(met: bool, missed: str = "MISSED") -> str:
    return "ok" if met else missed


def report(figure: str, met: bool, missed: str = "MISSED") -> int:
    """Print the figure with its verdict; return the exit code."""
    print(f"{figure}: {verdict(met, missed)}")
    return int(not met)


def describe_machine(**more: Any) -> dict[str, Any]:
    """Return facts about the machine, for results."""
    return {"cpus": os.cpu_count(), "platform": platform.platform(), **more}


def write_results(path: Path, results: Any, *, allow_nan: bool = True) -> None:
    """Write JSON; if the process is killed before the end, the old file is unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(results, indent=1, allow_nan=allow_nan) + "\n")


def end_study(results: Mapping[str, Any], path: Path) -> int:
    """Write and print a study's results; return exit code 0 if all of `holds` is true, else 1."""
    write_results(path, results)
    print(json.dumps(results, indent=1))
    return 0 if all(results["holds"].values()) else 1


def peak_mib(*, reset: bool = False) -> float:
    """Return the peak of this process's main memory since the last reset; with `reset`, its memory now."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS" if reset else "VmHWM"))
    return int(line.split()[1]) / 1024
