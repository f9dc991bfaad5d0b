"""Ratchets for the house: numbers of the tree that may only fall. They are kept in scripts/house.toml.

    python -m scripts.house                     fail, and name each number that has risen
    python -m scripts.house --write             lower the kept numbers to what is measured; none is raised
    python -m scripts.house --raise lines.core  keep a number that has risen; the commit says why
    python -m scripts.house --where prose.loop  print every place that counts towards a number
    python -m scripts.house --totals            print the sum of each measure

A number is called `measure.place`. The place is a room of the product (a package of streamrl/, or producers, consumers, schemas), a
folder of tests, or `all`. `MEASURES` says what is counted. A number that the file lacks is 0. `walk.lockstep` needs a run, so
tests/loop/test_walk.py compares it.
"""

from __future__ import annotations

import argparse
import ast
import gc
import os
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = "scripts/house.toml"
PRODUCT = ("streamrl", "producers", "consumers", "schemas")
OTHERS = ("tests", "scripts", "benchmarks")

MEASURES = {
    "lines": ("lines of the room", "delete what is not needed"),
    "statements": ("statements of the room", "delete what is not needed"),
    "files": ("files of the room", "let a file be one subject, of 100 to 700 lines"),
    "small-files": ("files of at most 100 lines that one other file imports, of the same room", "move the code to its only importer"),
    "questions": ("comparisons with names of backends and transports, and reads of `.tabular`", "ask the object for a trait"),
    "guests": ("files outside bridges/ that name slime, retrain, verifiers, OpenEnv or SkyRL", "let the bridge alone name it"),
    "upward": ("imports of a higher or neighbouring layer, names in strings included", "register it from above, or move it down"),
    "circles": ("circles of imports, imports for types and inside functions included", "move what both need to a lower file"),
    "in-circles": ("files or rooms in these circles", "move what both need to a lower file"),
    "openings": ("docstrings that begin with Of, What, Whose, Whether, ...", "begin with a subject and a verb, or with an imperative"),
    "test-lines": ("lines of tests/", "share helpers in tests/support, and turn tests that are nearly equal into a table"),
    "imports": ("imports from one folder of tests by another", "move what is shared to tests/support"),
    "prose": ("asserts on five and more words of prose", "match the type, key and values of an error, or one short token"),
    "private": ("private attributes of the product that tests use", "use the public way, or give the product a seam"),
    "sleeps": ("sleeps in tests; `sleep(0)` is none", "wait for the condition itself (tests/support/processes.until)"),
    "idle": ("asserts `>= 0`, which nothing fails", "assert the number, or a bound that a fault breaks"),
    "walk": ("product files that one lockstep sample enters", "shorten the way of a sample"),
}
ELSEWHERE = "walk"

TABLES = ("streamrl/trainers/factory.py", "streamrl/weights/factory.py")
"""Files that map the names of backends and transports to classes."""
CHOICES = {"streamrl/config/tree.py": "backend", "streamrl/config/weights.py": "transport"}
"""The fields whose `Literal` lists these names."""
OPENING = re.compile(r"\W*(Of|What|Whose|Whether|By|So|That|Those|How)\b")
GUEST = re.compile(r"(?<![a-z])(?i:slime|retrain|verifiers|openenv|skyrl)(?![a-z])")
NAMED = re.compile(r"(streamrl(?:\.\w+)+)(?::\w+)?")
PUBLIC = {"_replace", "_asdict", "_fields", "_make"}
SMALL = 100


@dataclass
class Look:
    """One file by itself: what it imports and names, and the lines that count towards a measure."""

    path: str
    lines: int = 0
    statements: int = 0
    imports: list[tuple[int, str, bool]] = field(default_factory=list)
    """Line, dotted name, and whether it is imported for type checkers alone."""
    strings: list[tuple[int, str]] = field(default_factory=list)
    marks: list[tuple[str, int]] = field(default_factory=list)
    """Measure and line."""

    @property
    def module(self) -> str:
        """Return the name that the file is imported by; `streamrl.` comes before the linked folders."""
        parts = Path(self.path).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        return ".".join(parts if parts[0] == "streamrl" else ("streamrl", *parts))

    @property
    def product(self) -> bool:
        """Say if the file is shipped."""
        return self.path.split("/")[0] in PRODUCT

    @property
    def place(self) -> str:
        """Return the room of a product file, the folder of a test, and the top folder of any other file."""
        if self.product:
            return room(self.module)
        first, second, *rest = Path(self.path).parts
        return second if first == "tests" and rest else first


