"""Ratchets count small trees as a reader would, and let no number rise unasked."""

from pathlib import Path

import pytest

from scripts import house

ORDER = '[[tool.importlinter.contracts]]\ntype = "layers"\nlayers = ["high", "left | right", "config", "core"]\n'
TREE = "streamrl/config/tree.py"


def build(root: Path, files: dict[str, str]) -> Path:
    """A tree of these files, with a configuration that knows two backends."""
    named = {TREE: 'class A:\n    backend: Literal["table", "torch"]\n', "pyproject.toml": ORDER, **files}
    (root / "scripts").mkdir(exist_ok=True)
    for path, text in named.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def counted(root: Path, measure: str) -> dict[str, int]:
    found = house.measure(root).numbers
    return {name.partition(".")[2]: number for name, number in found.items() if name.partition(".")[0] == measure}


def test_rooms_and_tables_are_counted_once(tmp_path: Path) -> None:
    build(tmp_path, {"producers/a.py": "a = 1\nif a:\n    b = 2\n", "streamrl/core/b.py": "", "streamrl/__init__.py": "c = 3\n"})
    (tmp_path / "streamrl" / "producers").symlink_to("../producers")
    assert counted(tmp_path, "lines") == {"config": 2, "core": 0, "producers": 3, "streamrl": 1}
    assert counted(tmp_path, "statements") == {"config": 2, "core": 0, "producers": 3, "streamrl": 1}
    assert counted(tmp_path, "files") == {"config": 1, "core": 1, "producers": 1, "streamrl": 1}
    build(tmp_path, {"streamrl/bridges/a.py": "slime = 1\n", "streamrl/trainers/factory.py": 'a == "torch"\n'})
    assert counted(tmp_path, "guests") == counted(tmp_path, "questions") == {}


@pytest.mark.parametrize(
    ("measure", "line", "number"),
    [
        ("questions", 'a.backend == "torch"', 1),
        ("questions", 'a in ("table", "other")', 1),
        ("questions", "config.trainer.tabular", 1),
        ("questions", 'match a:\n    case "table": pass', 1),
        ("questions", 'find("torch") is None', 0),
        ("questions", 'a = {"torch": 1}; a.tabular = 2', 0),
        ("guests", "a = 1  # as SkyRL does", 1),
        ("guests", "from skyrl_gym import SlimeHook", 1),
        ("guests", "AutoModel.from_pretrained(a)", 0),
        ("openings", '"""Whether it is."""', 1),
        ("openings", 'a: int\n"""What it is."""', 1),
        ("openings", '"""Soften it."""', 0),
        ("upward", "from streamrl.high import a", 1),
        ("upward", "def f():\n    import streamrl.high.a", 1),
        ("upward", "from streamrl.right.b import a", 1),
        ("upward", "from streamrl.right.protocol import B", 0),
        ("upward", 'MAINS = {"a": "streamrl.high.a:main"}', 1),
        ("upward", "if TYPE_CHECKING:\n    from streamrl.high import a", 0),
        ("upward", "from streamrl.core import a", 0),
    ],
)
def test_lines_of_a_module_count(measure: str, line: str, number: int, tmp_path: Path) -> None:
    build(tmp_path, {"streamrl/left/m.py": line + "\n", "streamrl/high/a.py": "", "streamrl/right/protocol.py": ""})
    (tmp_path / "streamrl/right/b.py").touch()
    for name in ("high", "right"):
        (tmp_path / f"streamrl/{name}/__init__.py").touch()
    assert counted(tmp_path, measure) == ({"left": number} if number else {})


def test_small_files_have_one_importer_in_their_own_room(tmp_path: Path) -> None:
    build(
        tmp_path,
        {
            "streamrl/core/small.py": "a = 1\n",
            "streamrl/core/long.py": "\n" * 101,
            "streamrl/core/shared.py": "a = 1\n",
            "streamrl/core/one.py": "from streamrl.core.small import a\nimport streamrl.core.long\nfrom streamrl.core import shared\n",
            "streamrl/high/two.py": "from streamrl.core.shared import a\nfrom streamrl.core.one import b\n",
        },
    )
    assert counted(tmp_path, "small-files") == {"core": 1}
    assert house.measure(tmp_path).places["small-files.core"] == ["streamrl/core/small.py for streamrl.core.one"]


