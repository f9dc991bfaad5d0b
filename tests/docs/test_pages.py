"""All pages: commands the command line knows, TOML the loader takes, SQL that DuckDB runs, links, paths and names that are there."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import pytest

from benchmarks.cli import parser as bench_parser
from scripts.docs.configuration import sections
from streamrl.cli import main, parser
from streamrl.config.load import load
from streamrl.config.metrics import MetricsConfig
from streamrl.config.tree import Config
from streamrl.monitor.metrics_file import MetricsFile, decoded
from streamrl.monitor.series import Row
from streamrl.producers.late import LateRewards
from streamrl.telemetry.names import LENGTHS, METRICS
from tests.support.blocks import Block, blocks
from tests.support.recorded_run import FIXED, make_recorded
from tests.support.world.world import table_config

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*/README.md")])
SHELL = ("bash", "sh", "console")
BLOCKS = [block for page in PAGES for block in blocks(page)]
ENDINGS = ("toml", "json", "png", "py", "md", "parquet", "jsonl", "log")
"""Of files whose names are also those of sections."""
COMMANDS = [
    command.removeprefix("$ ")
    for block in BLOCKS
    if block.language in SHELL
    for command in block.commands
    if command.removeprefix("$ ").startswith("streamrl ")
]


def of(page: str, language: str) -> Block:
    [block] = [block for block in BLOCKS if block.page == page and block.language == language]
    return block


def test_what_is_neither_run_nor_parsed_here_is_counted() -> None:
    """Shell is parsed and TOML loaded, wherever it stands; `text` is what a screen shows. Any other block needs a test of its own."""
    others = Counter((block.page, block.language) for block in BLOCKS if block.language not in ("text", "toml", *SHELL))
    own_tests = {
        ("agents.md", "python"): 9,
        ("README.md", "python"): 2,
        ("algorithms.md", "python"): 2,  # the filter: tests/producers/children/test_filtering.py
        ("data.md", "python"): 3,  # the curriculum; images: tests/loop/test_images_run.py
        ("gpu.md", "python"): 1,
        ("gateway.md", "python"): 1,  # tests/gateway/test_sdks.py
        ("dead-letters.md", "python"): 1,
        ("sandbox.md", "python"): 1,
        ("slime-hooks.md", "python"): 1,  # tests/bridges/slime/test_trials.py
        ("metrics.md", "json"): 1,
        ("rewards.md", "json"): 4,  # tests/rewards/test_page.py
        ("metrics.md", "python"): 1,
        ("retrain.md", "python"): 3,  # tests/bridges/retrain/test_page.py
        ("metrics.md", "sql"): 1,
        ("replay.md", "sql"): 1,
        ("from-verl.md", "python"): 1,  # tests/docs/test_from_pages.py
        ("from-trl.md", "python"): 1,
    }
    assert others == own_tests, "README.md: that of the root, and that of examples/calculator_tool"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_takes_every_command(command: str) -> None:
    words = shlex.split(re.split(r"\s+#", command.replace("\\\n", " "))[0].rstrip("\\"))
    given = parser().parse_args(words[1:])
    assert callable(given.run_verb)
    if words[1] == "bench":  # hands its arguments on, `--help` too
        assert callable(bench_parser().parse_args(given.arguments).run_bench)


def test_verbs_in_the_text_are_verbs() -> None:
    said = {verb for page in PAGES for verb in re.findall(r"`streamrl ([a-z-]+)", page.read_text())}
    for verb in said:
        with pytest.raises(SystemExit) as ended:
            given = parser().parse_args([verb, "--help"])
            bench_parser().parse_args(given.arguments)
        assert ended.value.code == 0, f"streamrl {verb} is in a page"
    assert {"up", "down", "replay", "doctor"} <= said


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "toml"], ids=lambda block: f"{block.page}:{block.line}")
def test_toml_is_taken(block: Block, tmp_path: Path) -> None:
    text = re.sub(r'python = "[^"]*"', f'python = "{tmp_path / "python"}"', block.text)
    (tmp_path / "python").touch(mode=0o755)
    (tmp_path / "agent.py").touch()
    (tmp_path / "hooks.py").touch()
    (tmp_path / "teacher").mkdir()
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "operator").write_text("secret\n")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for rows in ("train.parquet", "test.parquet"):
        (tmp_path / rows).symlink_to(ROOT / "examples" / "gsm8k" / rows)
    for model in ("Qwen3-0.6B", "Qwen3-4B", "DeepSeek-R1-Distill-Qwen-1.5B"):
        (tmp_path / model).mkdir()
    for rows in ("dapo-math-17k.jsonl", "aime-2024.jsonl", "aime2024.jsonl"):
        (tmp_path / rows).touch()
    (tmp_path / "chats.jsonl").touch()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    data = "" if "[data]" in text or "[[data." in text else '[data]\ntrain = "rows.jsonl"\nheldout = "rows.jsonl"\n'
    (tmp_path / "page.toml").write_text(data + text)
    load(tmp_path / "page.toml")


def test_the_late_rewards_are_the_products_own() -> None:
    code = of("dead-letters.md", "python").text
    exec("async def page(bus, subjects, judge):\n" + textwrap.indent(code, "    "), {})
    called = re.findall(r"rewards\.(\w+)\(", code)
    assert called == ["unrewarded", "publish"] and all(hasattr(LateRewards, name) for name in called)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recording called `quickstart`, of a small run."""
    place = tmp_path_factory.mktemp("pages")
    config = table_config(place, run={"name": "quickstart", "steps": 8}, **FIXED)
    made = asyncio.run(make_recorded(place / "made", config))
    shutil.move(made.path, place / "quickstart")
    return place


