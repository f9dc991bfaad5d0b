import asyncio
import os
import signal
import socket
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import pytest

from streamrl.config.page import PageConfig
from streamrl.config.tree import Config, RunConfig
from streamrl.launch import sidecars
from streamrl.launch.page import page_beside
from streamrl.page.access import page_token
from streamrl.page.address import address_of
from streamrl.page.index import open_index
from streamrl.runtime.rundir import RunDir
from tests.support.processes import alive, find, until

pytestmark = pytest.mark.process


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "demo")
    run.create()
    run.write_config(Config(run=RunConfig(name="demo", dir=str(tmp_path))))
    return run


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
    assert pages(run) == []
    assert address_of(run) == ""
    assert notes[0] == f"page: {address}" and "signal SIGKILL" in notes[1]
    assert len(notes) == 2
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
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if why == "port":
            async with beside(run, notes, port):
                await until(lambda: notes, within_s=60)
                await asyncio.sleep(0)
        else:
            with open_index(run):
                async with beside(run, notes):
                    await until(lambda: notes, within_s=60)
    expected = f"port {port} of" if why == "port" else "no other page"
    assert "exit code 1; " in notes[0] and expected in notes[0]
    assert len(notes) == 1
    assert pages(run) == []
