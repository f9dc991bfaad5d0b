"""What is looked at before a run starts: user code, in a process of its own; and the page that is started beside it."""

import asyncio
import os
import signal
import socket
import sys
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.config.load import load
from streamrl.config.metrics import PageConfig
from streamrl.errors import ConfigError
from streamrl.launch import sidecars
from streamrl.launch.code_check import check_code
from streamrl.launch.page import page_beside
from streamrl.page.access import page_token
from streamrl.page.address import address_of
from streamrl.page.index import open_index
from streamrl.producers.functions import make_producer
from streamrl.rewards.factory import make_reward
from streamrl.runtime.rundir import RunDir
from tests.support.errors import raises
from tests.support.processes import alive, find, until
from tests.support.runs import named_run

pytestmark = pytest.mark.process

GOOD = """
def letters(task, episode):
    return 1.0

def strict(task, episode, *, word):
    return 1.0

def keep(task, episodes, *, least):
    return True

class Built:
    def __init__(self, word):
        raise RuntimeError("nobody asked for one to be built")
    async def score(self, task, episodes):
        return []

class Called:
    def __call__(self, task, episode):
        return 1.0

class Plain:
    def rollout(self, task, context):
        return []

async def roll(task, engine):
    return None

def advantages(batch, arrays):
    return 0.0

NUMBER = 3
print("said while it is imported")
"""
LINGERS = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
TOML = """
[data]
train = "train.jsonl"
[engine]
kind = "{kind}"
[trainer]
backend = "{backend}"
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    (tmp_path / "good.py").write_text(GOOD + LINGERS)
    return tmp_path


async def look(place: Path, *overrides: str, limit_s: float = 60.0, torch: bool = False, **more: Any) -> None:
    toml = place / "my.toml"
    toml.write_text(TOML.format(kind="local" if torch else "table", backend="torch" if torch else "table"))
    await check_code(load(toml, overrides), limit_s=limit_s, **more)


@pytest.mark.parametrize(
    "overrides",
    [
        ("reward.kind=good.py:letters", "producer.function=good.py:roll"),
        ("reward.kind=good.py:strict", "reward.options.word=yes"),
        ("reward.kind=good.py:Built", "reward.options.word=yes"),
        ("reward.kind=good.py:Called",),
        ("reward.kind=os.path.join",),
        ("filters.function=good.py:keep", "filters.options.least=3"),
        ("producer.function=good.py:nothing", "producer.workers=0"),
    ],
)
async def test_what_fits_passes_and_nothing_of_it_is_called(place: Path, overrides: tuple[str, ...]) -> None:
    before = set(sys.modules)
    await look(place, *overrides)
    assert not [name for name in set(sys.modules) - before if "good" in name]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("reward.kind=good.py:leters", "reward.kind"),
        ("reward.kind=good.py:strict", "reward.kind"),
        ("reward.kind=good.py:Built", "reward.kind"),
        ("reward.kind=good.py:Plain", "reward.kind"),
        ("reward.kind=good.py:NUMBER", "reward.kind"),
        ("reward.kind=no_such_package.score", "reward.kind"),
        ("producer.function=singel_turn", "producer.function"),
        ("producer.function=good.py:NUMBER", "producer.function"),
        ("producer.function=good.py:Plain", "producer.function"),
        ("producer.function=good.py:Called", "producer.function"),
        ("producer.function=good.py:strict", "producer.function"),
    ],
)
async def test_what_does_not_fit_is_named_in_the_words_of_who_builds_it(place: Path, override: str, key: str) -> None:
    with raises(ConfigError, key=key) as found:
        await look(place, override)
    config = load(place / "my.toml", (override,))
    (place / "good.py").write_text(GOOD)  # this process must not linger
    with raises(ConfigError, key=key) as built:
        make_producer(config.producer.function) if key.startswith("producer") else make_reward(config.reward)
    assert (found.value.message, found.value.hint) == (built.value.message, built.value.hint)


async def test_a_filter_that_does_not_fit_is_named(place: Path) -> None:
    for name in ("keep", "kept", "Built", "NUMBER", "letters"):
        with raises(ConfigError, key="filters.function"):
            await look(place, f"filters.function=good.py:{name}", *(["filters.options.least=3"] if name == "letters" else []))


@pytest.mark.parametrize(
    ("override", "key"), [("loss.advantage=good.py:strict", "loss.advantage"), ("loss.policy=good.py:Built", "loss.policy")]
)
async def test_code_of_the_loss_is_looked_at_too(place: Path, override: str, key: str) -> None:
    await look(place, "loss.advantage=good.py:advantages", torch=True)
    with raises(ConfigError, key=key):
        await look(place, override, torch=True)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys\nsys.exit(7)", "SystemExit: 7"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import os\nos._exit(7)", "exit code 7"),
        ("import ctypes\n\nctypes.string_at(0)", "bad.py line 3"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "signal SIGKILL"),
        ("def letters(:", "SyntaxError"),
        ("raise ValueError('x' * 1_000_000)", "ValueError"),
        ("input()", "EOFError"),
    ],
)
async def test_an_import_that_ends_the_process_is_a_sentence(place: Path, code: str, words: str) -> None:
    (place / "bad.py").write_text(code)
    with raises(ConfigError, key="reward.kind") as caught:
        await look(place, "reward.kind=bad.py:letters")
    assert words in caught.value.message and len(caught.value.message) < 5000


async def test_an_import_that_does_not_end_is_ended_and_named_by_its_line(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.launch.code_check._SAID_S", 0.1)
    notes: list[str] = []
    (place / "bad.py").write_text("import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(3600)\n")
    with raises(ConfigError, key="reward.kind") as caught:
        await look(place, "reward.kind=bad.py:letters", limit_s=10.0, note=notes.append)
    [note] = notes
    assert "bad.py:letters" in note and "10 s" in note
    assert "bad.py line 3" in caught.value.message and "still busy" in caught.value.message
    with pytest.raises(ProcessLookupError):
        os.kill(int((place / "pid").read_text()), 0)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return named_run(tmp_path / "demo")


def beside(run: RunDir, notes: list[str], port: int = 0) -> AbstractAsyncContextManager[None]:
    config = msgspec.structs.replace(run.load_config(), page=PageConfig(port=port))
    return page_beside(config, run, note=notes.append, tell=lambda address: notes.append(f"page: {address}")).kept()


def pages(run: RunDir) -> list[int]:
    return [pid for pid in find("page", str(run.path)) if alive(pid)]


async def test_a_page_that_is_killed_comes_again_under_the_same_address_and_goes_with_the_run(run: RunDir) -> None:
    notes: list[str] = []
    async with beside(run, notes):
        await until(lambda: notes, within_s=60)
        address = address_of(run)
        assert notes == [f"page: {address}"]
        (first,) = pages(run)
        os.kill(first, signal.SIGKILL)
        await until(lambda: pages(run) not in ([], [first]) and address_of(run, pid=pages(run)[0]), within_s=60)
        assert address_of(run) == address
    assert (pages(run), address_of(run)) == ([], "")
    assert len(notes) == 2 and notes[0] == f"page: {address}" and "signal SIGKILL" in notes[1]
    assert page_token(run) not in run.log_path("page-0").read_text()


async def test_a_page_that_hangs_writes_its_stacks_and_comes_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecars, "_SILENT_S", 8.0)
    notes: list[str] = []
    async with beside(run, notes):
        await until(lambda: notes, within_s=60)
        (first,) = pages(run)
        os.kill(first, signal.SIGSTOP)
        await until(lambda: pages(run) not in ([], [first]) and address_of(run, pid=pages(run)[0]), within_s=90)
    assert "SIGKILL (silent for 8 s)" in notes[1]
    assert "most recent call first" in run.log_path("page-0").read_text()


@pytest.mark.parametrize("why", ["port", "index"])
async def test_a_page_that_cannot_be_served_is_said_once_and_the_run_goes_on(run: RunDir, why: str) -> None:
    notes: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken, open_index(run) if why == "index" else nullcontext():
        port = taken.getsockname()[1]
        async with beside(run, notes, port if why == "port" else 0):
            await until(lambda: notes, within_s=60)
            await asyncio.sleep(0)
    expected = f"port {port} of" if why == "port" else "no other page"
    assert len(notes) == 1 and "exit code 1; " in notes[0] and expected in notes[0]
    assert pages(run) == []
