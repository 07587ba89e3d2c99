"""Small faults put into a module's syntax tree, one at a time. Pure.

Each place where a fault is possible has a number, in the order of the source: comparisons with another operator,
``and`` for ``or``, a condition negated, numbers one larger, ``True`` for ``False``, ``+`` for ``-``. Docstrings,
annotations and decorators are left alone: no test can notice them.
"""

from __future__ import annotations

import ast
from typing import Final

_OTHER: Final[dict[type[ast.AST], type[ast.AST]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
}


class _Mutator(ast.NodeTransformer):
    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self.places: list[str] = []

    def _here(self, node: ast.AST, what: str) -> bool:
        self.places.append(f"line {getattr(node, 'lineno', 0)}: {what}")
        return len(self.places) - 1 == self._wanted

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        for index, operator in enumerate(node.ops):
            other = _OTHER[type(operator)]
            if self._here(node, f"{type(operator).__name__} becomes {other.__name__}"):
                node.ops[index] = other()  # type: ignore[assignment]
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        other = _OTHER[type(node.op)]
        if self._here(node, f"{type(node.op).__name__} becomes {other.__name__}"):
            node.op = other()  # type: ignore[assignment]
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        other = _OTHER.get(type(node.op))
        if other is not None and self._here(node, f"{type(node.op).__name__} becomes {other.__name__}"):
            node.op = other()  # type: ignore[assignment]
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        if self._here(node, "the condition is negated"):
            node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool):
            if self._here(node, f"{node.value} becomes {not node.value}"):
                return ast.copy_location(ast.Constant(not node.value), node)
        elif isinstance(node.value, int) and self._here(node, f"{node.value} becomes {node.value + 1}"):
            return ast.copy_location(ast.Constant(node.value + 1), node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.args.defaults = [self.visit(each) for each in node.args.defaults]
        node.body = [self.visit(each) for each in node.body]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = [self.visit(each) for each in node.body]
        return node


def places(source: str) -> list[str]:
    """Return what each mutant of a module changes, by its number."""
    mutator = _Mutator(-1)
    mutator.visit(ast.parse(source))
    return mutator.places


def mutant(source: str, number: int) -> ast.Module:
    """Return the syntax tree of a module with one fault."""
    tree: ast.Module = _Mutator(number).visit(ast.parse(source))
    return ast.fix_missing_locations(tree)