def test_circles_of_modules_and_rooms(tmp_path: Path) -> None:
    build(
        tmp_path,
        {
            "streamrl/core/a.py": "def f():\n    import streamrl.core.b\n",
            "streamrl/core/b.py": "if TYPE_CHECKING:\n    from streamrl.core.c import C\n",
            "streamrl/core/c.py": "import streamrl.core.a, streamrl.high.d\n",
            "streamrl/high/d.py": "import streamrl.core.e\n",
            "streamrl/core/e.py": "",
        },
    )
    assert counted(tmp_path, "circles") == {"modules": 1, "rooms": 1}
    assert counted(tmp_path, "in-circles") == {"modules": 3, "rooms": 2}


@pytest.mark.parametrize(
    ("measure", "line", "number"),
    [
        ("prose", 'assert "one two three four five" in a', 1),
        ("prose", 'pytest.raises(E, match="one two three four five")', 1),
        ("prose", 'assert "one two three 4 5" in a', 0),
        ("private", "a._b", 1),
        ("private", "from streamrl.core import _b", 1),
        ("private", "self._b._c", 1),
        ("private", "import torch, os\nself._b, a.__dict__, a._replace(), os._exit(1), torch._dynamo.reset()", 0),
        ("sleeps", "await asyncio.sleep(1)", 1),
        ("sleeps", "await asyncio.sleep(0.5 * a)", 1),
        ("sleeps", "await asyncio.sleep(0)", 0),
        ("idle", "assert a >= 0", 1),
        ("idle", "assert a >= 1", 0),
        ("imports", "from tests.other import a, b", 1),
        ("imports", "from tests.support.a import b", 0),
        ("imports", "import tests.loop.a", 0),
    ],
)
def test_habits_of_tests_count(measure: str, line: str, number: int, tmp_path: Path) -> None:
    build(tmp_path, {"tests/loop/test_a.py": line + "\n"})
    assert counted(tmp_path, measure) == ({"loop": number} if number else {})
    assert counted(tmp_path, "test-lines") == {"all": line.count("\n") + 1}


def test_a_number_that_has_risen_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(tmp_path, {"streamrl/core/a.py": "a = 1\n"})
    house.write(tmp_path, {**house.measure(tmp_path).numbers, "walk.lockstep": 3})
    assert house.main([], tmp_path) == 0
    (tmp_path / "streamrl/core/a.py").write_text('"""That."""\n')
    assert house.main([], tmp_path) == 1
    said = capsys.readouterr().out
    assert all(word in said for word in ("openings.core", "at most 0", "got: 1", "streamrl/core/a.py:1", "--raise openings.core"))
    assert "lines.core" not in said


def test_numbers_fall_by_themselves_and_rise_when_asked(tmp_path: Path) -> None:
    build(tmp_path, {"streamrl/core/a.py": "a = 1\n", "streamrl/core/b.py": "a = 1\n"})
    high = {**house.measure(tmp_path).numbers, "lines.core": 9, "files.core": 1, "files.gone": 2, "walk.lockstep": 3}
    house.write(tmp_path, high)
    assert house.main(["--write"], tmp_path) == 1
    del high["files.gone"]
    assert house.kept(tmp_path) == {**high, "lines.core": 2}
    assert house.main(["--raise", "files.core"], tmp_path) == 0
    assert house.kept(tmp_path) == {**high, "lines.core": 2, "files.core": 2}


def test_only_measured_numbers_are_raised(tmp_path: Path) -> None:
    build(tmp_path, {})
    with pytest.raises(SystemExit):
        house.main(["--raise", "lines.nowhere"], tmp_path)


def test_the_file_of_this_tree_has_known_measures() -> None:
    assert {name.partition(".")[0] for name in house.kept()} <= set(house.MEASURES)
