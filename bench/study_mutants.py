"""How many faults do the tests of core/ and credit/ find? Mutants of one change each, drawn at a fixed seed.

    python -m bench.study_mutants [--count 200] [--again]

A mutant changes a comparison, an operator, a number, a condition, a returned number or a keyword argument;
annotations, decorators, asserts and what is raised stay. It exists in the memory of one process, where the
tests that run its line (coverage.py tells them) are run, fastest first, until one fails. A test that takes
no end is stopped after `--limit` seconds of CPU time, and has killed the mutant.

bench/results/mutants.json has a row for each mutant, written at once: what is there is not run again, except
survivors with --again. A survivor whose `equivalent` says why no test can kill it does not count.
"""

import ast
import importlib
import importlib.machinery
import json
import os
import random
import resource
import signal
import sys
import tempfile
import types
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import pytest

from bench.kit import ROOT, options, report, write_results

SOURCES = ("trainer_backend/core", "trainer_backend/credit")
_ALSO = ("test_credit", "test_recredit", "test_mixture_credit", "evaluation/test_truth_player")
TESTS = ("tests/trainer_backend/core", *(f"tests/trainer_backend/{name}.py" for name in _ALSO))
# Its learner is in processes of their own, which have no mutant.
ELSEWHERE = (
    "tests/trainer_backend/test_recredit.py::test_the_ranks_of_a_jobs_learner_find_the_same_cosines",
)
PRELOADED = ("torch", "numpy", "hypothesis", "pydantic", "fastapi", "httpx", "pyarrow.parquet", "stamina")
MEMORY = 12 << 30  # bytes of addresses, for a mutant that appends without end

_SWAPS: Mapping[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt), ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.And: (ast.Or,), ast.Or: (ast.And,),
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,),
    ast.Pow: (ast.Mult,), ast.Mod: (ast.Mult,), ast.FloorDiv: (ast.Mult,),
}  # fmt: skip
_STAYS = ("annotation", "returns", "decorator_list", "type_params")
Functions = ast.FunctionDef | ast.AsyncFunctionDef


class Change(NamedTuple):
    """One field of a node gets another value.

    Attributes:
        lines: of the node's statement, without its body.
        imported: whether an import runs it, and not a call.
    """

    node: ast.AST
    field: str
    value: Any
    lines: range
    imported: bool

    def apply(self) -> str:
        """Change the tree; return how the code read before and reads now."""
        before = self._shown()
        setattr(self.node, self.field, self.value)
        ast.fix_missing_locations(self.node)
        return f"{before} -> {self._shown()}"

    def _shown(self) -> str:
        if isinstance(self.node, ast.If | ast.While | ast.comprehension):
            value = getattr(self.node, self.field)
            return ast.unparse(value[0] if isinstance(value, list) else value)
        return ast.unparse(self.node)


def _negated(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)


def _values(node: ast.AST, numeric: bool) -> Iterator[tuple[str, Any]]:
    """Fields of a node with the values that mutants have there; `numeric`: its function returns a number."""
    match node:
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                yield from (("ops", [*ops[:place], new(), *ops[place + 1 :]]) for new in _SWAPS[type(op)])
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op):
            yield from (("op", new()) for new in _SWAPS.get(type(op), ()))
        case ast.Constant(value=bool(value)):
            yield "value", not value
        case ast.Constant(value=int(value) | float(value)):
            yield from (("value", new) for new in {0: (1,), 1: (0, 2)}.get(value, (0, value + 1)))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "operand", _negated(operand)
        case ast.Return(value=ast.expr() as value) if numeric:
            yield "value", ast.BinOp(value, ast.Add(), ast.Constant(1))
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if not isinstance(test, ast.Compare | ast.UnaryOp):
                yield "test", _negated(test)
        case ast.comprehension(ifs=[first, *others]) if not isinstance(first, ast.Compare | ast.UnaryOp):
            yield "ifs", [_negated(first), *others]
        case ast.Call(keywords=keywords):
            for keyword in keywords:
                if keyword.arg not in (None, "strict"):  # of zip: a guard
                    yield "keywords", [other for other in keywords if other is not keyword]


def _stays(node: ast.AST) -> bool:
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.keyword(arg="strict"):
            return True
        case ast.FunctionDef(name="__repr__") | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return False


def changes(
    node: ast.AST, lines: range = range(0), *, imported: bool = True, numeric: bool = False
) -> Iterator[Change]:
    """All changes of a tree, in the order of its text."""
    if isinstance(node, ast.stmt):
        body = getattr(node, "body", None)
        lines = range(
            node.lineno, max(body[0].lineno, node.lineno + 1) if body else (node.end_lineno or 0) + 1
        )
    yield from (Change(node, field, value, lines, imported) for field, value in _values(node, numeric))
    if isinstance(node, Functions):
        numeric = isinstance(node.returns, ast.Name) and node.returns.id in ("int", "float")
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else (value,):
            if isinstance(child, ast.AST) and field not in _STAYS and not _stays(child):
                called = isinstance(node, Functions | ast.Lambda) and field == "body"
                yield from changes(child, lines, imported=imported and not called, numeric=numeric)


