"""Names that the configuration takes for code: plugins, the table of names, and functions of users."""

import inspect
import re
import sys
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from torch import Tensor

from streamrl.algorithms import choices, estimators, policy
from streamrl.algorithms.sequences import Sequences
from streamrl.config.check_files import field
from streamrl.config.code import code_digests
from streamrl.config.engines import EngineConfig, SglangConfig
from streamrl.config.loss import LossConfig
from streamrl.config.plugins import resolve
from streamrl.config.registry import ENGINES, ESTIMATORS, POLICY_LOSSES, EngineName
from streamrl.config.tree import Config
from streamrl.engines import factory
from streamrl.errors import ConfigError
from streamrl.trainers.table import losses as table_losses


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
    assert "producer.function" in str(caught.value) and caught.value.hint


ROOT = Path(__file__).parents[2]


def test_every_name_has_its_code_and_settings_in_the_section() -> None:
    assert set(estimators.ESTIMATORS) == set(ESTIMATORS)
    assert set(policy.POLICY_LOSSES) == set(POLICY_LOSSES)
    assert set(table_losses.POLICY_LOSSES) == {name for name, known in POLICY_LOSSES.items() if known.table}
    assert set(factory.FACTORIES) == set(ENGINES) == set(get_args(EngineName))
    assert len({*estimators.ESTIMATORS.values()}) == len(ESTIMATORS)
    assert len({*policy.POLICY_LOSSES.values()}) == len(POLICY_LOSSES)
    assert set(choices.CHOICES) == {name for name, known in POLICY_LOSSES.items() if known.choice is not None}
    for name, chooser in choices.CHOICES.items():
        parameters = inspect.signature(chooser).parameters.values()
        assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == set(POLICY_LOSSES[name].choice or {})
    for known in ESTIMATORS.values():
        for key in known.settings:
            field(Config(), f"loss.{key}")
    for known in POLICY_LOSSES.values():
        assert known.keys <= set(LossConfig.__struct_fields__)
    for name, kind in ENGINES.items():
        assert (name in EngineConfig.__struct_fields__) == kind.server
        assert EngineConfig(kind=name).traits == kind
    swaps = next(setting.type for setting in msgspec.structs.fields(SglangConfig) if setting.name == "swap")
    assert get_args(swaps) == ("auto", *ENGINES["sglang"].swaps)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_policy_loss_takes_what_the_table_says(name: str) -> None:
    parameters = inspect.signature(policy.POLICY_LOSSES[name], eval_str=True).parameters
    given = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert {p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY} == set(POLICY_LOSSES[name].settings)
    known = POLICY_LOSSES[name]
    assert [p.annotation for p in given[3:]] == [Sequences] * known.sequences + [Tensor] * (known.choice is not None) + [
        Tensor | None
    ] * known.likeliest
    assert given[1].name.startswith("sampler") == (POLICY_LOSSES[name].anchor == "sampler")


def test_nobody_asks_for_a_kind_of_engine_by_name() -> None:
    asked = re.compile(r"engine\.kind\s*(==|!=|in\b|not in\b)")
    modules = [path for room in ("streamrl", "producers", "consumers") for path in (ROOT / room).rglob("*.py") if "bench" not in path.parts]
    assert len(modules) > 200
    assert [str(path) for path in modules if asked.search(path.read_text())] == []


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
