"""Pages that are made from the code are those that the code gives; what the README tells people to type does what it says."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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
from streamrl.telemetry.names import METRICS, REWARD_PART
from streamrl.telemetry.set_names import SET_METRICS
from tests.support.blocks import Block, blocks

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
    declared = {**METRICS, REWARD_PART.name: REWARD_PART, **SET_METRICS}
    assert [row.split("`")[1] for row in rows] == list(declared)
    assert all(f" {declared[row.split('`')[1]].reduction} " in row for row in rows)


def test_the_picture_is_one_for_light_and_dark_and_holds_no_foreign_parts() -> None:
    picture = loop_picture()
    assert "prefers-color-scheme: dark" in picture and 'class="ground"' in picture
    assert picture.count("http") == 1, "the namespace alone: nothing is fetched"


README = blocks(ROOT / "README.md")
CI, LASTS, UP = "ci runs it", "a run that lasts", "while it is up"


class Terminal:
    """Runs commands in a folder that looks like a clone with its environment, and leaves none behind."""

    def __init__(self, place: Path) -> None:
        self.place = place
        (place / ".venv").symlink_to(sys.prefix)
        (place / "examples").symlink_to(ROOT / "examples")
        self._started: list[subprocess.Popen[str]] = []

    def start(self, script: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.place,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"},
        )
        self._started.append(process)
        return process

    def run(self, script: str, timeout_s: float = 170.0) -> str:
        process = self.start(script)
        said, _ = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, said
        return said

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
            process.communicate()


def of(language: str, mark: str | None = "") -> list[Block]:
    return [block for block in README if block.language == language and mark in (None, block.mark)]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """With the files that the README has people write."""
    terminal = Terminal(tmp_path)
    [producer], [config] = of("python"), of("toml")
    (tmp_path / "agent.py").write_text(producer.text)
    (tmp_path / "my.toml").write_text(config.text)
    yield terminal
    terminal.close()


def test_every_block_is_looked_at_or_run_by_ci() -> None:
    kinds = sorted((block.language, block.mark) for block in README)
    shell = [("bash", mark) for mark in ("", LASTS, CI, CI, UP)]
    assert kinds == [*shell, ("python", ""), ("text", ""), ("text", ""), ("toml", "")]
    script = "".join(path.read_text() for path in (ROOT / ".ci").iterdir())
    commands = [command for block in of("bash", CI) for command in block.commands]
    assert commands == ["make up", "make test"]
    for command in commands:
        assert re.search(rf"^{command}\b", script, re.MULTILINE), f"{command} is not in .ci/"


def test_a_run_of_ones_own(terminal: Terminal) -> None:
    [block] = of("bash")
    said = terminal.run(block.text)
    runs = terminal.place / "runs"
    summary = json.loads((runs / "my-run" / "summary.json").read_text())
    assert summary["steps"] == load(terminal.place / "my.toml").run.steps == 100
    assert summary["reward_last"] > summary["reward_first"] + 0.3
    assert "100 of 100" in said, "the replay must have verified every version"
    assert json.loads((runs / "faster" / "branch.json").read_text())["parent"] == "my-run"
    same = re.search(r"same batches up to version 100, same parameters up to version (\d+)", said)
    assert same and int(same[1]) < 30, "the branch must show a difference; its first batches may have no reward at all"
    assert (terminal.place / "both.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_run_that_is_up_is_looked_at_joined_and_drained(terminal: Terminal) -> None:
    [lasting], [block] = of("bash", LASTS), of("bash", UP)
    [start] = lasting.commands
    activate, status, attach, down = block.commands
    terminal.run(activate)
    up = terminal.start(f"{start} --plain --set tasks.max_staleness=2 --set debug.token_delay_s=0.05")
    logs = terminal.place / "runs" / "long" / "logs"
    wait_for(logs / "trainer-0.log", "event=training version")
    assert "step" in terminal.run(status)
    guest = terminal.start(f"exec {attach}")
    wait_for(logs / "producer-1.log", "event=started")
    guest.send_signal(signal.SIGINT)
    said, _ = guest.communicate(timeout=60)
    assert guest.returncode == 0 and "producer-1 has left" in said, said
    assert "has stopped" in terminal.run(down)
    said, _ = up.communicate(timeout=60)
    assert up.returncode == 0, said


def wait_for(log: Path, text: str) -> None:
    deadline = time.monotonic() + 120
    while not (log.exists() and text in log.read_text()):
        assert time.monotonic() < deadline, f"waited in vain for {text!r} in {log.name}"
        time.sleep(0.1)
