"""How many faults do the tests of core/ and credit/ find? Mutants of one change each, drawn at a fixed seed.

    python -m bench.study_mutants [--count 200] [--again]

A mutant (bench/mutations.py) exists only in the memory of one process. The process runs the tests that
execute the mutant's line according to coverage.py, fastest first, until one fails. Tests that are stopped
after `--limit` seconds of CPU time have failed too.

bench/results/mutants.json gets a row for each mutant at once. A mutant that has a row is not run again,
except survivors with --again. A survivor whose `equivalent` says why no test can kill it does not count.
"""

import ast
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import traceback
import types
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import pytest

from bench.kit import ROOT, options, report, write_results
from bench.mutations import Change, draw

SOURCES = "trainer_backend/core trainer_backend/credit"
# The tests of core/ and credit/, and quick tests elsewhere that check rules of these two packages.
TESTS = """
    core credit test_credit.py test_recredit.py test_mixture_credit.py test_job.py job/test_unread_keys.py
    test_branches_in_the_loop.py test_forks_in_the_loop.py evaluation/test_truth_player.py
    collect/test_plan.py pages/test_conversations_are_shown.py models/test_presets_and_tokenizer.py
    learner/test_labels.py learner/test_families.py::test_the_load_of_experts_by_hand
"""
# A test that is not run: its learner is in other processes, which have no mutant.
NOT = (
    "tests/trainer_backend/test_recredit.py::"
    "test_the_ranks_of_a_jobs_learner_find_the_cosines_under_a_name_of_their_own"
)
_PLACE = ("file", "line", "column", "change")
MEMORY = 12 << 30  # bytes of addresses, for a mutant that appends without end


class Watch:
    """A pytest plug-in: notes each test's time and the first failure; tells coverage.py which test runs."""

    def __init__(self, cover: coverage.Coverage | None = None) -> None:
        self.cover, self.seconds, self.failed = cover, dict[str, float](), ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self.cover is not None:  # fixtures may be shared by the whole file
            self.cover.switch_context(item.nodeid.partition("::")[0])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        if self.cover is not None:
            self.cover.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed = self.failed or report.nodeid


def forked(work: Callable[[], Any], *, limit: int) -> Any:
    """Run `work` in a forked process and return its result; None if it fails, is killed or takes too long."""
    with tempfile.TemporaryFile("w+") as answer:
        if (child := os.fork()) == 0:
            try:
                os.setsid()
                errors, silent = os.dup(2), os.open(os.devnull, os.O_RDWR)
                for stream in (0, 1, 2):
                    os.dup2(silent, stream)
                resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
                json.dump(work(), answer)
                answer.flush()
            except Exception:
                os.write(errors, traceback.format_exc().encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # remains of the tests
        answer.seek(0)
        text = answer.read()
        return json.loads(text) if text else None


class Tree(NamedTuple):
    """A checkout: its root, the files that get mutants, and what pytest runs."""

    root: Path
    files: Sequence[Path]
    tests: Sequence[str]

    def pytest(self, tests: Sequence[str], watch: Watch) -> int:
        os.chdir(self.root)
        sys.path.insert(0, str(self.root))
        fixed = ("-x", "-q", "--assert=plain", "--hypothesis-seed=0", "-p", "no:xdist", f"--deselect={NOT}")
        return int(pytest.main([*fixed, *tests], [watch]))

    def covered(self) -> dict[str, Any]:
        """Run all tests; return the seconds of each, and by source file and line the tests that ran it."""
        cover = coverage.Coverage(data_file=None, include=[str(path) for path in self.files])
        watch = Watch(cover)
        cover.start()
        code = self.pytest(self.tests, watch)
        cover.stop()
        data = cover.get_data()
        lines = {str(path): data.contexts_by_lineno(str(path)) for path in self.files}
        files = {name: str(getattr(module, "__file__", "")) for name, module in [*sys.modules.items()]}
        packages = [name for name, file in files.items() if "site-packages" in file]
        found = {"code": code, "failed": watch.failed, "seconds": watch.seconds}
        return {**found, "lines": lines, "packages": packages}

    def survives(self, path: Path, module: ast.Module, tests: Sequence[str]) -> tuple[bool, str]:
        """Return whether all tests pass with this syntax tree of a file, and the first that does not."""
        usual = SourceFileLoader.get_code

        def get_code(self: SourceFileLoader, name: str) -> types.CodeType | None:
            return compile(module, self.path, "exec") if self.path == str(path) else usual(self, name)

        SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]
        watch = Watch()
        return self.pytest(tests, watch) == 0, watch.failed or "no import"


