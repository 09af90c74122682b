"""Mutants of a package small enough to say which of them its test kills."""

import ast
import json
import subprocess
import sys
from pathlib import Path

from bench.kit import ROOT
from bench.mutations import changes
from bench.study_mutants import NOT, TESTS

MODULE = '''"""Doc."""


def is_big(n: int, least: int) -> bool:
    return n > least


def rest(n: int) -> int:
    return n
'''
TEST = """from tiny.module import is_big

def test_a_big_number():
    assert is_big(9, 3) and not is_big(2, 3)
"""


def change_all(text: str) -> list[str]:
    """Each change of a text, in a tree of its own."""
    count = len([*changes(ast.parse(text))])
    return [[*changes(ast.parse(text))][place].apply() for place in range(count)]


def test_operators_numbers_conditions_and_keywords_change():
    assert change_all("a < b") == ["a < b -> a <= b", "a < b -> a >= b"]
    assert change_all("a + b * c") == ["a + b * c -> a - b * c", "b * c -> b / c"]
    assert change_all("a and not b") == ["a and (not b) -> a or not b", "not b -> not not b"]
    assert change_all("f(0, x=a, y=True)") == [
        "f(0, x=a, y=True) -> f(0, y=True)", "f(0, x=a, y=True) -> f(0, x=a)", "0 -> 1", "True -> False",
    ]  # fmt: skip
    assert change_all("if a: pass") == ["a -> not a"]
    assert change_all("[x for x in y if x]") == ["x -> not x"]
    assert change_all("def f() -> float:\n  return a") == ["return a -> return a + 1"]


def test_what_no_test_should_look_at_stays():
    for text in (
        '"""Doc 1."""', "x: Literal[1]", "def f(x: A[1]) -> B[2]: ...", "@cache(size=1)\ndef f(): ...",
        "raise ValueError(1 + a)", "assert a < b, 1", "f'{a + 1:.2f}'", "zip(a, b, strict=True)",
        "def __repr__(self): return 1 + a", "if TYPE_CHECKING: x = 1",
    ):  # fmt: skip
        assert change_all(text) == []


def test_a_test_kills_what_it_runs_and_a_row_that_is_there_stays(tmp_path: Path):
    for name, text in {"tiny/__init__.py": "", "tiny/module.py": MODULE, "tests/test_tiny.py": TEST}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    results = tmp_path / "results.json"
    place = {"file": "tiny/module.py", "line": 5, "column": 11, "change": "n > least -> n >= least"}
    judged = {**place, "tests": 9, "killed_by": "", "equivalent": "told so"}
    results.write_text(json.dumps({"rows": [judged]}))
    command = [sys.executable, "-m", "bench.study_mutants", f"--root={tmp_path}", f"--results={results}"]
    ended = subprocess.run([*command, "--sources=tiny", "--tests=tests"], cwd=ROOT, check=False)
    found = json.loads(results.read_text())
    assert (ended.returncode, found["score"], found["equivalent"]) == (1, 0.5, 1)
    rows = {row["change"]: row for row in found["rows"]}
    assert rows.pop(place["change"]) == judged
    assert {change: (row["line"], row["killed_by"]) for change, row in rows.items()} == {
        "n > least -> n <= least": (5, "tests/test_tiny.py::test_a_big_number"),
        "return n -> return n + 1": (9, ""),
    }
    assert (tmp_path / "tiny/module.py").read_text() == MODULE


def test_the_tests_that_it_runs_or_leaves_out_exist():
    for named in (NOT, *(f"tests/trainer_backend/{one}" for one in TESTS.split())):
        path, _, test = named.partition("::")
        assert (ROOT / path).exists(), named
        assert not test or f"def {test}(" in (ROOT / path).read_text(), named
