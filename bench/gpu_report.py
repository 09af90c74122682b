"""Figures of bench/gpu.py as they come: a line each, and a JSON file of all so far that no timeout loses."""

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import kit


class Task(NamedTuple):
    """Something to measure.

    least_s: it is not begun with less time than this left.
    """

    kind: str
    shape: str
    least_s: float
    run: Callable[[], None]


@dataclass
class Report:
    """Figures, and what could not be measured.

    Attributes:
        file: the JSON file; None for none.
        machine: what was measured on.
        end: of the time allowed, by `time.monotonic`.
    """

    file: Path | None
    machine: dict[str, Any]
    end: float
    figures: list[dict[str, Any]] = field(default_factory=list)
    missing: list[dict[str, str]] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic()

    @property
    def met(self) -> bool:
        """Whether no figure misses its bound. What was not measured says nothing."""
        return all(figure["met"] is not False for figure in self.figures)

    def add(
        self,
        kind: str,
        shape: str,
        line: str,
        *,
        met: bool | None = None,
        missed: str = "MISSED",
        **values: Any,
    ) -> None:
        """Print a figure, and write all figures.

        Args:
            met: whether it meets its bound; None if it has none.
        """
        said = "" if met is None else f" {kit.verdict(met, missed)}"
        print(f"  {shape:5s} {kind:10s} {line}{said}", flush=True)
        self.figures.append({"kind": kind, "shape": shape, "line": line, "met": met, **values})
        self._write()

    def miss(self, kind: str, shape: str, reason: str) -> None:
        print(f"  {shape:5s} {kind:10s} not measured: {reason}", flush=True)
        self.missing.append({"kind": kind, "shape": shape, "reason": reason})
        self._write()

    def measure(self, tasks: Sequence[Task]) -> None:
        """Run the tasks in order; one that fails, or has no time left, costs no other."""
        for task in tasks:
            if self.left_s < task.least_s:
                self.miss(task.kind, task.shape, f"{max(0, self.left_s):.0f} s are left")
                continue
            try:
                task.run()
            except Exception as error:
                self.miss(task.kind, task.shape, f"{type(error).__name__}: {error}"[:500])
            forget_memory()

    def _write(self) -> None:
        if self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        written = {"machine": self.machine, "figures": self.figures, "missing": self.missing}
        beside = self.file.with_suffix(".tmp")
        beside.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        beside.replace(self.file)


def forget_memory() -> None:
    """Free what the last task has left, and begin a new peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, with all that it has started on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
