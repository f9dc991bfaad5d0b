"""Small faults: what `scripts/mutants.py` puts in the place of a node of a module's syntax tree, one at a time."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

OPERATORS = (
    "Add Sub, Sub Add, Mult Div, Div Mult, FloorDiv Mult, Mod FloorDiv, Pow Mult, BitAnd BitOr, BitOr BitAnd, And Or, Or And, "
    "Lt LtE GtE, LtE Lt Gt, Gt GtE LtE, GtE Gt Lt, Eq NotEq, NotEq Eq, Is IsNot, IsNot Is, In NotIn, NotIn In"
)
"""Of `ast`: one, and what takes its place."""
INSTEAD = {one: others for one, *others in (line.split() for line in OPERATORS.split(","))}
PAIRS = "min max, minimum maximum, amin amax, argmin argmax, any all, sum mean, zeros ones, zeros_like ones_like, logical_and logical_or"
NAMES = {a: b for pair in PAIRS.split(",") for a, b in (pair.split(), reversed(pair.split()))}
DROPPED = "detach clamp clip masked_fill exp expm1 log log1p abs square sqrt sigmoid flip clone contiguous where maximum minimum"
"""Calls that become what they are called on, or their last argument where that is a module."""
UNORDERED = "sorted reversed"
"""Functions that become their argument, in decisions."""
Place = tuple[ast.AST, str, int | None]


class Mutant(NamedTuple):
    """A module with one place changed."""

    key: str
    """`module.function: the changed line`, the name under which the list of equivalent ones has it."""
    source: str


def changed(node: ast.AST, **fields: Any) -> ast.AST:
    """A copy of the node with these fields."""
    found = copy.copy(node)
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def without(node: ast.AST, field: str) -> Iterator[ast.AST]:
    """Copies of the node that lack one item of this list."""
    items = getattr(node, field)
    for i in range(len(items)):
        yield changed(node, **{field: items[:i] + items[i + 1 :]})


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in a node's place."""
    match node:
        case ast.operator() | ast.cmpop() | ast.boolop():
            yield from (getattr(ast, other)() for other in INSTEAD.get(type(node).__name__, []))
        case ast.BinOp(op=ast.Sub()):
            yield changed(node, left=node.right, right=node.left)
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert()):
            yield node.operand
        case ast.Constant(value=bool()):
            yield changed(node, value=not node.value)
        case ast.Constant(value=int(value) | float(value)):
            yield changed(node, value=value + 1)
            yield changed(node, value=-value if isinstance(value, float) and value else value - 1)
        case ast.If() | ast.IfExp() | ast.While():
            yield changed(node, test=ast.UnaryOp(ast.Not(), node.test))
        case ast.With() if all("grad" in ast.unparse(item) for item in node.items):
            yield ast.If(ast.Constant(True), node.body, [])
        case ast.AugAssign() | ast.Assign(targets=[ast.Subscript()]) | ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Dict():
            for i in range(len(node.keys)):
                yield changed(node, keys=node.keys[:i] + node.keys[i + 1 :], values=node.values[:i] + node.values[i + 1 :])
        case ast.Call():
            yield from calls(node)
        case _:
            return


def calls(node: ast.Call) -> Iterator[ast.AST]:
    """What may stand in a call's place."""
    if isinstance(node.func, ast.Name) and node.func.id in NAMES:
        yield changed(node, func=changed(node.func, id=NAMES[node.func.id]))
    if isinstance(node.func, ast.Attribute):
        name, of = node.func.attr, node.func.value
        module = isinstance(of, ast.Name) and of.id in ("np", "torch", "math")
        if name in NAMES:
            yield changed(node, func=changed(node.func, attr=NAMES[name]))
        if name in DROPPED.split() and not (module and not node.args):
            yield node.args[-1] if module else of
    for i, given in enumerate(node.keywords):
        if given.arg in ("min", "max"):
            yield changed(node, keywords=[*node.keywords[:i], changed(given, arg=NAMES[given.arg]), *node.keywords[i + 1 :]])
    for i, (one, two) in enumerate(zip(node.args, node.args[1:], strict=False)):
        if isinstance(one, ast.Name | ast.Attribute) and isinstance(two, ast.Name | ast.Attribute) and ast.dump(one) != ast.dump(two):
            yield changed(node, args=[*node.args[:i], two, one, *node.args[i + 2 :]])
    for i, (one, two) in enumerate(zip(node.keywords, node.keywords[1:], strict=False)):
        if one.arg and two.arg and ast.dump(one.value) != ast.dump(two.value):
            swapped = changed(one, value=two.value), changed(two, value=one.value)
            yield changed(node, keywords=[*node.keywords[:i], *swapped, *node.keywords[i + 2 :]])


