from __future__ import annotations

import sys
from pathlib import Path

import pytest

from streamrl.config.code import code_digests


def digest(reference: str) -> str | None:
    return code_digests({"reward.kind": reference}).get("reward.kind")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("import helper\nfrom tools import grade\n\ndef score(task, episode): ...\n")
    (tmp_path / "helper.py").write_text("import reward\n")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").write_text("")
    (tmp_path / "tools" / "grade.py").write_text("raise SystemExit('nobody runs this')\n")
    (tmp_path / "other.py").write_text("")
    return tmp_path


@pytest.mark.parametrize("file", ["reward.py", "helper.py", "tools/__init__.py", "tools/grade.py"])
def test_it_follows_what_lies_beside_it(place: Path, file: str) -> None:
    for reference in (f"{place / 'reward.py'}:score", "reward:score", "reward.score"):
        before = digest(reference)
        path = place / file
        whole = path.read_text()
        path.write_text(whole + "# more\n")
        assert before is not None and digest(reference) != before
        path.write_text(whole)
        assert digest(reference) == before


def test_what_is_not_imported_or_not_there_does_not_count(place: Path) -> None:
    assert digest("tools.grade:score") is not None
    assert "tools" not in sys.modules and "tools.grade" not in sys.modules
    assert digest("no.such.module:f") is None and digest(f"{place}/none.py:f") is None and digest("exact_match") is None
    (place / "broken.py").write_text("def (")
    assert digest(f"{place}/broken.py:f") is not None
    before = digest("reward:score")
    (place / "other.py").write_text("# more")
    assert digest("reward:score") == before
    moved = place / "moved"
    place.rename(place.with_name("elsewhere"))
    place = moved.parent.with_name("elsewhere")
    assert digest(f"{place / 'reward.py'}:score") == before
    place.rename(moved.parent)
