"""The user's modules are copied at a start, and workers import the copies whatever becomes of the files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.config import code_copies
from streamrl.config.code import code_digests, code_files, code_folders
from streamrl.config.code_copies import VARIABLE, changed, make_copies, read_index
from streamrl.launch.code_check import Asked, ask
from streamrl.runtime.kinds import inherited

CODE = {
    "reward.py": "from pathlib import Path\nimport importlib\nimport helper\nDATA = Path(__file__).with_name('words.txt').read_text()\n"
    "plugin = importlib.import_module('plug' + 'in')\n\n"
    "def score(task, episode):\n    from tools import late\n    return ['old', helper.NAME, late.NAME, plugin.NAME, DATA]\n",
    "helper.py": "NAME = 'old'\n",
    "plugin.py": "NAME = 'old'\n",
    "tools/__init__.py": "",
    "tools/late.py": "NAME = 'old'\n",
    "other.py": "raise SystemExit('nobody imports this')\n",
    "words.txt": "old",
}
SCORE = """
import json, sys
from streamrl.config.code import code_digests
from streamrl.config.plugins import resolve
names = sys.argv[1:]
given = [resolve(name, what="reward", key="reward.kind")(None, None) for name in names]
print(json.dumps([given, code_digests({"reward.kind": names[0]})]))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "mine"
    for name, text in CODE.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    monkeypatch.chdir(place)
    return place


def in_a_worker(place: Path, folder: Path, *names: str) -> list[object]:
    """Return what functions give in a process of its own, and the digest that it finds."""
    surroundings = {**os.environ, VARIABLE: str(folder)}
    done = subprocess.run([sys.executable, "-c", SCORE, *names], cwd=place, env=surroundings, capture_output=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.process
async def test_a_worker_imports_what_was_there_at_the_start(place: Path, tmp_path: Path) -> None:
    names = {"reward.kind": f"{place}/reward.py:score", "filters.function": "reward:score"}
    assert code_folders(names) == {place}
    asked = Asked(names, folders=(str(place),))
    loaded = await ask(asked, inherited(os.environ, "producer"), 60.0)
    assert {path.name for path in loaded} == {"reward.py", "helper.py", "plugin.py"}
    copies = tmp_path / "code"
    assert make_copies(copies, {*code_files(names), *loaded}) == ""
    assert {path.relative_to(place).as_posix() for path in read_index(copies)} == CODE.keys() - {"other.py", "words.txt"}
    assert changed(read_index(copies)) == []
    digests = code_digests({"reward.kind": names["reward.kind"]})
    in_a_worker(place, copies, *names.values())  # bytecode of the originals lies beside them now
    for name in CODE:
        (place / name).write_text(CODE[name].replace("old", "newer"))
    (place / "helper.py").unlink()
    old, new = ["old"] * 4 + ["newer"], ["newer"] * 5
    assert in_a_worker(place, copies, *names.values()) == [[old, old], digests]
    assert {path.name for path in changed(read_index(copies))} == {"reward.py", "helper.py", "plugin.py", "late.py"}
    (place / "helper.py").write_text("NAME = 'newer'\n")
    assert in_a_worker(place, tmp_path / "none", names["reward.kind"])[0] == [new], "nothing was copied there"


def test_copies_are_those_of_the_newest_start_and_bounded(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = tmp_path / "code"
    make_copies(copies, [place / "reward.py"])
    make_copies(copies, [place / "helper.py"])
    assert [path.name for path in read_index(copies)] == ["helper.py"]
    make_copies(copies, [])
    assert read_index(copies) == {} and not copies.exists()
    monkeypatch.setattr(code_copies, "MOST_BYTES", 20)
    assert "2 files" in make_copies(copies, [place / "reward.py", place / "helper.py"])
    assert read_index(copies) == {}
