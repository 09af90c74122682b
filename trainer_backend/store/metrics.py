"""Keeps the rows and curves of metrics.jsonl files in memory; each access reads only new lines."""

import hashlib
import math
import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from trainer_backend.collect.losses import FAILED, FINISHED
from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.files import parse_object
from trainer_backend.store.rows import Curve, MetricLine

METRICS_FILE = "metrics.jsonl"
Row = Mapping[str, Any]
Key = TypeVar("Key")
# Number of bytes before a mark that are digested. An equal digest shows that the file has only grown.
_TAIL = 256
# Limit for all files in memory. A row of a hundred numbers takes about 3 kB, and its points another 3 kB.
_MOST_BYTES = 128 << 20


def list_numbers(row: Row) -> Iterator[tuple[str, float]]:
    """Yield the name and the value of each finite number in a row; a number in a dict is named `name/key`.

    Lists, strings, `kind` and `iteration` are skipped.
    """
    for name, value in row.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{key}", number) for key, number in list_numbers(value))
        elif isinstance(value, int | float) and name not in ("kind", "iteration") and math.isfinite(value):
            yield name, float(value)


@dataclass(frozen=True, slots=True)
class Mark:
    """How far the store has read metrics.jsonl (bytes and rows), and how its rows are numbered.

    Row i of the file, counted from 0, has the row number `base + i + 1`. If the file is rewritten, `base`
    increases by the number of old rows, so that the new rows have higher numbers than all old ones.
    """

    size: int = 0
    digest: str | None = None
    base: int = 0
    rows: int = 0


@dataclass(slots=True)
class Points:
    """The points of a curve by ascending iteration."""

    iterations: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))


@dataclass(slots=True)
class _Kind:
    """The rows of one kind, such as `iteration` or `evaluation`, and the curves of their numbers.

    `places` maps an iteration to the index of its row in the file.
    """

    places: dict[int, int] = field(default_factory=dict)
    last: int | None = None  # the last iteration
    curves: dict[str, Points] = field(default_factory=dict)

    def add(self, iteration: int, row: Row) -> bool:
        """Append a row's numbers to the curves and return True, or return False if `iteration` <= `last`."""
        if self.last is not None and iteration <= self.last:
            return False
        self.last = iteration
        for name, value in list_numbers(row):
            points = self.curves.get(name)
            if points is None:
                points = self.curves[name] = Points()
            points.iterations.append(iteration)
            points.values.append(value)
        return True


_NO_ROWS = _Kind()


class MetricsFile:
    """The rows of one metrics.jsonl in memory. `MetricsFiles.open` updates and locks an instance.

    If two rows have the same kind and iteration, the later one replaces the earlier one. Every reader of
    these files follows this rule.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._seen = (-1, -1)  # size and time of the file
        self._data = bytearray()  # the complete lines of the file
        self._spans: list[tuple[int, int]] = []  # where each row begins and ends
        self._kinds: dict[str, _Kind] = {}

    @property
    def size(self) -> int:
        return len(self._data)

    @property
    def modified_ns(self) -> int:
        return self._seen[1]

    def read(self) -> None:
        """Read the file's new lines, or all lines if it was rewritten. A missing file has no rows."""
        try:
            facts = self.path.stat()
            if (facts.st_size, facts.st_mtime_ns) == self._seen:
                return
            with self.path.open("rb") as file:  # stays the same file if another process replaces it
                facts, begin = os.fstat(file.fileno()), max(0, self.size - _TAIL)
                file.seek(begin)
                data = file.read()
                if data[: self.size - begin] != self._data[begin:]:
                    self._clear()
                    begin = file.seek(0)
                    data = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return self._clear()
        except OSError as error:
            raise RunDirectoryError(f"{self.path} cannot be read: {error}") from error
        self._seen = facts.st_size, facts.st_mtime_ns
        self._add(data[self.size - begin : data.rfind(b"\n") + 1])

    def _add(self, data: bytes) -> None:
        """Add complete lines; skip a line that is not a row, such as one that a crash truncated."""
        begin = self.size
        self._data += data
        disordered: set[str] = set()  # kinds with a row whose iteration is not after the last one
        for line in data.split(b"\n")[:-1]:
            end = begin + len(line)
            row = parse_object(line)
            if row is not None and isinstance(iteration := row.get("iteration", 0), int):
                name = str(row.get("kind", ""))
                kind = self._kinds.setdefault(name, _Kind())
                kind.places[iteration] = len(self._spans)
                self._spans.append((begin, end))
                if not kind.add(iteration, row):
                    disordered.add(name)
            begin = end + 1
        for name in disordered:
            places = dict(sorted(self._kinds[name].places.items()))
            self._kinds[name] = kind = _Kind(places)
            for iteration, place in places.items():
                kind.add(iteration, self._row(place))

    def _row(self, place: int) -> Row:
        begin, end = self._spans[place]
        return parse_object(bytes(self._data[begin:end])) or {}

    def next_mark(self, mark: Mark) -> Mark:
        """Return the file's current mark. Its row numbers continue those of the stored `mark`."""
        same = mark.size <= self.size and mark.digest == self._digest(mark.size)
        base = mark.base if same else mark.base + mark.rows
        return Mark(self.size, self._digest(self.size), base, len(self._spans))

    def _digest(self, size: int) -> str:
        return hashlib.blake2b(self._data[max(0, size - _TAIL) : size], digest_size=12).hexdigest()

    def lines(
        self, base: int, *, after: int = 0, kind: str | None = None, limit: int
    ) -> tuple[MetricLine, ...]:
        """Return, in the file's order, the first `limit` rows whose row number (`Mark`) is above `after`."""
        kinds = self._kinds.values() if kind is None else (self._kinds.get(kind, _NO_ROWS),)
        places = sorted(p for rows in kinds for p in rows.places.values() if base + p + 1 > after)
        return self._lines(base, places[:limit])

    def newest(self, base: int, kind: str, limit: int) -> tuple[MetricLine, ...]:
        """Return the rows of one kind for its last `limit` iterations, oldest first."""
        places = self._kinds.get(kind, _NO_ROWS).places
        return self._lines(base, [places[iteration] for iteration in sorted(places)[-limit:]])

    def above_zero(self, base: int, names: Collection[str], limit: int) -> tuple[MetricLine, ...]:
        """Return the last `limit` rows, of any kind, in which a named number is above 0; oldest first."""
        places = {
            kind.places[iteration]
            for kind in self._kinds.values()
            for name in kind.curves.keys() & set(names)
            for curve in (kind.curves[name],)
            for iteration, value in zip(curve.iterations, curve.values, strict=True)
            if value > 0
        }
        return self._lines(base, sorted(places)[-limit:])

    def _lines(self, base: int, places: Iterable[int]) -> tuple[MetricLine, ...]:
        rows = [(base + place + 1, self._row(place)) for place in places]
        return tuple(
            MetricLine(number, str(row.get("kind", "")), row.get("iteration", 0), row) for number, row in rows
        )

    def last_iteration(self, kind: str) -> int | None:
        return self._kinds.get(kind, _NO_ROWS).last

    @property
    def curves(self) -> set[tuple[str, str]]:
        """The (kind, name) of every curve."""
        return {(name, curve) for name, kind in self._kinds.items() for curve in kind.curves}

    def points(self, kind: str, name: str) -> Points:
        """Return a copy of the points of a curve; raise KeyError if there is no such curve."""
        curve = self._kinds[kind].curves[name]
        return Points(curve.iterations[:], curve.values[:])

    def last_numbers(self, kind: str, names: Iterable[str]) -> dict[str, float]:
        """Return the named numbers of the last row of a kind; numbers that the row lacks are absent."""
        rows = self._kinds.get(kind, _NO_ROWS)
        curves = {name: rows.curves[name] for name in names if name in rows.curves}
        return {name: it.values[-1] for name, it in curves.items() if it.iterations[-1] == rows.last}

    def sums(self, names: Iterable[str]) -> dict[str, float]:
        """Return the sum of each named number over the rows of all kinds. Names in no row are absent."""
        found = {
            name: [kind.curves[name].values for kind in self._kinds.values() if name in kind.curves]
            for name in names
        }
        return {name: sum(map(sum, values)) for name, values in found.items() if values}