def decisions(node: ast.AST) -> Iterator[ast.AST]:
    """What else may stand in its place where values are decided by, not computed: immutable states, words, conditions."""
    match node:
        case ast.BoolOp():
            for i in range(len(node.values)):
                left = node.values[:i] + node.values[i + 1 :]
                yield left[0] if len(left) == 1 else changed(node, values=left)
        case ast.comprehension():
            yield from without(node, "ifs")
        case ast.Constant(value=str()):
            yield changed(node, value=f"?{node.value}")
        case ast.Tuple(ctx=ast.Load()) | ast.Set() | ast.List(ctx=ast.Load()) if len(node.elts) > 1:
            yield from without(node, "elts")
        case ast.Subscript(slice=ast.Slice(), ctx=ast.Load()):
            yield node.value
        case ast.Assign() if names(*node.targets) & names(node.value):
            yield ast.Pass()
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()
        case ast.match_case() if not isinstance(node.body[0], ast.Pass):
            yield changed(node, body=[ast.Pass()])
        case ast.Call():
            if isinstance(node.func, ast.Name) and node.func.id in UNORDERED.split():
                yield node.args[0]
            if len(node.args) > 1:
                yield changed(node, args=node.args[:-1])
            yield from without(node, "keywords")
        case _:
            return


def names(*nodes: ast.AST) -> set[str]:
    """All names in these nodes."""
    return {inner.id for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def places(node: ast.AST) -> Iterator[Place]:
    """Where a child of the node stands; not in docstrings, annotations, imports and error texts."""
    for field, value in ast.iter_fields(node):
        settings = isinstance(node, ast.ClassDef) and field == "keywords"
        refusal = isinstance(node, ast.If) and field == "body" and isinstance(node.body[-1], ast.Raise)
        if field in ("annotation", "returns", "decorator_list", "bases", "pattern") or settings or refusal:
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            alias = isinstance(node, ast.Module) and isinstance(child, ast.Assign) and isinstance(child.value, ast.Subscript)
            text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.AST) and not (
                alias or text or isinstance(child, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr)
            ):
                yield child, field, index


def mutants(module: str, source: str, *, decides: bool = False) -> Iterator[Mutant]:
    """All mutants of a module, in the order of its lines; with `decides`, those that only decisions have too."""
    tree, seen = ast.parse(source), Counter[str]()

    def visit(node: ast.AST, line: ast.AST, function: str) -> Iterator[Mutant]:
        for child, field, index in places(node):
            for variant in (*variants(child), *(decisions(child) if decides else ())):
                place(node, field, index, ast.copy_location(variant, child))
                top = variant if own_line(child, node) else line
                key = f"{module}.{function}: {header(top)}" + (f"  # was {header(child)}" if isinstance(variant, ast.Pass) else "")
                seen[key] += 1
                yield Mutant(key + (f"  # {seen[key]}" if seen[key] > 1 else ""), ast.unparse(ast.fix_missing_locations(tree)))
                place(node, field, index, child)
            inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else ""
            below = ".".join(filter(None, [function if function != "<module>" else "", inside])) or function
            yield from visit(child, child if own_line(child, node) else line, below)

    yield from visit(tree, tree, "<module>")


def own_line(child: ast.AST, parent: ast.AST) -> bool:
    """Whether a mutant is named by the child, and not by the statement around it."""
    return isinstance(child, ast.stmt | ast.match_case) or isinstance(parent, ast.Dict)


def place(node: ast.AST, field: str, index: int | None, child: ast.AST) -> None:
    """Put a child into its parent."""
    if index is None:
        setattr(node, field, child)
    else:
        getattr(node, field)[index] = child


def header(node: ast.AST) -> str:
    """A statement without those inside it, on one line."""
    inside = [name for name in ("body", "orelse", "cases") if isinstance(node, ast.stmt | ast.match_case) and hasattr(node, name)]
    return " ".join(ast.unparse(ast.fix_missing_locations(changed(node, **{name: [] for name in inside}))).split())
