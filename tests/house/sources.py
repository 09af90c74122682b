"""Every source file of the tree, parsed once for all rules of the house.

The files are parsed when a rule asks: every process of a test run imports this, and one checks the rules.
"""

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("service_kit", "shared_schemas", "task_app", "trainer_backend", "turnwise")


@cache
def _parsed(folder: str) -> dict[Path, ast.Module]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    gc.disable()  # it would go through the trees, which stay, again and again: half of the time
    try:
        return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    finally:
        gc.freeze()
        gc.enable()


def package_sources() -> dict[Path, ast.Module]:
    return {path: tree for package in PACKAGES for path, tree in _parsed(package).items()}


def sources() -> dict[Path, ast.Module]:
    return package_sources() | _parsed("bench")


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements, nested ones too: a tenth of the nodes that `ast.walk` goes through."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield node
            yield from statements(node)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