def thin(curve: Points, stride: int) -> Curve:
    """Reduce a curve to the mean, minimum and maximum of each interval of `stride` iterations."""
    if stride == 1:
        values = tuple(curve.values)
        return Curve(tuple(curve.iterations), values, values, values)
    at_N, of_N = np.array(curve.iterations, np.int64), np.array(curve.values, np.float64)
    begins = np.flatnonzero(np.diff(at_N // stride, prepend=-1))
    counts = np.diff(begins, append=len(at_N))
    return Curve(
        tuple(at_N[begins + counts - 1].tolist()),
        tuple((np.add.reduceat(of_N, begins) / counts).tolist()),
        tuple(np.minimum.reduceat(of_N, begins).tolist()),
        tuple(np.maximum.reduceat(of_N, begins).tolist()),
    )


def thin_together(curves: Mapping[Key, Points], points: int) -> dict[Key, Curve]:
    """Reduce each curve to at most `points` points, at the same intervals, so that curves can be overlaid."""
    last = max((curve.iterations[-1] for curve in curves.values()), default=0)
    return {key: thin(curve, last // max(points, 1) + 1) for key, curve in curves.items()}


_OUTCOME, _EVALUATION = "episode/outcome_reward", "eval/outcome_reward"
_SPARK_POINTS = 60


def summarise(file: MetricsFile) -> dict[str, Any]:
    """Return the fields of a `Job` that come from its metrics, except `finished`, by name."""
    held_out = file.last_numbers("evaluation", (_EVALUATION, f"{_EVALUATION}_low", f"{_EVALUATION}_high"))
    spark = None
    if ("iteration", _OUTCOME) in file.curves:
        series = thin_together({_OUTCOME: file.points("iteration", _OUTCOME)}, _SPARK_POINTS)[_OUTCOME]
        spark = [series.iterations, series.values]
    return {
        "iteration": file.last_iteration("iteration") or 0,
        "outcome": file.last_numbers("iteration", [_OUTCOME]).get(_OUTCOME),
        "evaluation": held_out.get(_EVALUATION),
        "numbers": {"evaluated": held_out, "sums": file.sums((*FAILED, *FINISHED)), "spark": spark},
    }


class MetricsFiles:
    """A cache of the most recently read metrics files, up to `most_bytes` in total."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._files: OrderedDict[Path, MetricsFile] = OrderedDict()
        self._most_bytes, self._lock = most_bytes, threading.Lock()

    @contextmanager
    def open(self, run_dir: str | None) -> Iterator[MetricsFile]:
        """Yield the metrics file of a run directory, updated and locked; it is empty without a directory."""
        path = Path(run_dir or os.devnull, METRICS_FILE)
        with self._lock:
            file = self._files.setdefault(path, MetricsFile(path))
            self._files.move_to_end(path)
        with file.lock:
            file.read()
            yield file
        with self._lock:
            while len(self._files) > 1 and sum(one.size for one in self._files.values()) > self._most_bytes:
                self._files.popitem(last=False)
