"""metrics.jsonl in memory: what a look reads, how rows are numbered, and what is forgotten."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer_backend.store import metrics
from trainer_backend.store.metrics import METRICS_FILE, Mark, MetricsFile, MetricsFiles, Points, thin
from trainer_backend.store.rows import Curve


def lines(*iterations: int, kind: str = "iteration") -> str:
    rows = ({"kind": kind, "iteration": i, "loss": i / 2, "flat": {"a": 1}} for i in iterations)
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Every line that was parsed."""
    found: list[bytes] = []
    parse = metrics.parse_object
    monkeypatch.setattr(metrics, "parse_object", lambda line: found.append(line) or parse(line))
    return found


def read(files: MetricsFiles, run: Path) -> list[int]:
    with files.open(str(run)) as file:
        return list(file.points("iteration", "loss").iterations) if file.size else []


def test_a_look_parses_only_what_is_new_and_everything_of_a_file_that_was_rewritten(tmp_path, parsed):
    files, path = MetricsFiles(), tmp_path / METRICS_FILE
    for text, found, new in (
        (lines(1, 2, 3), [1, 2, 3], 3),
        (lines(1, 2, 3), [1, 2, 3], 0),
        (lines(1, 2, 3, 4), [1, 2, 3, 4], 1),
        (lines(1, 2), [1, 2], 2),
        (lines(1, 2) + '{"kind": "iter', [1, 2], 0),
        (lines(1, 2, 3), [1, 2, 3], 1),
        (lines(2, 1), [1, 2], 2 + 2),  # in another order: the curve is made again
        (lines(2, 1) + '{"kind": "iter\n[1]\n{"iteration": null}\n', [1, 2], 3),
        ("", [], 0),
    ):
        parsed.clear()
        path.write_text(text)
        assert (read(files, tmp_path), len(parsed)) == (found, new)
    path.unlink()
    assert read(files, tmp_path) == []


def test_files_beyond_the_limit_are_forgotten_the_last_used_stays(tmp_path: Path, parsed: list[bytes]):
    files = MetricsFiles(most_bytes=2 * len(lines(1)))
    runs = [tmp_path / name for name in "abc"]
    for run in runs:
        run.mkdir()
        (run / METRICS_FILE).write_text(lines(1))
        read(files, run)
    parsed.clear()
    for run, new in ((runs[2], 0), (runs[1], 0), (runs[0], 1), (runs[1], 1), (runs[2], 2)):
        read(files, run)
        assert len(parsed) == new, run


def test_rows_of_a_file_that_was_rewritten_have_numbers_above_all_before(tmp_path: Path):
    file, mark = MetricsFile(tmp_path / METRICS_FILE), Mark()
    for text, base, rows in (
        (lines(1, 2), 0, 2),
        (lines(1, 2, 3), 0, 3),
        (lines(1), 3, 1),
        (lines(1, 2), 3, 2),
        ("", 5, 0),
        (lines(1), 5, 1),
    ):
        file.path.write_text(text)
        file.read()
        mark = file.next_mark(mark)
        assert (mark.base, mark.rows) == (base, rows)
        assert file.next_mark(mark) == mark
        assert [line.number for line in file.lines(base, limit=9)] == list(range(base + 1, base + rows + 1))


def test_a_curve_is_thinned_to_the_means_of_intervals():
    curve = Points()
    curve.iterations.extend([1, 2, 5, 7, 8])
    curve.values.extend([4.0, 1.0, 2.0, 6.0, 0.5])
    # By threes: {1, 2}, {5}, {7, 8}
    assert thin(curve, 3) == Curve((2, 5, 8), (2.5, 2.0, 3.25), (1.0, 2.0, 0.5), (4.0, 2.0, 6.0))
