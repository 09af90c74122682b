"""No file or pipe is read or written in the locale's encoding."""

import ast
import re

from tests.house.sources import PACKAGES, ROOT, name_of

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
    texts = {
        path: path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    without = [
        f"{name_of(path)}:{node.lineno}"
        for path, text in texts.items()
        if re.search(r"open\(|(read|write)_text\(|text=|universal_newlines=", text)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and _lacks_encoding(node)
    ]
    assert without == []
