"""Integer arithmetic of `$((...))`, as far as it is numbers, + - * / % ** and comparisons (bash(1), ARITHMETIC EVALUATION)."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

_LONGEST = 500
_READ = re.compile(r"(?:[A-Za-z_]\w*|\d+(?!\w)|[\s+\-*/%()<>=!])*", re.ASCII)
_LARGEST = 2**63
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def calculate(text: str, number_of: Callable[[str], int | None]) -> int | None:
    """The value of an expression whose names `number_of` knows; None for one that is not read, or not an integer of 64 bits.

    Division is towards zero, and a comparison is 1 or 0, as in C.
    """
    if len(text) > _LONGEST or not _READ.fullmatch(text):
        return None
    try:
        return _value(ast.parse(text.strip() or "0", mode="eval").body, number_of)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, number_of: Callable[[str], int | None]) -> int | None:
    if isinstance(node, ast.Constant):
        return _bounded(node.value) if type(node.value) is int else None
    if isinstance(node, ast.Name):
        return number_of(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = _value(node.operand, number_of)
        return None if inner is None else -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.BinOp):
        return _both(node.left, node.op, node.right, number_of)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _both(node.left, node.ops[0], node.comparators[0], number_of)
    return None


def _both(left: ast.expr, kind: ast.operator | ast.cmpop, right: ast.expr, number_of: Callable[[str], int | None]) -> int | None:
    a, b = _value(left, number_of), _value(right, number_of)
    if a is None or b is None:
        return None
    if isinstance(kind, ast.Div | ast.Mod):
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return _bounded(quotient if isinstance(kind, ast.Div) else a - b * quotient)
    if isinstance(kind, ast.Pow):
        return _bounded(a**b) if 0 <= b < 64 else None
    known = _OPERATORS.get(type(kind))
    return _bounded(int(known(a, b))) if known else None


def _bounded(value: int) -> int | None:
    return value if -_LARGEST <= value < _LARGEST else None
