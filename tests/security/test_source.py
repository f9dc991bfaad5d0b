"""What the source may not contain, found in its syntax trees: unpickling, code from data, secrets on the wire in the clear."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("streamrl", "producers", "consumers", "schemas", "benchmarks", "examples", "scripts")
PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
LISTED = "streamrl/models/megatron/metadata.py"
"""Reads a pickle of torch's with a list of the classes that it may name."""
ALLOWED = {("benchmarks/bus/redis_streams.py", "import pickle"), (LISTED, "import pickle")}
"""The former is what a benchmark's peer does, on bytes that the benchmark itself wrote."""
SUSPECT = re.compile("|".join((*PICKLERS, r"torch.*load|_object|read_pickle|_pickle|eval|exec|yaml|shell|unverified|check_hostname")))
"""In a text that has none of these no fault is looked for."""
UNPICKLING_CALLS = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "recv_object_list", "read_pickle"}


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path.is_file())


def name_of(node: ast.AST) -> str:
    """`a.b.c` of a name or an attribute."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def faults(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)) if SUSPECT.search(text) else ():
        if isinstance(node, ast.Import):
            yield from ((node.lineno, f"import {one.name}") for one in node.names if one.name.split(".")[0] in PICKLERS)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in PICKLERS:
                yield node.lineno, f"from {node.module} import"
            if node.module == "torch" and any(one.name == "load" for one in node.names):
                yield node.lineno, "torch.load under another name"
        elif isinstance(node, ast.Call):
            yield from faulty_call(node)


def faulty_call(call: ast.Call) -> Iterator[tuple[int, str]]:
    name = name_of(call.func)
    last = name.rpartition(".")[2]
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if name == "torch.load" and not is_constant(given.get("weights_only"), True):
        yield call.lineno, "torch.load without weights_only=True"
    if "allow_pickle" in given and not is_constant(given["allow_pickle"], False):
        yield call.lineno, "allow_pickle"
    if last in UNPICKLING_CALLS:
        yield call.lineno, f"{name} unpickles what other ranks send"
    if name in ("eval", "exec") or (name == "yaml.load"):
        yield call.lineno, f"{name} runs what it reads"
    if is_constant(given.get("shell"), True):
        yield call.lineno, "shell=True"
    if last == "_create_unverified_context" or is_constant(given.get("check_hostname"), False):
        yield call.lineno, "TLS without verification"


def is_constant(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_the_source_unpickles_nothing_and_runs_no_data() -> None:
    paths = sources()
    assert len(paths) > 100, "the scan found the wrong folder"
    found = {
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in paths
        for line, fault in faults(path.read_text())
        if (str(path.relative_to(ROOT)), fault) not in ALLOWED
    }
    assert found == set()
    tree = ast.parse((ROOT / LISTED).read_text())
    used = {name_of(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and name_of(node).startswith("pickle.")}
    assert used == {"pickle.Unpickler", "pickle.UnpicklingError"}  # and not load or loads
    (made,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(name_of(base) == "pickle.Unpickler" for base in node.bases)
    ]
    assert "find_class" in {one.name for one in made.body if isinstance(one, ast.FunctionDef)}
    assert not list(faults("import torch\ntorch.load('x', weights_only=True)\nnp.load('x', allow_pickle=False)\nfile.load()"))


@pytest.mark.parametrize(
    "text",
    [
        *("import pickle", "from cloudpickle import loads", "import torch\ntorch.load('x')"),
        *("import torch\ntorch.load('x', weights_only=False)", "from torch import load", "np.load('x', allow_pickle=True)"),
        *("dist.broadcast_object_list([x])", "eval(text)", "subprocess.run(text, shell=True)", "ssl._create_unverified_context()"),
    ],
)
def test_the_scan_finds_what_is_forbidden(text: str) -> None:
    assert list(faults(text))
