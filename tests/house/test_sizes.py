"""Functions stay small; files say their purpose and encoding; the calendar is only ever shown."""

import ast
import re

from tests.house.sources import ROOT, name_of, package_sources, sources, statements

MAX_FUNCTION_LINES = 60


def test_no_function_is_longer_than_a_screen():
    long = [
        f"{name_of(path)}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path, tree in sources().items()
        for node in statements(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert long == []


def test_the_first_line_of_a_file_says_its_purpose():
    silent = [name_of(path) for path, tree in sources().items() if tree.body and not ast.get_docstring(tree)]
    assert silent == []


# They write down when something was; nothing is decided by it.
SHOWN = {
    "task_app/captures/session.py",
    "task_app/dialects/one_call/rollout.py",
    "task_app/rollouts/runs.py",
}


def test_the_task_app_asks_the_calendar_only_to_show_it():
    asking = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "task_app").rglob("*.py")
        if re.search(r"\btime\.time\(|\.(utc)?now\(", path.read_text(encoding="utf-8"))
    }
    assert asking <= SHOWN


# Calls that open text, and the place of a mode that may say otherwise.
_OPENERS = {"open": 0, "fdopen": 1, "read_text": None, "write_text": None}

_PROCESSES = ("run", "Popen", "check_output")


def _lacks_encoding(call: ast.Call) -> bool:
    named = isinstance(call.func, ast.Name)
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", None)
    keys = {word.arg for word in call.keywords}
    if "encoding" in keys:
        return False
    if name not in _OPENERS:
        return name in _PROCESSES and bool(keys & {"text", "universal_newlines"})
    if (place := _OPENERS[name]) is None:
        # `read_text(path)` is ours.
        return not named
    modes = [word.value for word in call.keywords if word.arg == "mode"] + call.args[place + named :][:1]
    mode = modes[0].value if modes and isinstance(modes[0], ast.Constant) else None
    # Other classes have an `open` too: only one with a mode, or the built-in one, opens a file.
    return "b" not in mode if isinstance(mode, str) else named


def test_each_text_file_has_its_encoding():
    without = [
        f"{name_of(path)}:{node.lineno}"
        for path, tree in package_sources().items()
        if re.search(
            r"open\(|(read|write)_text\(|text=|universal_newlines=", path.read_text(encoding="utf-8")
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _lacks_encoding(node)
    ]
    assert without == []