def room(module: str) -> str:
    """Return the part after `streamrl`, or `streamrl` for the package's own file."""
    return module.split(".")[1] if "." in module else module


@dataclass
class House:
    """All numbers by name, and the places that they count."""

    numbers: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    places: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, measure: str, place: str, where: str, number: int = 1) -> None:
        """Count `number` more."""
        self.numbers[f"{measure}.{place}"] += number
        self.places[f"{measure}.{place}"].append(where)


def sources(root: Path) -> list[str]:
    """List the Python files of the product, tests, scripts and benchmarks, each once: links are not followed."""
    found: list[str] = []
    for top in (*PRODUCT, *OTHERS):
        for folder, _, names in os.walk(root / top):
            found += [os.path.relpath(os.path.join(folder, name), root) for name in names if name.endswith(".py")]
    return sorted(found)


def choices(root: Path) -> frozenset[str]:
    """Read the names of backends and transports that the configuration accepts."""
    found: set[str] = set()
    for path, name in CHOICES.items():
        for node in ast.walk(ast.parse((root / path).read_bytes())) if (root / path).is_file() else ():
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
                found |= {text for constant in ast.walk(node.annotation) if (text := _text(constant))}
    return frozenset(found)


def look(root: Path, path: str, names: frozenset[str] = frozenset()) -> Look:
    """Read one file; `names` are those of backends and transports."""
    source = (root / path).read_text(encoding="utf-8")
    found = Look(path, lines=source.count("\n"))
    tree = ast.parse(source)
    for_types: set[int] = set()
    foreign: set[str] = set()
    if found.product and not path.startswith("streamrl/bridges/") and (named := GUEST.search(source)):
        found.marks.append(("guests", source.count("\n", 0, named.start()) + 1))
    for node in ast.walk(tree):
        found.statements += isinstance(node, ast.stmt)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for_types |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
        elif isinstance(node, ast.Import):
            found.imports += [(node.lineno, alias.name, id(node) in for_types) for alias in node.names]
            others = [alias for alias in node.names if not alias.name.startswith(("streamrl", "tests"))]
            foreign |= {(alias.asname or alias.name).split(".")[0] for alias in others}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.imports += [(node.lineno, f"{node.module}.{alias.name}", id(node) in for_types) for alias in node.names]
        elif isinstance(node, ast.Expr) and (text := _text(node.value)) and OPENING.match(text):
            found.marks.append(("openings", node.lineno))
        elif found.product and path not in TABLES and _asks(node, names):
            found.marks.append(("questions", getattr(node, "lineno", 0)))
        elif found.product and (text := _text(node)) and NAMED.fullmatch(text):
            found.strings.append((getattr(node, "lineno", 0), text))
        if path.startswith("tests/"):
            found.marks += list(_habits(node, foreign))
    return found


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _asks(node: ast.AST, names: frozenset[str]) -> bool:
    if isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        inside = [item for one in operands if isinstance(one, (ast.Tuple, ast.List, ast.Set)) for item in one.elts]
        return any(_text(operand) in names for operand in operands + inside)
    if isinstance(node, ast.MatchValue):
        return _text(node.value) in names
    return isinstance(node, ast.Attribute) and node.attr == "tabular" and isinstance(node.ctx, ast.Load)


def _habits(node: ast.AST, foreign: set[str]) -> Iterator[tuple[str, int]]:
    """Yield the measures that a node of a test counts towards, and its line; `foreign` are modules that are not the product's."""
    if isinstance(node, ast.Assert):
        test = node.test
        if any(_is_prose(part) for part in ast.walk(test)):
            yield "prose", node.lineno
        if isinstance(test, ast.Compare) and isinstance(test.ops[-1], ast.GtE) and len(test.ops) == 1:
            bound = test.comparators[0]
            if isinstance(bound, ast.Constant) and bound.value in (0, 0.0):
                yield "idle", node.lineno
    elif isinstance(node, ast.keyword) and node.arg == "match" and any(_is_prose(part) for part in ast.walk(node.value)):
        yield "prose", node.value.lineno
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sleep":
        if not _is_zero(node.args):
            yield "sleeps", node.lineno
    elif isinstance(node, ast.Attribute) and _private(node.attr):
        owner = node.value
        own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
        while isinstance(owner, ast.Attribute):
            owner = owner.value
        if not own and not (isinstance(owner, ast.Name) and owner.id in foreign):
            yield "private", node.lineno
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("streamrl"):
        yield from (("private", node.lineno) for alias in node.names if _private(alias.name))


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def _is_zero(arguments: Sequence[ast.expr]) -> bool:
    return len(arguments) == 1 and isinstance(arguments[0], ast.Constant) and arguments[0].value == 0


