from __future__ import annotations

import sys
from pathlib import Path

import pytest

from streamrl.config.plugins import resolve
from streamrl.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_it.py").write_text("VALUE = 41\n")
    (tmp_path / "mine.py").write_text("from beside_it import VALUE\n\nclass Box:\n    value = VALUE + 1\n\ndef grow():\n    return VALUE\n")
    (tmp_path / "broken.py").write_text("raise RuntimeError('half a file')\n")
    (tmp_path / "needs.py").write_text("import no_such_dependency\n")
    package = tmp_path / "plugin_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("def run():\n    return 'inner'\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def find(reference: str, base: Path | None = None) -> object:
    return resolve(reference, what="producer", key="producer.function", base=base)


def test_files_modules_and_attributes_are_found_once(folder: Path) -> None:
    assert find("mine.py:grow")() == 41  # type: ignore[operator]
    assert find(f"{folder}/mine.py:Box.value") == 42
    assert find("plugin_pkg.inner:run")() == "inner"  # type: ignore[operator]
    assert find("plugin_pkg.inner.run") is find("plugin_pkg.inner:run")
    other = folder / "other"
    other.mkdir()
    (other / "mine.py").write_text("def grow():\n    return -1\n")
    assert find("mine.py:grow") is find(f"{folder}/mine.py:grow")
    assert find("mine.py:grow", other)() == -1  # type: ignore[operator]
    (folder / "json.py").write_text("raise RuntimeError('shadowed')\n")
    (folder / "uses_json.py").write_text("import json\n\ndef run():\n    return json.dumps(1)\n")
    assert find("uses_json.py:run")() == "1"  # type: ignore[operator]


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("calculator", "must name a producer"),
        ("mine.py", "must name a producer"),
        ("a:b:c", "must name a producer"),
        ("nothing.py:run", "expected a Python file"),
        ("mine.py:growl", "did you mean 'grow'"),
        ("broken.py:run", "RuntimeError: half a file"),
        ("needs.py:run", "no_such_dependency"),
        ("no_such_pkg.mod:run", "expected a module no_such_pkg.mod"),
        ("plugin_pkg.nothing:run", "expected a module plugin_pkg.nothing"),
    ],
)
def test_the_error_says_what_is_wrong(folder: Path, reference: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        find(reference)
    assert "producer.function" in str(caught.value)
    assert caught.value.hint
