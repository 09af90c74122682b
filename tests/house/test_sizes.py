"""Functions stay small, and every file says what it is for (CONTRIBUTING.md)."""

import ast

from tests.house.sources import name_of, sources, statements

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