def _is_prose(node: ast.AST) -> bool:
    return len([word for word in _text(node).split() if any(letter.isalpha() for letter in word)]) >= 5


def measure(root: Path) -> House:
    """Count everything in the tree at `root` except what is measured elsewhere."""
    paths, names = sources(root), choices(root)
    if len(paths) < 200:
        looks = [look(root, path, names) for path in paths]
    else:
        with ProcessPoolExecutor(min(8, os.cpu_count() or 1), initializer=gc.disable) as pool:
            looks = list(pool.map(look, [root] * len(paths), paths, [names] * len(paths), chunksize=32))
    house = House()
    product = {one.module: one for one in looks if one.product}
    for one in looks:
        for measure_, line in one.marks:
            place = one.path.split("/")[0] if measure_ == "openings" and not one.product else one.place
            house.add(measure_, place, f"{one.path}:{line}")
        if one.product:
            house.add("lines", one.place, f"{one.path}: {one.lines}", one.lines)
            house.add("statements", one.place, f"{one.path}: {one.statements}", one.statements)
            house.add("files", one.place, one.path)
        elif one.path.startswith("tests/"):
            house.add("test-lines", "all", f"{one.path}: {one.lines}", one.lines)
            named = {(line, name.split(".")[1]) for line, name, _ in one.imports if name.startswith("tests.")}
            for line, folder in sorted(named) if one.path.count("/") > 1 else ():
                if folder not in (one.place, "support"):
                    house.add("imports", one.place, f"{one.path}:{line} tests.{folder}")
    _imports(house, product, layers(root))
    return house


