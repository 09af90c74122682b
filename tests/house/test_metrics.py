"""Every metric is declared once; docs/metrics.md is generated from the declarations."""

import ast
import re
from collections.abc import Iterator

from tests.conftest import is_declared, rows_of
from tests.house.sources import ROOT, name_of, package_sources
from trainer_backend.metrics import CHAPTERS, DECLARED, metrics_markdown

# Keys of this form that name something else.
OTHERS = {
    "trainer_backend/inference/drift.py": {"prefix_broken/*"},  # without its `inference/`
    "trainer_backend/jobs/routes.py": {"application/json", "application/toml", "text/plain"},
}


def written(tree: ast.Module) -> Iterator[str]:
    """Names of metrics as code writes them: keys of a dict, with `*` for what an f-string fills in."""
    for node in ast.walk(tree):
        keys: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            keys = [*node.keys]
        elif isinstance(node, ast.DictComp):
            keys = [node.key]
        elif isinstance(node, ast.Assign):
            keys = [target.slice for target in node.targets if isinstance(target, ast.Subscript)]
        for key in keys:
            parts = key.values if isinstance(key, ast.JoinedStr) else [key]
            name = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)
            if re.fullmatch(r"[a-z_]+/[a-z0-9_/*]+", name):
                yield name


def test_the_page_of_the_metrics_is_that_of_their_declarations():
    assert (ROOT / "docs/metrics.md").read_text(encoding="utf-8") == metrics_markdown(), (
        "run: .venv/bin/python -m trainer_backend.metrics > docs/metrics.md"
    )


def test_a_metric_is_declared_once_and_explained_without_what_separates_metrics():
    names = [metric.name for metric in DECLARED]
    assert sorted(set(names)) == sorted(names)
    rows = [row for _, rows in CHAPTERS.values() for row in rows if len(row.metrics) > 1]
    assert [metric.name for row in rows for metric in row.metrics if ";" in metric.means] == []


def test_every_metric_of_a_run_is_declared(trained):
    kinds = ("warmup", "teacher", "iteration", "evaluation")
    names = {name for kind in kinds for row in rows_of(trained[0], kind) for name in row}
    assert [name for name in sorted(names - {"kind", "iteration"}) if not is_declared(name)] == []


def test_every_metric_that_the_code_writes_is_declared():
    """A run of the tests records a part of them only."""
    names = [
        (file, name)
        for path, tree in package_sources().items()
        if (file := name_of(path)).startswith("trainer_backend/")
        for name in written(tree)
        if name not in OTHERS.get(file, ())
    ]
    assert len(names) > 120
    assert [(file, name) for file, name in names if not is_declared(name)] == []


def test_every_metric_that_the_code_reads_is_declared():
    """A misspelt one would be read as absent, by the terminal, a page or an exposition."""
    rooms = {metric.name.partition("/")[0] for metric in DECLARED}
    names = {
        node.value
        for path, tree in package_sources().items()
        if name_of(path).startswith("trainer_backend/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and re.fullmatch(r"[a-z_]+/[a-z0-9_]+", str(node.value))
    }
    assert "loss/entropy" in names
    assert [name for name in sorted(names) if name.partition("/")[0] in rooms and not is_declared(name)] == []


def test_a_name_is_found_however_code_writes_it():
    code = 'row = {"a/x": 1, f"b/{name}/kept": 2}\nrow[f"c/{name}"] = row["d/only_read"]'
    assert {*written(ast.parse(code))} == {"a/x", "b/*/kept", "c/*"}
    assert is_declared("decision/count") and is_declared("stop/deadline") and is_declared("loss/*")
    assert is_declared("episode/outcome_reward_low") and is_declared("app/finished")
    assert not is_declared("decision/counts") and not is_declared("decisions/*")
