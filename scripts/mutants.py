"""A mutation run: which small faults in `streamrl/core` do its tests find?

    python scripts/mutants.py                    all modules: the table of docs/algorithms-mutants.md, and the mutants that live
    python scripts/mutants.py kl value_loss      these alone

Each mutant differs from a module in one place. The module's tests meet it in a forked child, which has torch and pytest imported
already: half a second beside several for a new process. The tree is copied first; mutants are written into the copy.
Mutants that mean the same are listed with their reasons in scripts/equivalent_mutants.txt. The exit status is 1 where others live, or
where one that is listed dies. A child is given CPU time, not wall time, so a busy machine changes no result.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import gc
import importlib
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "scripts" / "equivalent_mutants.txt"
MODULES = (
    "policy_losses policy kl importance rejection corrections batch_metrics groups advantages returns reductions balance packing logprobs "
    "fused_head nucleus vocab_parallel sequences schedule"
)
TESTS = {
    "fused_head": ["logprobs", "vocab_parallel"],
    "groups": ["groups", "advantages"],
    "policy_losses": ["policy_losses", "opsm", "value_loss"],
}
"""Which tests a module has, where it is not `test_<module>.py` alone."""
CPU_S = 30
MEMORY_BYTES = 6 << 30

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


def mutants(module: str, source: str) -> Iterator[Mutant]:
    """All mutants of a module, in the order of its lines."""
    tree, seen = ast.parse(source), Counter[str]()

    def visit(node: ast.AST, line: ast.AST, function: str) -> Iterator[Mutant]:
        for child, field, index in places(node):
            for variant in variants(child):
                place(node, field, index, ast.copy_location(variant, child))
                top = variant if isinstance(child, ast.stmt) or isinstance(node, ast.Dict) else line
                key = f"{module}.{function}: {header(top)}" + (f"  # was {header(child)}" if isinstance(variant, ast.Pass) else "")
                seen[key] += 1
                yield Mutant(key + (f"  # {seen[key]}" if seen[key] > 1 else ""), ast.unparse(ast.fix_missing_locations(tree)))
                place(node, field, index, child)
            inside = child.name if isinstance(child, ast.FunctionDef | ast.ClassDef) else ""
            below = ".".join(filter(None, [function if function != "<module>" else "", inside])) or function
            yield from visit(child, child if isinstance(child, ast.stmt) or isinstance(node, ast.Dict) else line, below)

    yield from visit(tree, tree, "<module>")


def place(node: ast.AST, field: str, index: int | None, child: ast.AST) -> None:
    """Put a child into its parent."""
    if index is None:
        setattr(node, field, child)
    else:
        getattr(node, field)[index] = child


def header(node: ast.AST) -> str:
    """A statement without those inside it, on one line."""
    bare = changed(node, body=[]) if isinstance(node, ast.stmt) and hasattr(node, "body") else node
    bare = changed(bare, orelse=[]) if hasattr(bare, "orelse") and isinstance(bare, ast.stmt) else bare
    return " ".join(ast.unparse(ast.fix_missing_locations(bare)).split())


def run(tests: list[str], *, imported: int | None = None) -> int:
    """Exit status of the tests in a forked process; negative: the signal that ended it. What they imported is written to a pipe."""
    gc.freeze()
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 70
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        if imported is None:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
        import hypothesis
        import pytest

        # Found is enough: no smaller example is looked for. The same examples each time.
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile("mutants", phases=phases, derandomize=True, database=None, deadline=None)
        hypothesis.settings.load_profile("mutants")
        status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", *tests]))
        if imported is not None:
            again = ("streamrl.core", "streamrl.trainers", "tests", "_pytest", "pytest", "__m")
            os.write(imported, "\n".join(name for name in sys.modules if not name.startswith(again)).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def preload(tests: list[str]) -> None:
    """Run the tests on the module as it is; then import here what they imported, so that children need not."""
    read, write = os.pipe()
    if run(tests, imported=write) != 0:
        sys.exit(f"these tests fail without any mutant: {tests}")
    os.close(write)
    with os.fdopen(read) as lines:
        for name in lines.read().split():
            with contextlib.suppress(ImportError):  # made at run time, not imported
                importlib.import_module(name)


def try_module(module: str, known: set[str]) -> tuple[Counter[str], list[str]]:
    """Counts, and what the list of equivalent mutants has wrong. The working directory is the copy."""
    path, counts, wrong = Path("streamrl", "core", f"{module}.py"), Counter[str](), list[str]()
    tests = [f"tests/core/test_{stem}.py" for stem in TESTS.get(module, [module])]
    preload(tests)
    source = path.read_text()
    for cached in path.parent.glob(f"__pycache__/{module}.*"):
        cached.unlink()
    for mutant in mutants(module, source):
        path.write_text(mutant.source)
        lives, listed = run(tests) == 0, mutant.key in known
        counts["mutants"] += 1
        counts["killed" if not lives else "equivalent" if listed else "lives"] += 1
        if lives != listed:
            wrong.append(f"{'lives' if lives else 'dies, though listed as equivalent'}: {mutant.key}")
            print(wrong[-1], flush=True)
    path.write_text(source)
    return counts, wrong


def main(modules: Sequence[str]) -> int:
    """Try all mutants of the modules in a copy of the tree; exit status 1 where the list of equivalent ones has something wrong."""
    listed = [line for line in EQUIVALENT.read_text().splitlines() if line and not line.startswith("#")]
    known = {line.rpartition("  # because ")[0] for line in listed}
    lines, sums, wrong = ["| module | mutants | killed | equivalent | score |", "|---|---|---|---|---|"], Counter[str](), list[str]()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as copied:
        for folder in ("streamrl", "producers", "consumers", "schemas", "tests", "examples"):
            shutil.copytree(ROOT / folder, Path(copied, folder), symlinks=True)
        shutil.copy(ROOT / "pyproject.toml", copied)
        os.chdir(copied)
        sys.path[0] = os.environ["PYTHONPATH"] = copied
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}  # a fork takes no threads along
        sys.dont_write_bytecode = True
        for module in modules:
            counts, found = try_module(module, known)
            sums, wrong = sums + counts, wrong + found
            lines.append(row(module, counts))
            print(lines[-1], flush=True)
    print("\n".join([*lines, row("all", sums), f"\n{time.monotonic() - began:.0f} s; wrong: {len(wrong)}"]))
    return bool(wrong)


def row(name: str, counts: Counter[str]) -> str:
    """A row of the table; the score leaves equivalent mutants out."""
    score = counts["killed"] / max(counts["mutants"] - counts["equivalent"], 1)
    return f"| {name} | {counts['mutants']} | {counts['killed']} | {counts['equivalent']} | {score:.1%} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or MODULES.split()))