def layers(root: Path) -> dict[str, int]:
    """Read the rank of each room in the order of pyproject.toml; 0 is the highest."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    ordered: list[str] = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return {name.strip(): rank for rank, level in enumerate(ordered) for name in level.split("|")}


def _imports(house: House, product: Mapping[str, Look], ranks: Mapping[str, int]) -> None:
    """Count small files, upward imports and circles."""
    modules: dict[str, set[str]] = {name: set() for name in product}
    rooms: dict[str, set[str]] = defaultdict(set)
    importers: dict[str, set[str]] = defaultdict(set)
    for name, one in product.items():
        imported = [(line, known, for_types) for line, target, for_types in one.imports if (known := _known(target, product))]
        for _, target, _ in imported:
            modules[name].add(target)
            rooms[room(name)].add(room(target))
            importers[target].add(name)
        strings = [(line, _known(text.split(":")[0], product), False) for line, text in one.strings]
        for line, target, for_types in imported + strings:
            source, goal = ranks.get(room(name)), ranks.get(room(target))
            if for_types or source is None or goal is None or room(name) == room(target):
                continue
            if goal < source or (goal == source and not target.endswith(".protocol")):
                house.add("upward", one.place, f"{one.path}:{line} {target}")
    for name, one in product.items():
        others = importers[name] - {name}
        if one.lines <= SMALL and len(others) == 1 and not one.path.endswith("__init__.py") and room(next(iter(others))) == one.place:
            house.add("small-files", one.place, f"{one.path} for {next(iter(others))}")
    for what, graph in (("modules", modules), ("rooms", rooms)):
        for circle in circles({name: targets - {name} for name, targets in graph.items()}):
            house.add("circles", what, " ".join(sorted(circle)))
            house.add("in-circles", what, " ".join(sorted(circle)), len(circle))


def _known(name: str, product: Mapping[str, Look]) -> str:
    """Return the module of the product that a dotted name is, or is in; otherwise an empty string."""
    while name and name not in product:
        name = name.rpartition(".")[0]
    return name


def circles(graph: Mapping[str, Iterable[str]]) -> list[frozenset[str]]:
    """Find the sets of nodes in which each leads to each."""
    reached: dict[str, set[str]] = {}
    for node in graph:
        seen: set[str] = set()
        ahead = list(graph[node])
        while ahead:
            if (here := ahead.pop()) not in seen:
                seen.add(here)
                ahead += graph.get(here, ())
        reached[node] = seen
    found = {frozenset(other for other in ahead if node in reached.get(other, ())) for node, ahead in reached.items() if node in ahead}
    return sorted(found, key=sorted)


def kept(root: Path = ROOT) -> dict[str, int]:
    """Read the numbers of scripts/house.toml by name."""
    path = root / KEPT
    tables: dict[str, dict[str, int]] = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {f"{measure_}.{place}": number for measure_, table in tables.items() for place, number in table.items()}


def write(root: Path, numbers: Mapping[str, int]) -> None:
    """Write scripts/house.toml: measures in the order of `MEASURES`, places by name, no zeros."""
    lines = ["# Numbers that may only fall: `python -m scripts.house --write` lowers them. A commit that raises one says why:"]
    lines += ["# `python -m scripts.house --raise NAME`. CONTRIBUTING.md has a section about ratchets."]
    for name, (what, _) in MEASURES.items():
        places = {key.partition(".")[2]: number for key, number in numbers.items() if key.partition(".")[0] == name and number}
        lines += ["", f"# {what[0].upper()}{what[1:]}.", f"[{name}]"]
        lines += [f"{place} = {places[place]}" for place in sorted(places)]
    (root / KEPT).write_text("\n".join(lines) + "\n", encoding="utf-8")


def risen(expected: Mapping[str, int], house: House) -> list[str]:
    """Name the numbers that are higher than they may be."""
    return [name for name, got in sorted(house.numbers.items()) if got > expected.get(name, 0)]


def complaint(name: str, expected: Mapping[str, int], house: House) -> str:
    """Describe a number that has risen."""
    what, hint = MEASURES[name.partition(".")[0]]
    places = house.places[name]
    shown = places if len(places) <= 8 else [*places[:8], f"and {len(places) - 8} more: python -m scripts.house --where {name}"]
    return (
        f"{name} has risen ({what})\n  expected: at most {expected.get(name, 0)}\n  got: {house.numbers[name]}\n  where: "
        + "\n         ".join(shown)
        + f"\n  hint: {hint}; if it must rise: python -m scripts.house --raise {name}, in a commit that says why\n"
    )


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Compare the tree with its numbers, or change them; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.house", description="Numbers of the tree that may only fall.")
    parser.add_argument("--write", action="store_true", help="lower the kept numbers to what is measured")
    parser.add_argument("--raise", action="append", default=[], dest="raised", metavar="NAME", help="keep this number though it has risen")
    parser.add_argument("--totals", action="store_true", help="print the sum of each measure")
    parser.add_argument("--where", metavar="NAME", help="print every place that counts towards this number")
    asked = parser.parse_args(arguments)
    expected, house = kept(root), measure(root)
    for name in (*asked.raised, *([asked.where] if asked.where else [])):
        if name not in house.numbers:
            parser.error(f"expected a measured number, such as {min(house.numbers)}, got {name}")
    if asked.where:
        sys.stdout.write("\n".join(house.places[asked.where]) + "\n")
        return 0
    if asked.totals:
        for measure_, (what, _) in MEASURES.items():
            total = sum(number for name, number in house.numbers.items() if name.partition(".")[0] == measure_)
            sys.stdout.write(f"{total:7} {measure_}: {what}\n" if measure_ != ELSEWHERE else "")
        return 0
    elsewhere = {name for name in expected if name.partition(".")[0] == ELSEWHERE}
    lower = {name: number if name in elsewhere else min(number, house.numbers.get(name, 0)) for name, number in expected.items()}
    allowed = {**expected, **{name: house.numbers[name] for name in asked.raised}}
    if asked.write or asked.raised:
        write(root, {**(lower if asked.write else expected), **{name: house.numbers[name] for name in asked.raised}})
    too_high = risen(allowed, house)
    for name in too_high:
        sys.stdout.write(complaint(name, allowed, house))
    fallen = sum(number < expected[name] for name, number in lower.items())
    if fallen and not asked.write:
        sys.stdout.write(f"{fallen} numbers have fallen: python -m scripts.house --write keeps them there\n")
    return 1 if too_high else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