def chosen(change: Change, lines: Mapping[str, Sequence[str]], seconds: Mapping[str, float]) -> list[str]:
    """Return the tests that run a change, fastest first; all tests if an import runs it."""
    names = {name for line in change.lines for name in lines.get(str(line), ())}
    tests = [test for test in seconds if change.imported or test in names or test.partition("::")[0] in names]
    return sorted(tests, key=lambda test: (seconds[test], test))


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the share of killed mutants, and by file [killed, counted]; equivalent mutants do not count."""
    counted = [row for row in rows if "equivalent" not in row]
    killed = Counter(row["file"] for row in counted if row["killed_by"])
    total = Counter(row["file"] for row in counted)
    score = round(killed.total() / max(total.total(), 1), 4)
    numbers = {"mutants": len(rows), "equivalent": len(rows) - len(counted), "killed": killed.total()}
    by_file = {name: [killed[name], total[name]] for name in sorted(total)}
    return {**numbers, "score": score, "by_file": by_file}


def study(tree: Tree, known: Sequence[dict[str, Any]], given: Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each mutant; a row of `known` is reused if file, line and change are the same."""
    base = forked(tree.covered, limit=20 * given.limit)
    if base is None or base["code"]:
        raise SystemExit(f"the tests fail without a mutant: {base and base['failed']}")
    for name in base["packages"]:  # imported here, not in each forked process
        with suppress(Exception):
            importlib.import_module(name)
    stored = {tuple(row[name] for name in _PLACE): row for row in known}
    for path, module, change in draw(tree.files, given.count, given.seed):
        place = (path.relative_to(tree.root).as_posix(), *change.place, change.apply())
        row = stored.get(place, {})
        if not row or (given.again and not row["killed_by"] and "equivalent" not in row):
            tests = chosen(change, base["lines"][str(path)], base["seconds"])
            work = partial(tree.survives, path, module, tests)
            survives, test = (forked(work, limit=given.limit) or (False, "stopped")) if tests else (True, "")
            row = dict(zip(_PLACE, place, strict=True)) | {"tests": len(tests)}
            row["killed_by"] = "" if survives else test
        yield row


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(
        __doc__,
        ("--count", 200, "mutants"),
        ("--seed", 0, "of the draw"),
        ("--again", False, "run survivors again"),
        ("--limit", 120, "seconds of CPU time for the tests of one mutant"),
        ("--least", 0.9, "the exit code is 1 below this score"),
        ("--root", str(ROOT), "the checkout"),
        ("--sources", SOURCES, "folders that get mutants"),
        ("--tests", " ".join(f"tests/trainer_backend/{name}" for name in TESTS.split()), "for pytest"),
        ("--results", str(ROOT / "bench/results/mutants.json"), "where rows are kept"),
        arguments=arguments,
    )
    root, results = Path(given.root).resolve(), Path(given.results)
    files = [path for folder in given.sources.split() for path in sorted((root / folder).rglob("*.py"))]
    known = json.loads(results.read_text(encoding="utf-8"))["rows"] if results.exists() else []
    rows: list[dict[str, Any]] = []
    for row in study(Tree(root, files, given.tests.split()), known, given):
        rows.append(row)
        write_results(results, {"seed": given.seed, **summary(rows), "rows": [*rows, *known[len(rows) :]]})
        print(f"{len(rows)} {row['file']}:{row['line']}: {row['change']}: {row['killed_by'] or 'SURVIVES'}")
    write_results(results, {"seed": given.seed, **summary(rows), "rows": rows})
    score = summary(rows)["score"]
    return report(f"killed {score:.1%}, at least {given.least:.1%}", score >= given.least)


if __name__ == "__main__":
    sys.exit(main())
