"""Every source file of the tree, parsed once for all rules of the house."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("service_kit", "shared_schemas", "task_app", "trainer_backend", "turnwise")


def _parsed(folder: str) -> dict[Path, ast.Module]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


PACKAGE_SOURCES = {path: tree for package in PACKAGES for path, tree in _parsed(package).items()}
SOURCES = PACKAGE_SOURCES | _parsed("bench")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
