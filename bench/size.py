"""The size of each package, and what changed since a commit: `make size`, or `make size BASE=<commit>`.

Inline candidates are functions of six code lines or fewer whose name the code reads once: inline them unless
the name explains the lines. One-reader files have fewer than 60 lines, and a single file imports them: their
code may live in that file. Decorated functions, methods that override or that Python calls, and tests are no
candidates; readers in tests do not count. A candidate is a hint, since names are matched as text. `make size
NAMES=1` lists the candidates.
"""

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import PurePosixPath
from typing import NamedTuple

from bench.kit import ROOT, options

INLINE_LINES, SMALL_FILE_LINES = 6, 60
HEADS = ("files", "lines", "code", "classes", "functions", "inline", "one-reader")
# The table has a row for each folder of these packages too.
SPLIT = ("task_app", "trainer_backend")
PACKAGES = ("service_kit", "shared_schemas", *SPLIT, "turnwise")
Functions = ast.FunctionDef | ast.AsyncFunctionDef


class Parsed(NamedTuple):
    """The sizes of one file, and the names in it.

    Attributes:
        small: names of functions that could be inlined, if the code reads them once.
        defined, reads: how often each name is defined as a function, and how often it is read.
        imports: imported dotted names; not all of them are modules.
    """

    lines: int
    code: int
    classes: int
    functions: int
    small: tuple[str, ...]
    defined: Counter[str]
    reads: Counter[str]
    imports: frozenset[str]


@cache
def parse(text: str) -> Parsed:
    tree = ast.parse(text)
    nodes = [*ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, Functions)]
    reads = Counter(
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    )
    reads.update(node.attr for node in nodes if isinstance(node, ast.Attribute))
    imports = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            imports |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    code = code_lines(text, nodes)
    small = [
        node.name
        for node in functions
        if not node.decorator_list
        and not node.name.startswith(("__", "test_"))
        and len(code & {*range(node.lineno, (node.end_lineno or 0) + 1)}) <= INLINE_LINES
    ]
    return Parsed(
        text.count("\n"), len(code), sum(isinstance(node, ast.ClassDef) for node in nodes), len(functions),
        tuple(small), Counter(node.name for node in functions), reads, frozenset(imports),
    )  # fmt: skip


def code_lines(text: str, nodes: Sequence[ast.AST]) -> set[int]:
    """Return the numbers of all lines except blank ones, comments, and strings that stand alone."""
    lines = enumerate(text.splitlines(), 1)
    code = {number for number, line in lines if line.strip() and not line.lstrip().startswith("#")}
    for node in nodes:
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            code -= {*range(node.lineno, (node.end_lineno or 0) + 1)}
    return code


class Size(NamedTuple):
    """Rows of the table by package, and the candidates as lines of text."""

    rows: dict[str, Counter[str]]
    inline: list[str]
    one_reader: list[str]


def measure(texts: Mapping[str, str]) -> Size:
    """Measure a tree: its rows of the table, and its candidates.

    Args:
        texts: Python files and Markdown pages by path.
    """
    rows: dict[str, Counter[str]] = {}
    files = {path: parse(text) for path, text in texts.items() if path.endswith(".py")}
    for path, text in texts.items():
        row = rows.setdefault(row_name(path), Counter())
        row["files"] += 1
        if path in files:
            row.update(dict(zip(HEADS[1:5], files[path][:4], strict=True)))
        else:
            row["lines"] += text.count("\n")
    inline, one_reader = [*inline_candidates(files)], [*one_reader_files(files)]
    for head, lines in (("inline", inline), ("one-reader", one_reader)):
        for line in lines:
            rows[row_name(line.partition(":")[0])][head] += 1
    return Size(rows, inline, one_reader)


def row_name(path: str) -> str:
    first, *rest = PurePosixPath(path).parts
    if path.endswith(".md"):
        return "docs"
    return f"{first}/{rest[0]}" if first in SPLIT and len(rest) > 1 else first


def inline_candidates(files: Mapping[str, Parsed]) -> Iterator[str]:
    code = [parsed for path, parsed in files.items() if not path.startswith("tests/")]
    reads, defined = (
        sum(counts, Counter()) for counts in zip(*((one.reads, one.defined) for one in code), strict=True)
    )
    for path, parsed in files.items():
        if path.startswith("tests/"):
            continue
        yield from (f"{path}: {name}" for name in parsed.small if reads[name] == 1 == defined[name])


def one_reader_files(files: Mapping[str, Parsed]) -> Iterator[str]:
    code = {path: parsed for path, parsed in files.items() if not path.startswith("tests/")}
    for path, parsed in code.items():
        module = path.removesuffix(".py").replace("/", ".")
        readers = [other for other, one in code.items() if module in one.imports and other != path]
        if parsed.lines < SMALL_FILE_LINES and len(readers) == 1 and "__" not in path:
            yield f"{path}: read by {readers[0]}"


def read_tree() -> dict[str, str]:
    """Return the working tree's files, without those that git ignores."""
    listed = git("ls-files", "-co", "--exclude-standard", "*.py", "*.md").decode().splitlines()
    paths = [path for path in listed if (ROOT / path).is_file()]
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in paths}


def read_commit(commit: str) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
        found = [one for one in archive if one.isfile() and re.search(r"\.(py|md)$", one.name)]
        return {one.name: archive.extractfile(one).read().decode() for one in found}  # type: ignore[union-attr]


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


def table(now: Size, base: Size) -> list[str]:
    """Return the lines of the table: each number, and its difference from `base` if there is one."""
    sums = {"source": PACKAGES, "all": ("",)}
    for size in (now, base):
        for name, prefixes in sums.items():
            rows = [
                row
                for package, row in size.rows.items()
                if package not in sums and package.startswith(prefixes)
            ]
            size.rows[name] = sum(rows, Counter())
    rest = ("bench", "tests", "docs")
    named = sorted((now.rows.keys() | base.rows.keys()) - {*sums, *rest})
    cells = [("", *(cell for head in HEADS for cell in (head, "")))]
    for name in (*named, *rest, *sums):
        new, old = now.rows.get(name, Counter()), base.rows.get(name, Counter())
        pairs = ((str(new[head]), f"{new[head] - old[head]:+}") for head in HEADS)
        cells.append(
            (name, *(cell.replace("+0", "") if i else cell for pair in pairs for i, cell in enumerate(pair)))
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        " ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    asked = options(
        __doc__,
        ("--base", "HEAD", "the commit to compare with"),
        ("--names", False, "list the candidates by name"),
        arguments=arguments,
    )
    now = measure(read_tree())
    print("\n".join(table(now, measure(read_commit(asked.base)))))
    if asked.names:
        print("\ninline candidates:", *now.inline, "\none-reader files:", *now.one_reader, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
