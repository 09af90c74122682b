"""The mutants of a source file: changes of one field of one node of its syntax tree.

Mutants change comparisons, arithmetic, `and`, `or`, `not`, numbers, True and False, conditions, returned
numbers and keyword arguments. They keep annotations, decorators, asserts, f-strings, `__repr__` and raises.
"""

import ast
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_SWAPS: Mapping[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt), ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.And: (ast.Or,), ast.Or: (ast.And,),
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,),
    ast.Pow: (ast.Mult,), ast.Mod: (ast.Mult,), ast.FloorDiv: (ast.Mult,),
}  # fmt: skip
_STAYS = ("annotation", "returns", "decorator_list", "type_params")
Functions = ast.FunctionDef | ast.AsyncFunctionDef


class Change(NamedTuple):
    """A change: one field of a node gets another value."""

    node: ast.AST
    field: str
    value: Any
    lines: range
    """Lines of the node's statement, without the statement's body."""
    imported: bool
    """Whether the node runs when the file is imported; otherwise it runs when a function is called."""

    @property
    def place(self) -> tuple[int, int]:
        """Line and column."""
        return getattr(self.node, "lineno", self.lines.start), getattr(self.node, "col_offset", 0)

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
    """Yield a node's fields with their values in mutants; `numeric`: the node's function returns a number."""
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
    """Yield all changes of a tree, in the order of its text."""
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


def draw(files: Sequence[Path], count: int, seed: int) -> Iterator[tuple[Path, ast.Module, Change]]:
    """Yield `count` changes, drawn from all changes of the files, each with a syntax tree of its own."""
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    sites = [(path, n) for path, text in texts.items() for n, _ in enumerate(changes(ast.parse(text)))]
    for path, number in random.Random(seed).sample(sites, min(count, len(sites))):
        module = ast.parse(texts[path])
        yield path, module, [*changes(module)][number]
