"""Pages that are made from the code are those that the code gives; `make docs` writes them."""

import shutil
from pathlib import Path

import msgspec
import pytest

from scripts.docs.configuration import configuration_page, field_meanings, sections
from scripts.docs.error_page import ENTRIES, said
from scripts.docs.loop_picture import loop_picture
from scripts.docs.metrics import metrics_table
from scripts.docs.pages import PARTS, WHOLE, between, stale
from streamrl import errors
from streamrl.config.load import load
from streamrl.config.tree import Config
from streamrl.errors import ConfigError, StreamRLError
from streamrl.telemetry.names import METRICS
from streamrl.telemetry.set_names import SET_METRICS

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.nats


@pytest.fixture(scope="module")
def errors_text() -> str:
    return (ROOT / "docs" / "errors.md").read_text()


def test_every_page_is_up_to_date() -> None:
    assert sorted(stale(ROOT)) == [], "run make docs"


def test_a_page_that_is_stale_or_lacks_its_marks_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    monkeypatch.setattr("scripts.docs.pages.WHOLE", {path: make for path, make in WHOLE.items() if path != "docs/errors.md"})
    assert stale(tmp_path) == {}
    page, metrics = tmp_path / "docs" / "configuration.md", tmp_path / "docs" / "metrics.md"
    page.write_text(page.read_text().replace("`run.steps`", "`run.stepps`"))
    metrics.write_text(metrics.read_text().replace("`train/loss`", "`train/lost`"))
    (tmp_path / "docs" / "pictures" / "loop.svg").unlink()
    fresh = stale(tmp_path)
    assert sorted(fresh) == ["docs/configuration.md", "docs/metrics.md", "docs/pictures/loop.svg"]
    assert fresh["docs/metrics.md"] == (ROOT / "docs" / "metrics.md").read_text()
    for _, name in PARTS:
        with pytest.raises(ValueError, match="expected the mark"):
            between("no marks", name, "new", where="page.md")


def test_every_class_of_error_has_an_entry_with_a_real_message(errors_text: str) -> None:
    classes = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, StreamRLError)}
    assert set(ENTRIES) == classes
    for kind, entry in ENTRIES.items():
        assert f"\n## {kind.__name__}\n" in errors_text
        assert bool(entry.shown) == (kind is not StreamRLError), f"{kind.__name__} needs a message that the code makes"
        assert entry.meaning and entry.action
    assert errors_text.count("\nhint: ") >= len(classes) - 2


def test_a_message_must_come_from_the_class_that_it_is_shown_under() -> None:
    def fails() -> None:
        raise ConfigError("expected this")

    assert said(ConfigError, fails) == "expected this"
    with pytest.raises(ValueError, match="to end in SchemaError"):
        said(errors.SchemaError, fails)
    with pytest.raises(ValueError, match="it ended well"):
        said(ConfigError, lambda: None)


def test_every_key_is_on_the_page_with_what_it_means() -> None:
    page = configuration_page()
    found = sections(Config())
    assert {"run", "trainer.optimizer", "engine.sglang", "evaluation.sampling"} <= {name for name, _ in found}
    for name, values in found:
        meanings = field_meanings(type(values))
        for field in msgspec.structs.fields(values):
            if isinstance(getattr(values, field.name), msgspec.Struct):
                continue
            assert f"\n| `{name}.{field.encode_name}` | " in page
            assert name.startswith("loss") or meanings.get(field.name), f"{name}.{field.name} needs a docstring below it"


def test_types_and_defaults_are_those_of_a_toml_file(tmp_path: Path) -> None:
    page = configuration_page()
    assert '| `tasks.stale` | `"drop"` \\| `"mask"` \\| `"wait"` | `"drop"` |' in page
    assert "| `evaluation.sampling.temperature` | number | `0.0` |" in page, "the section's own default, not the struct's"
    defaults = [row.split(" | ")[:3] for row in page.replace("\\|", "or").splitlines() if row.startswith("| `")]
    assert len(defaults) > 100
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "label": "2"}\n')
    lines = [f"{key.strip('| `')} = {default.strip('`')}" for key, _, default in defaults if "data." not in key and "[]" not in key]
    (tmp_path / "all.toml").write_text("\n".join(['data.train = "rows.jsonl"', *lines]) + "\n")
    config = load(tmp_path / "all.toml")
    assert msgspec.structs.replace(config, data=Config().data) == Config()


def test_every_metric_is_in_the_table() -> None:
    rows = metrics_table().splitlines()[2:]
    declared = {**METRICS, **SET_METRICS}
    assert [row.split("`")[1] for row in rows] == list(declared)
    assert all(f" {declared[row.split('`')[1]].reduction} " in row for row in rows)


def test_the_picture_is_one_for_light_and_dark_and_holds_no_foreign_parts() -> None:
    picture = loop_picture()
    assert "prefers-color-scheme: dark" in picture and 'class="ground"' in picture
    assert picture.count("http") == 1, "the namespace alone: nothing is fetched"