class Watch:
    """A plug-in of pytest: each test's time, the first that failed, and with coverage.py what each runs."""

    def __init__(self, cover: coverage.Coverage | None = None) -> None:
        self.cover, self.seconds, self.failed = cover, dict[str, float](), ""

    def _switch(self, name: str) -> None:
        if self.cover is not None:
            self.cover.switch_context(name)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._switch(item.nodeid.partition("::")[0])  # fixtures may be shared by the whole file

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._switch(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed = self.failed or report.nodeid


def forked(work: Callable[[], Any], *, limit: int) -> Any:
    """What `work` returned in a process of its own; None if that was killed or ran out of time."""
    with tempfile.TemporaryFile("w+") as answer:
        if (child := os.fork()) == 0:
            os.setsid()
            silent = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(silent, stream)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            json.dump(work(), answer)
            answer.flush()
            os._exit(0)
        os.waitpid(child, 0)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what tests left behind
        answer.seek(0)
        text = answer.read()
        return json.loads(text) if text else None


class Tree(NamedTuple):
    """A checkout: where it is, files that get mutants, and what pytest runs."""

    root: Path
    files: Sequence[Path]
    tests: Sequence[str]

    def pytest(self, tests: Sequence[str], watch: Watch) -> int:
        os.chdir(self.root)
        sys.path.insert(0, str(self.root))
        return int(pytest.main(["-x", "-q", "--hypothesis-seed=0", "-p", "no:xdist", *tests], [watch]))

    def covered(self) -> dict[str, Any]:
        """The seconds of each test, and by file and line the tests, or whole files of them, that run it."""
        cover = coverage.Coverage(data_file=None, include=[str(path) for path in self.files])
        watch = Watch(cover)
        cover.start()
        code = self.pytest(self.tests, watch)
        cover.stop()
        data = cover.get_data()
        lines = {str(path): data.contexts_by_lineno(str(path)) for path in self.files}
        return {"code": code, "failed": watch.failed, "seconds": watch.seconds, "lines": lines}

    def drawn(self, count: int, seed: int) -> Iterator[tuple[Path, ast.Module, Change]]:
        """So many changes, each of a tree of its own."""
        sites = [
            (path, place)
            for path in self.files
            for place, _ in enumerate(changes(ast.parse(path.read_text(encoding="utf-8"))))
        ]
        for path, place in random.Random(seed).sample(sites, min(count, len(sites))):
            module = ast.parse(path.read_text(encoding="utf-8"))
            yield path, module, [*changes(module)][place]

    def survives(self, path: Path, module: ast.Module, tests: Sequence[str]) -> tuple[bool, str]:
        """Whether all these tests pass with this text of a file, and the first that does not."""
        loader = importlib.machinery.SourceFileLoader
        usual = loader.get_code

        def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> types.CodeType | None:
            return compile(module, self.path, "exec") if self.path == str(path) else usual(self, name)

        loader.get_code = get_code  # type: ignore[assignment, method-assign]
        watch = Watch()
        return self.pytest(tests, watch) == 0, watch.failed or "no import"


def chosen(change: Change, lines: Mapping[str, Sequence[str]], seconds: Mapping[str, float]) -> list[str]:
    """The tests that run a change, fastest first; of what an import runs, all that run any of its file."""
    rows = lines.values() if change.imported else (lines.get(str(line), ()) for line in change.lines)
    names = {name for row in rows for name in row if name}
    tests = {test for test in seconds if test in names or test.partition("::")[0] in names}
    return sorted(tests, key=lambda test: (seconds[test], test))


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The score over all, and by file [killed, counted]; equivalent mutants are not counted."""
    counted = [row for row in rows if "equivalent" not in row]
    killed = Counter(row["file"] for row in counted if row["killed_by"])
    total = Counter(row["file"] for row in counted)
    return {
        "mutants": len(rows),
        "equivalent": len(rows) - len(counted),
        "killed": killed.total(),
        "score": round(killed.total() / max(total.total(), 1), 4),
        "by_file": {name: [killed[name], total[name]] for name in sorted(total)},
    }


def study(tree: Tree, known: Sequence[dict[str, Any]], given: Namespace) -> Iterator[dict[str, Any]]:
    """A row for each mutant; those of `known` stay where file, line and change do."""
    base = forked(tree.covered, limit=20 * given.limit)
    if base is None or base["code"]:
        raise SystemExit(f"the tests fail without a mutant: {base and base['failed']}")
    stored = {(row["file"], row["line"], row["column"], row["change"]): row for row in known}
    for path, module, change in tree.drawn(given.count, given.seed):
        line, column = (
            getattr(change.node, "lineno", change.lines.start),
            getattr(change.node, "col_offset", 0),
        )
        name, text = path.relative_to(tree.root).as_posix(), change.apply()
        row = stored.get((name, line, column, text), {})
        if not row or (given.again and not row["killed_by"] and "equivalent" not in row):
            tests = chosen(change, base["lines"][str(path)], base["seconds"])
            work = partial(tree.survives, path, module, tests)
            survives, test = (forked(work, limit=given.limit) or (False, "stopped")) if tests else (True, "")
            row = {"file": name, "line": line, "column": column, "change": text, "tests": len(tests)}
            row["killed_by"] = "" if survives else test
        yield row


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(
        __doc__,
        ("--count", 200, "mutants"),
        ("--seed", 0, "of the draw"),
        ("--again", False, "run survivors again"),
        ("--limit", 300, "seconds of CPU time for the tests of one mutant"),
        ("--least", 0.9, "the exit code is 1 below this score"),
        ("--root", str(ROOT), "the checkout"),
        ("--sources", " ".join(SOURCES), "folders that get mutants"),
        ("--tests", " ".join([*TESTS, *(f"--deselect={test}" for test in ELSEWHERE)]), "for pytest"),
        ("--results", str(ROOT / "bench/results/mutants.json"), "where rows are kept"),
        arguments=arguments,
    )
    root, results = Path(given.root).resolve(), Path(given.results)
    if given.sources == " ".join(SOURCES):
        for name in PRELOADED:  # once, and not in each process
            importlib.import_module(name)
    files = [path for folder in given.sources.split() for path in sorted((root / folder).glob("*.py"))]
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