def test_the_commands_on_replaying_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    for command in of("replay.md", "bash").commands:
        assert main(shlex.split(command)[1:]) == 0, command
    assert (place / "both.png").is_file()


def test_the_query_gives_a_row_for_each_batch(place: Path) -> None:
    rows = duckdb.execute(of("replay.md", "sql").text.replace("DIR", str(place / "quickstart"))).fetchall()
    assert [number for number, _ in rows] == list(range(1, 9))


def test_the_ways_to_read_metrics_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/my-run").mkdir(parents=True)
    file = MetricsFile(tmp_path / "runs/my-run/metrics", MetricsConfig(file_bytes=300))
    for number in range(1, 9):
        values = {"rollout/raw_reward": number / 8}
        file.write([Row(time_s=1.5, kind="batch", version=f"0.{number}", step=number, values=values)])
        file.write([Row(time_s=2.5, kind="window", of=of, values={"lag/versions_behind": 1.0}) for of in ("", "engine-0")])
    file.close()
    found: dict[str, Any] = {}
    exec(of("metrics.md", "python").text, found)
    assert list(found["rewards"]) == [number / 8 for number in range(1, 9)]
    assert duckdb.execute(of("metrics.md", "sql").text).fetchall() == [("", 1.0), ("engine-0", 1.0)]
    assert decoded(of("metrics.md", "json").text.encode()) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(there), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_tests_that_a_page_names_are_there(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    named = re.findall(r"`((?:tests|scripts|streamrl|producers|consumers|schemas|docs|examples)/[\w./-]*)(?:::(\w+))?`", text)
    for path, function in named:
        assert (ROOT / path).exists(), f"{page.name}: {path}"
        assert not function or f"def {function}(" in (ROOT / path).read_text(), f"{page.name}: {path}::{function}"
    for function in re.findall(r"`(test_\w+)`", text):
        assert any(f"def {function}(" in file.read_text() for file in (ROOT / "tests").rglob("*.py")), f"{page.name}: {function}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_metrics_and_keys_that_a_page_names_are_there(page: Path) -> None:
    areas = {name.partition("/")[0] for name in METRICS}
    named = re.findall(r"`([a-z]+)/([a-z0-9_]+)`", page.read_text())
    assert [f"{area}/{name}" for area, name in named if area in areas and f"{area}/{name}" not in {*METRICS, *LENGTHS}] == []
    trees = dict(sections(Config()))
    for section, key in re.findall(r"`((?:[a-z]+\.)+)([a-z_]+)(?: = [^`]*)?`", page.read_text()):
        if page.name == "agents.md" and section == "engine.":
            continue  # what a producer is given, not the section; tests/docs/test_agents.py looks at it
        struct = trees.get(section.rstrip("."))
        assert struct is None or hasattr(struct, key) or key in ENDINGS, f"{page.name}: {section}{key}"


def test_every_page_is_in_the_readmes_table() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"](docs/{page.name})" not in readme] == []


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    if page.suffix != ".md":
        return set()
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
